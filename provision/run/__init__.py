"""A training run: the job, the files sent with it, and what the nodes report about it.

Modules are imported on first use, because ``status`` and ``logs`` need few of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from provision.run.config import config_files
    from provision.run.files import LIMIT, WORK, Entry, RunFiles, tar_stream
    from provision.run.job import Job
    from provision.run.spec import Facts, Launch, RunSpec, Worker, new_run_id, plan_name, world_size

__all__ = [
    "LIMIT",
    "WORK",
    "Entry",
    "Facts",
    "Job",
    "Launch",
    "RunFiles",
    "RunSpec",
    "Worker",
    "config_files",
    "new_run_id",
    "plan_name",
    "tar_stream",
    "world_size",
]

_MODULES = {
    **dict.fromkeys(("LIMIT", "WORK", "Entry", "RunFiles", "tar_stream"), "files"),
    **dict.fromkeys(("Facts", "Launch", "RunSpec", "Worker", "new_run_id", "plan_name", "world_size"), "spec"),
    "Job": "job",
    "config_files": "config",
}


def __getattr__(name: str) -> Any:  # PEP 562
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
