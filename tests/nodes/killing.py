"""Runs one deploy and kills it: ``killing.py FOLDER BUNDLE EVENT [SIGNAL [WORD...]]``.

EVENT is the number of the event at which the signal comes. Without SIGNAL it is SIGKILL, and no command line is around
the deploy; with one it is the command, as users type it, or the command of the WORDs.
Events are the starts and ends of stages: the number of progress events depends on the machine's speed. With
EVENT 0 nothing is killed, and for each event "started" or "finished" is printed.
"""

import os
import signal
import sys
from pathlib import Path

from provision.cli import main as clusterctl
from provision.inventory import load
from provision.model import StageFinished, StageStarted
from provision.output import Reporter
from provision.session import Session
from provision.tasks.deploy import deploy


def signal_at(wanted: int, name: str) -> None:
    """Make the command line of this process send itself a signal at an event."""
    events = []
    shown = Reporter.__call__

    def show(reporter, event) -> None:
        shown(reporter, event)
        if isinstance(event, StageStarted | StageFinished):
            events.append(event)
            if len(events) == wanted:
                os.kill(os.getpid(), signal.Signals[name])

    Reporter.__call__ = show


def first(wanted: int, name: str) -> str:
    """The same as Python for ``command.run``, whose processes need not import ``clusterctl`` again."""
    folder = str(Path(__file__).parent)
    return f"import sys; sys.path.append({folder!r}); import killing; killing.signal_at({wanted}, {name!r})"


def main() -> None:
    folder, bundle, wanted = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    if sys.argv[4:]:
        signal_at(wanted, sys.argv[4])
        os.chdir(folder)
        clusterctl(sys.argv[5:] or ["deploy", str(bundle)])
    inventory = load(folder / "inventory.yaml")
    events = []

    def emit(event) -> None:
        if isinstance(event, StageStarted | StageFinished):
            events.append(event)
        if len(events) == wanted:
            os.kill(os.getpid(), signal.SIGKILL)

    with Session(inventory, emit=emit) as session:
        deploy(session, bundle)
    sys.stdout.write(" ".join("started" if isinstance(event, StageStarted) else "finished" for event in events))


if __name__ == "__main__":
    main()
