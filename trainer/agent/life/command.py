"""Starts a run's command: its environment, its argv for one attempt, and where its output goes."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from pathlib import Path
from typing import Any, Dict, List, Optional

from plan import Plan
from processes.cgroup import Group
from processes.proc import NODE, RUN, die_with_parent

KEPT = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "TZ", "TMPDIR", "LANG", "XDG_RUNTIME_DIR")
KEPT_PREFIXES = ("LC_", "NCCL_", "CUDA_", "NVIDIA_", "UCX_")  # what a site sets for its machines


def environment(plan: Dict[str, Any], inherited: Dict[str, str]) -> Dict[str, str]:
    """The command's environment: clean, so that it is the same however the agent was started."""
    env = {name: value for name, value in inherited.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}
    for name in plan.get("unset", []):
        env.pop(name, None)
    env.update(plan["env"])
    env[RUN] = plan["run"]
    env[NODE] = plan["node"]
    return env


def for_attempt(plan: Plan, port: Optional[int], checkpoint: Optional[str]) -> Dict[str, Any]:
    """``argv`` and ``env`` of one attempt: with its port, and with the checkpoint it begins from."""
    argv = list(plan.given["argv"])
    env = dict(plan.given["env"])
    if port is not None:
        argv = [str(port) if word == "{port}" else word for word in argv]
        env["MASTER_PORT"] = str(port)
    if checkpoint is not None and plan.output is not None:
        path = str(plan.output / checkpoint)
        resume = plan.given["resume"]
        argv += [word.replace("{checkpoint}", path) for word in resume.get("argv", [])]
        env.update({name: value.replace("{checkpoint}", path) for name, value in resume.get("env", {}).items()})
    return dict(plan.given, argv=argv, env=env)


def make_private(path: Path) -> None:
    """Make a folder that only this user may write, or refuse one that somebody else has put there."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError("%s is not a folder that only this user may write; remove it" % path)


def start(plan: Plan, attempt: Dict[str, Any], group: Group) -> "subprocess.Popen[bytes]":
    """Start the command of one attempt (from ``for_attempt``), its output a pipe.

    Raises:
        OSError, ValueError, TypeError: it cannot be started.
    """
    for folder in plan.given.get("private", []):
        make_private(Path(folder))
    rank_logs = plan.at("rank_logs")
    if rank_logs:
        rank_logs.mkdir(parents=True, exist_ok=True)
    prepare: List[Any] = [group.entering(), die_with_parent()]

    def before_exec() -> None:
        for each in prepare:
            each()

    return subprocess.Popen(
        attempt["argv"],
        env=environment(attempt, dict(os.environ)),
        cwd=plan.at("cwd") or plan.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=before_exec,  # noqa: PLW1509 - it takes no lock that another thread could hold
    )
