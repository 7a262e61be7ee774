"""What this machine keeps of a run: ``runs/<run id>/run.json`` beside the inventory, and how a run is found by a word.

The nodes know their runs themselves (``tasks/runs.py``); the record is what a person looks into, and what tells how a
run was meant. It is a JSON object in a folder that its user alone can read. Secrets in it are replaced (``masking``):
only the plans on the nodes hold them.

=============  =====================================================================================
``run``        the run's id
``state``      ``running`` (also where nobody follows it any more), ``finished``, ``failed``, ``stopped``
``attached``   whether a command follows the run; false after a detach
``inventory``  the inventory's file name
``nodes``      names in the order of their ranks
``folder``     the run's folder on the nodes
``prefix``     the release's own path
``master``     ``ADDRESS:PORT`` of the first attempt
``launcher``   which one
``argv``       what the user gave: a configuration or a script, and its arguments
``plans``      by node name, what its agent was given, without secrets
``began``      when, in UTC
``who``        ``USER@HOST`` of the command
``seconds``    how long it was followed, at its end
``losses``     that were told, in order
``steps``      the last one that was told
``why``        of a run that failed: by node, the reason
=============  =====================================================================================
"""

from __future__ import annotations

import contextlib
import getpass
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any

from provision.errors import UsageError
from trainer.agent.contract.plan import Plan

FILE = "run.json"


def folder_of(inventory: Path, run: str) -> Path:
    """This machine's folder of a run: ``runs/RUN`` beside the inventory."""
    return inventory.parent / "runs" / run


def make_private(folder: Path) -> None:
    """Make a run's folder here for this user alone, also one that another version made for everybody."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _close(folder)


def close_all(inventory: Path) -> None:
    """Make the runs' folders beside an inventory private that another version made for everybody."""
    for path in folder_of(inventory, "any").parent.glob(f"*/{FILE}"):
        if not path.parent.is_symlink():
            _close(path.parent)


def _close(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it is another user's, or was deleted
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)


def write(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the record in one rename: whoever reads it sees all of it."""
    make_private(folder)
    temporary = folder / f"{FILE}.new"
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(folder / FILE)


def read(folder: Path) -> dict[str, Any] | None:
    """The record in a run's folder; None where there is none, or none that can be read."""
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def change(folder: Path, **values: Any) -> None:
    """Put ``values`` into a record, where there is one."""
    content = read(folder)
    if content is not None:
        write(folder, {**content, **values})


def kept(inventory: Path) -> dict[str, dict[str, Any]]:
    """The records beside an inventory, by run id, the oldest first; of other inventories in its folder too."""
    folder = inventory.parent / "runs"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    found = {name: read(folder / name) for name in names}
    return {name: content for name, content in found.items() if content is not None}


def author() -> str:
    """``USER@HOST`` of this command."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        user = "?"
    return f"{user}@{platform.node()}"


def now() -> str:
    """This moment, as records say it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def choose(word: str | None, known: Iterable[str], *, among: str = "runs") -> str:
    """The run that a word means: an id, the unique beginning (or another unique part) of one, or for None the newest.

    Ids begin with the time, so the newest is the last.

    Raises:
        UsageError: there is none, or there are several; the error lists them.
    """
    ids = sorted(set(known))
    if not ids:
        raise UsageError(
            f"there is no run{f' called {word}' if word else ''}: the nodes have none",
            hint="to start one: clusterctl train; a run is on the nodes that it ran on, in runs/ beside the prefix",
        )
    if word is None:
        return ids[-1]
    if word in ids:
        return word
    matches = [name for name in ids if name.startswith(word)] or [name for name in ids if word and word in name]
    if len(matches) == 1:
        return matches[0]
    listed = ", ".join((matches or ids)[-8:])
    what = f"{word} can mean {len(matches)} {among}" if matches else f"no run is called {word}"
    raise UsageError(what, hint=f"{'one of' if matches else 'there are'}: {listed}")


@dataclass(frozen=True)
class TrainResult:
    """A run that has finished, or goes on without this command.

    Attributes:
        run: its id.
        state: ``finished``, or ``detached``: it goes on.
        folder: this machine's record of it.
        nodes: in the order of their ranks.
        world_size: processes in all.
        seconds: how long it was followed.
        steps: the last one that was told.
        first_loss: the first that was told.
        last_loss: the last one.
        output: the path on rank 0's node.
        network: what NCCL's own log says that it used; "" when it says nothing.
    """

    run: str
    state: str
    folder: Path
    nodes: tuple[str, ...]
    world_size: int
    seconds: float
    steps: int | None
    first_loss: float | None
    last_loss: float | None
    output: str
    network: str = ""


def output_of(plan: Plan, folder: str) -> str:
    """Where rank 0's node has the trained model, or at least the run's folder."""
    if plan.resume:
        return str(PurePosixPath(folder) / plan.resume.output)
    return str((PurePosixPath(folder) / plan.progress).parent) if plan.progress else folder
