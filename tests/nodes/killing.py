"""Runs one deploy and kills it: ``killing.py FOLDER BUNDLE EVENT``; the number of the event at which SIGKILL comes.

Events are the beginnings and ends of stages: how often progress is told depends on how quick the machine is. With
EVENT 0 nothing is killed, and the number of events is printed.
"""

import os
import signal
import sys
from pathlib import Path

from provision.inventory import load
from provision.model import StageFinished, StageStarted
from provision.tasks.deploy import deploy


def main() -> None:
    folder, bundle, wanted = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    inventory = load(folder / "inventory.yaml")
    events = []

    def emit(event) -> None:
        if isinstance(event, StageStarted | StageFinished):
            events.append(event)
        if len(events) == wanted:
            os.kill(os.getpid(), signal.SIGKILL)

    deploy(inventory, inventory.nodes, bundle, emit=emit)
    sys.stdout.write(str(len(events)))


if __name__ == "__main__":
    main()
