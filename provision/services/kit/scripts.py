"""The scripts that nodes run for services: steps, the functions that they call, and a lock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from provision.errors import UsageError
from provision.model import Step
from provision.render import render
from provision.script import compile_steps
from provision.services.kit.plans import STAGES

if TYPE_CHECKING:
    from provision.services.kit.plans import Plan

STATE = PurePosixPath("/var/lib/clusterctl/services")  # on a node: the journals that undo reads
LOCK_SECONDS = 30  # how long a script waits for another command's script
REVIEW = "review"  # the token of scripts that are written for review


def apply_script(steps: Sequence[Step], token: str, *, dry_run: bool = False, state: PurePosixPath = STATE) -> str:
    """The script for one node and stage; a dry run takes no lock, since it writes nothing."""
    library = render("services/library.sh.j2", state=state)
    lock = "" if dry_run else render("services/lock.sh.j2", folder=state.parent, seconds=LOCK_SECONDS)
    return compile_steps(steps, token=token, dry_run=dry_run, prelude=library + lock)


def verify_script(steps: Sequence[Step], token: str) -> str:
    """The script that verifies a node's services. It continues after a failed step."""
    library = render("services/library.sh.j2", state=STATE)
    return compile_steps(steps, token=token, prelude=library, keep_going=True)


def undo_step(name: str) -> Step:
    """The step that undoes a service: it runs the journal backwards."""
    folder = str(STATE / name)
    return Step(
        f"{name}: undo",
        unless=f"[ ! -d {folder} ]",
        do=f"cc_service={name}\n{render('services/undo.sh.j2')}",
    )


def write_scripts(folder: Path, plan: Plan) -> None:
    """Write the scripts for review, one file for each node and stage.

    Raises:
        UsageError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, stage in enumerate(STAGES, 1):
            for name, steps in plan.steps.get(stage, {}).items():
                path = folder / f"{name}-0{number}-{stage}.sh"
                path.write_text(apply_script(steps, REVIEW), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the scripts to {folder}: {error.strerror}") from error
