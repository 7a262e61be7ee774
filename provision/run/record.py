"""This machine's record of a run, ``runs/<run id>/run.json`` next to the inventory; finds a run by its id.

The nodes know their runs (``tasks/runs.py``); the record is for people and for ``diagnose``. It is a JSON object in a
folder that only its user can read. Secrets are masked (``masking``): only the plans on the nodes have them.

=============  =====================================================================================
``run``        the run's id
``state``      ``running`` (also if no command follows it), ``finished``, ``failed``, ``stopped``
``attached``   whether a command follows the run; false after a detach
``inventory``  the inventory's file name
``nodes``      names in the order of their ranks
``folder``     the run's folder on the nodes
``prefix``     the release's own path
``master``     ``ADDRESS:PORT`` of the first attempt
``launcher``   the launcher's name
``slurm``      the id of its Slurm job; missing without Slurm
``argv``       the configuration or script that the user gave, and its arguments
``unsent``     by path in the code folder, the bytes of git-ignored files that were not sent (``run/ignored.py``)
``options``    by name, the values of the options of ``train`` that can change a run
``settings``   the values of the configuration; ``variables`` those of the inventory and of ``--env``
``files``      by name, a digest of each file that was sent; ``data`` the same of data and models on the first node
``packages``   the installed versions, ``hardware`` the machines; nodes with equal ones are one entry
``plans``      by node name, the plan of its agent, without secrets
``expected``   what the run is judged by, or null (``trainer/agent/contract/expected.py``)
``preflight``  the results of the checks before the newest start (``run/preflight.py``)
``began``      the start time, in UTC
``who``        ``USER@HOST`` of the command
``seconds``    how long the command followed it
``losses``     the reported losses, in order
``steps``      the last reported step
``named``      by node, how many failures of the run named it, restarts included
``spent``      where its time went, or null (``trainer/agent/contract/effective.py``); also written by ``collect``
``why``        of a failed run: by node, the reason
``collected``  after ``collect``: ``checkpoint``, and ``began`` of the start that wrote it, from the agent's state
=============  =====================================================================================
"""

from __future__ import annotations

import contextlib
import getpass
import json
import platform
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any

from provision.errors import UsageError
from trainer.agent.contract.effective import Effective
from trainer.agent.contract.plan import Plan

FILE = "run.json"
_REMOVING = ".removing-"  # starts the name of a folder that is being deleted


def folder_of(inventory: Path, run: str) -> Path:
    """This machine's folder of a run: ``runs/RUN`` next to the inventory."""
    return inventory.parent / "runs" / run


def make_private(folder: Path) -> None:
    """Create a run's folder that only this user can read, or restrict an existing one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _close(folder)


def close_all(inventory: Path) -> None:
    """Restrict existing run folders next to an inventory to this user; old versions let every user read them."""
    for path in folder_of(inventory, "any").parent.glob(f"*/{FILE}"):
        if not path.parent.is_symlink():
            _close(path.parent)


def _close(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it is another user's, or was deleted
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)


def write(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the record with one rename, so that a reader always sees a complete one."""
    make_private(folder)
    temporary = folder / f"{FILE}.new"
    temporary.unlink(missing_ok=True)
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(folder / FILE)


def read(folder: Path) -> dict[str, Any] | None:
    """The record in a run's folder; None if it is missing or cannot be read."""
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def change(folder: Path, **values: Any) -> None:
    """Update an existing record with ``values``."""
    content = read(folder)
    if content is not None:
        write(folder, {**content, **values})


def kept(inventory: Path, newest: int | None = None) -> dict[str, dict[str, Any]]:
    """The records next to an inventory, by run id, the oldest first; with ``newest``, only so many.

    Includes the runs of other inventories there.
    """
    folder = inventory.parent / "runs"
    names = sorted(path.name for path in folder.iterdir() if path.name[0] != ".") if folder.is_dir() else []
    names = names if newest is None else names[-newest:]
    found = {name: read(folder / name) for name in names}
    return {name: content for name, content in found.items() if content is not None}


def remove(inventory: Path, run: str) -> None:
    """Delete this machine's folder of a run. It is renamed first: ``remove_leftovers`` completes a killed removal."""
    folder = folder_of(inventory, run)
    if folder.is_dir() and not folder.is_symlink():
        gone = folder.with_name(f"{_REMOVING}{run}")
        if gone.exists():
            shutil.rmtree(gone)
        shutil.rmtree(folder.rename(gone))


def remove_leftovers(inventory: Path) -> None:
    """Delete the folders that a killed ``remove`` left."""
    for path in folder_of(inventory, "any").parent.glob(f"{_REMOVING}*"):
        shutil.rmtree(path)


def author() -> str:
    """``USER@HOST`` of this command."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        user = "?"
    return f"{user}@{platform.node()}"


def now() -> str:
    """The current time as records write it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def choose(word: str | None, known: Iterable[str], *, among: str = "runs") -> str:
    """The run with an id, or with a unique start or part of one; None: the newest run.

    Ids start with the time, so the newest is the last.

    Raises:
        UsageError: no run matches, or several do; the error lists them.
    """
    ids = sorted(set(known))
    if not ids:
        raise UsageError(
            f"no run {word}: the nodes have no runs" if word else "the nodes have no runs",
            hint="to start one: clusterctl train; each run is in runs/ next to the prefix, on the nodes that it used",
        )
    if word is None:
        return ids[-1]
    if word in ids:
        return word
    matches = [name for name in ids if name.startswith(word)] or [name for name in ids if word and word in name]
    if len(matches) == 1:
        return matches[0]
    listed = ", ".join((matches or ids)[-8:])
    what = f"{word} matches {len(matches)} {among}" if matches else f"no run matches {word}"
    raise UsageError(what, hint=f"{'choose one of' if matches else 'existing runs'}: {listed}")


@dataclass(frozen=True)
class TrainResult:
    """A run that has finished, or that continues without this command.

    Attributes:
        run: its id.
        state: ``finished``, or ``detached`` if it continues.
        folder: its record on this machine.
        nodes: in the order of their ranks.
        world_size: the number of all processes.
        seconds: how long the command followed it.
        steps: the last reported step.
        first_loss: the first reported loss.
        last_loss: the last reported loss.
        output: the path on rank 0's node.
        network: the network that NCCL used; "" if unknown.
        unsent: by path in the code folder, the bytes of git-ignored files that were not sent.
        spent: where its time went; None if unknown, as for a detached run.
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
    unsent: Mapping[str, int] = field(default_factory=dict)
    spent: Effective | None = None


def output_of(plan: Plan, folder: str) -> str:
    """The path of the trained model on rank 0's node; the run's folder if that is unknown."""
    if plan.resume:
        return str(PurePosixPath(folder) / plan.resume.output)
    return str((PurePosixPath(folder) / plan.progress).parent) if plan.progress else folder
