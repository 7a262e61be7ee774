"""Starts a run's command for one attempt: its environment, its arguments and where its output goes.

The command is a launcher that starts the ranks, with its output in a pipe. Or the agent starts the command once for
each local rank (``Plan.each_rank``): then the output goes to files, in the layout of torchrun's ``--log-dir``.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from ..contract.plan import CHECKPOINT, PORT, Plan
from ..node_plan import NodePlan
from ..processes.proc import NODE, RUN, die_with_parent, reap
from ..processes.tracker import Group

KEPT = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "TZ", "TMPDIR", "LANG", "XDG_RUNTIME_DIR")
KEPT_PREFIXES = ("LC_", "NCCL_", "CUDA_", "NVIDIA_", "UCX_")  # what a site sets for its machines

Child = Tuple[Optional[int], "subprocess.Popen[bytes]"]  # the rank; None: a launcher


class Ended(NamedTuple):
    """A process started by the agent that has exited; ``rank`` is None for a launcher."""

    rank: Optional[int]
    pid: int
    status: int


class Command:
    """The processes of one attempt that the agent started itself.

    Attributes:
        status: the wait status of the command; None while a process is running. After a failure, the status of the
        first
            process that failed.
        pid: the launcher, or the first local rank.
        output: the launcher's output; None where ranks write to files.
    """

    def __init__(self, children: List[Child]) -> None:
        self.status: Optional[int] = None
        self.pid = children[0][1].pid
        self.output = children[0][1].stdout
        self._running = list(children)
        self._failure = 0

    @property
    def running(self) -> Set[int]:
        """The processes that have not exited."""
        return {child.pid for _, child in self._running}

    def reap(self) -> Iterator[Ended]:
        """Reap the processes that have exited since the last call."""
        for one in list(self._running):
            rank, child = one
            status = reap(child.pid)
            if status is None:
                continue
            child.returncode = status  # Popen must not wait for it again
            self._running.remove(one)
            self._failure = self._failure or status
            if not self._running:
                self.status = self._failure
            yield Ended(rank, child.pid, status)


def environment(plan: Plan, env: Dict[str, str], inherited: Dict[str, str]) -> Dict[str, str]:
    """The command's environment. It does not depend on how the agent was started."""
    clean = {name: value for name, value in inherited.items() if name in KEPT or name.startswith(KEPT_PREFIXES)}
    for name in plan.unset:
        clean.pop(name, None)
    return {**clean, **env, RUN: plan.run, NODE: plan.node}


def for_attempt(plan: NodePlan, port: Optional[int], checkpoint: Optional[str]) -> Tuple[List[str], Dict[str, str]]:
    """The arguments and variables of one attempt, with its port and its checkpoint."""
    argv, env = list(plan.data.argv), dict(plan.data.env)
    if port is not None:
        argv = [str(port) if word == PORT else word for word in argv]
        env["MASTER_PORT"] = str(port)
    if checkpoint is not None and plan.data.resume is not None:
        path = str(plan.folder / plan.data.resume.output / checkpoint)
        argv += [word.replace(CHECKPOINT, path) for word in plan.data.resume.argv]
        env.update({name: value.replace(CHECKPOINT, path) for name, value in plan.data.resume.env.items()})
    return argv, env


def make_private(path: Path) -> None:
    """Create a folder that only this user may write. Refuses one that another user created."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError("%s is not a folder that only this user may write; remove it" % path)


def start(plan: NodePlan, decision: Dict[str, Any], group: Group) -> Command:
    """Start the command for one attempt.

    Args:
        plan: the plan.
        decision: rank 0's decision on the attempt: its ``port`` and ``checkpoint``.
        group: the cgroup that the processes enter.

    Raises:
        OSError, ValueError, TypeError: a process cannot be started. Others may have been.
    """
    for folder in plan.data.private:
        make_private(Path(folder))
    plan.rank_logs.mkdir(parents=True, exist_ok=True)
    argv, variables = for_attempt(plan, decision.get("port"), decision.get("checkpoint"))
    env = environment(plan.data, variables, dict(os.environ))
    prepare: List[Callable[[], None]] = [group.preexec(), die_with_parent()]

    def before_exec() -> None:
        for each in prepare:
            each()

    if not plan.data.each_rank:
        return Command([(None, _start(plan, argv, env, subprocess.PIPE, subprocess.STDOUT, before_exec))])
    logs = plan.rank_logs / str(time.time_ns()) / "attempt_0"
    children: List[Child] = []
    for local in range(plan.data.processes):
        rank = plan.data.first_rank + local
        own = logs / str(local)
        own.mkdir(parents=True)
        ranked = dict(env, RANK=str(rank), LOCAL_RANK=str(local))
        with (own / "stdout.log").open("ab") as out, (own / "stderr.log").open("ab") as err:
            children.append((rank, _start(plan, argv, ranked, out, err, before_exec)))
    return Command(children)


def _start(
    plan: NodePlan, argv: List[str], env: Dict[str, str], stdout: Any, stderr: Any, before_exec: Callable[[], None]
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        argv,
        env=env,
        cwd=plan.cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=before_exec,  # noqa: PLW1509 - it takes no lock that another thread could hold
    )
