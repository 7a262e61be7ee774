"""Where a run's program may have written files for TensorBoard and W&B, from its plan. Pure.

W&B's layout (wandb 0.17 to 0.31, ``wandb/sdk/wandb_settings.py``): below ``WANDB_DIR``, by default the working folder,
a folder ``wandb/offline-run-TIME-ID`` with ``run-ID.wandb``, which ``wandb sync`` uploads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

_OFFLINE = re.compile(r"(.*/wandb/offline-run-[^/]+)/([^\x00]+)", re.DOTALL)
_DATA = re.compile(r"run-[^/]+\.wandb")


@dataclass(frozen=True)
class Places:
    """Folders on one node.

    Attributes:
        output: the folder of the checkpoints; "" if unknown.
        tensorboard: the folder of TensorBoard's files; "" if unknown.
        wandb: folders in which W&B may have put its runs.
        mode: ``WANDB_MODE``.
    """

    output: str = ""
    tensorboard: str = ""
    wandb: tuple[str, ...] = ()
    mode: str = ""


def places(plan: Mapping[str, Any], folder: PurePosixPath) -> Places:
    """The places in a plan as a node has it; a field with a wrong type is ignored.

    Args:
        plan: ``plan-RANK.json``; it may be from another version.
        folder: the run's folder, to which its paths are relative.
    """
    env, resume = _object(plan.get("env")), _object(plan.get("resume"))
    cwd = folder / _text(plan.get("cwd"))
    output = _text(resume.get("output"))
    progress = _text(plan.get("progress"))
    found = str(folder / output) if output else str((folder / progress).parent) if progress else ""
    logging = _text(env.get("TENSORBOARD_LOGGING_DIR"))
    wandb = {str(cwd / _text(env.get("WANDB_DIR")) / "wandb"), str(cwd / "wandb")}
    return Places(found, str(cwd / logging) if logging else "", tuple(sorted(wandb)), _text(env.get("WANDB_MODE")))


def outermost(folders: Iterable[str]) -> tuple[str, ...]:
    """The folders without those that are inside another one."""
    paths = sorted({PurePosixPath(folder) for folder in folders if folder})
    return tuple(str(path) for path in paths if not any(other in path.parents for other in paths))


def offline_runs(files: Iterable[str]) -> dict[str, frozenset[str]]:
    """The offline W&B runs among absolute paths of files: by folder, the files in it."""
    found: dict[str, set[str]] = {}
    for path in files:
        if match := _OFFLINE.fullmatch(path):
            found.setdefault(match[1], set()).add(match[2])
    return {
        folder: frozenset(inside)
        for folder, inside in sorted(found.items())
        if any(_DATA.fullmatch(name) for name in inside)
    }


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) and "\0" not in value else ""
