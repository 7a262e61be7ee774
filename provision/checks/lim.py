"""Limits of the session: the checks."""

import math

from provision.checks.kit import (
    SESSION,
    Answer,
    Judgement,
    Level,
    each_node,
    human,
    many,
    may,
    ok,
    soft_limit,
    threshold,
    tightest,
    unit_of,
    unknown,
    unread,
)

_FIX = "put `limits: {}` under `services` in the inventory, `clusterctl deploy`, and log in again"
_IPC_LOCK = 14


@each_node(
    "lim.memlock",
    "memory may be locked without a limit",
    probe=SESSION,
    why="NCCL cannot register its buffers with the InfiniBand card: the job ends with 'ibv_reg_mr failed' or ENOMEM.",
)
def memlock(answer: Answer) -> Judgement:
    """FAIL where the node has RDMA devices, else WARN.

    RDMA registers what it sends as locked memory. ``CAP_IPC_LOCK`` (14 in ``<linux/capability.h>``), which root has, is
    not bound by the limit (getrlimit(2)).
    """
    limit = soft_limit(answer, "locked memory")
    if limit is None:
        return unread(answer)
    if limit == "unlimited":
        return ok("unlimited")
    if may(answer, _IPC_LOCK):
        return ok(f"{human(int(limit))}, which does not bind this user (CAP_IPC_LOCK)")
    devices = sum(line.startswith("device ") for line in answer.lines)
    observed = f"{human(int(limit))}" + (f" with {many(devices, 'RDMA device')}" if devices else "")
    return Judgement("FAIL" if devices else "WARN", observed, expected="unlimited", fix=_FIX)


_SYS_RESOURCE = 24


def _files(answer: Answer) -> Level | None:
    limit = soft_limit(answer, "open files")
    return None if limit is None else Level(math.inf if limit == "unlimited" else int(limit), limit)


def _processes(answer: Answer) -> Level | None:
    limit = soft_limit(answer, "processes")
    if limit is None:
        return None
    exempt = ", which does not bind this user (CAP_SYS_RESOURCE)" if may(answer, _SYS_RESOURCE) else ""
    return Level(math.inf if limit == "unlimited" else int(limit), limit, exempt)


def _tasks(answer: Answer) -> Level | Judgement:
    if not any(line.startswith("group ") for line in answer.lines):
        return unknown("no control groups at /sys/fs/cgroup")
    found = tightest(answer)
    if found is None:
        return ok("no limit")
    fix = f"as root: systemctl set-property {unit_of(found[0])} TasksMax=infinity"
    return Level(found[1], f"{found[1]} in {found[0]}", fix=fix)


CHECKS = (
    threshold(
        "lim.nofile",
        "enough files may be open at once",
        probe=SESSION,
        read=_files,
        least="files",
        fail_below="files_least",
        limits={"files": 65536, "files_least": 4096},
        expected="at least {limit:.0f}",
        fix="put `limits: {}` under `services` in the inventory, `clusterctl deploy`, and log in again",
        why=(
            "Data loaders and NCCL's sockets run out of file descriptors: 'Too many open files', often "
            "hours into a run."
        ),
        about="""
        Data loaders that share tensors by file descriptor hold one for each, and every rank opens sockets to many
        others. The default soft limit is 1024 (getrlimit(2)); 65536 leaves room for eight ranks with their loaders.
        """,
    ),
    threshold(
        "lim.nproc",
        "enough processes and threads may run",
        probe=SESSION,
        read=_processes,
        least="processes",
        fail_below="processes_least",
        limits={"processes": 16384, "processes_least": 4096},
        expected="at least {limit:.0f}",
        fix="write the line `* - nproc unlimited` to /etc/security/limits.d/91-nproc.conf, and log in again",
        why=(
            "Eight ranks with data loaders and NCCL's threads are thousands: 'can't start new thread' in "
            "the middle of a run."
        ),
        about="""
        ``RLIMIT_NPROC`` counts the threads of all of a user's processes; it does not bind ``CAP_SYS_RESOURCE`` (24 in
        ``<linux/capability.h>``; getrlimit(2)), which root has.
        """,
    ),
    threshold(
        "lim.tasks",
        "the session's control group allows enough threads",
        probe=SESSION,
        read=_tasks,
        least="tasks",
        fail_below="tasks_least",
        limits={"tasks": 16384, "tasks_least": 4096},
        expected="at least {limit:.0f}",
        why="A limit of the login's slice makes thread creation fail although ulimit shows plenty.",
        about="""
        systemd puts every login into a slice whose ``TasksMax`` is a share of the machine's
        (systemd.resource-control(5)); the kernel counts threads in ``pids.max`` of every group around the session
        (cgroup v2, "PID Interface Files"). Unlike ``ulimit -u`` it binds root, and ``ulimit`` does not show it.
        """,
    ),
)
