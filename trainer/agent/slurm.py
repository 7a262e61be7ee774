"""What agents and the batch script of a Slurm job do for a run that survives the loss of nodes.

A job ends with its batch script, which waits for srun, which waits for the agents. After the loss of the job's first
node neither of them exists, and Slurm lets a job with ``--no-kill`` keep its other nodes until its time limit. So
``end_job`` follows the agent. An agent that was in the meeting that ended the run cancels the job. An agent that ended
alone may be on the smaller part of a divided network, while the others train: it cancels the job only when Slurm has
taken all other nodes from it.

A job names its nodes, because they have the run's folder. ``request_usable`` removes lost nodes from the request of a
job that waits in the queue again, so that it does not wait for them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from .run_files import NodePlan, read_state

ANSWER = 20.0  # seconds for a program of Slurm: it has 30 s from SIGTERM to SIGKILL (``KillWait``)
CONNECT = 5.0  # seconds for a connection to srun
LOOKING = 3  # agents that look for srun, if a meeting of the agents has ended the run: one may not reach Slurm
UNDISTURBED = 2  # the same in a run that has lost no node. srun logs an error for each; one may be on srun's own node
SETTLE = 5.0  # seconds in which the agents on the other nodes end too
ALONE = 3600.0  # seconds in which Slurm takes lost nodes from the job: its SlurmdTimeout, mostly 300 s
LOOK = 10.0  # seconds between two looks at the job
# Starts of the words of sinfo's %T for nodes on which no job can start.
LOST = ("down", "drain", "fail", "error", "unk", "inval")

Run = Callable[[List[str]], Optional[str]]


class Request(NamedTuple):
    """The nodes that the job asked for, by Slurm's names, and with how many of them it may start."""

    nodes: Tuple[str, ...]
    least: int


def run_program(argv: List[str]) -> Optional[str]:
    """The output of a program of Slurm; None if it fails. Its messages are in the job's log."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=ANSWER, check=False, env=_plain(os.environ)
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def _plain(env: Mapping[str, str]) -> Dict[str, str]:
    """The environment without the user's options for Slurm's programs, which change their output."""
    options = ("SQUEUE_", "SINFO_", "SCANCEL_", "SCONTROL_")
    return {name: value for name, value in env.items() if not name.startswith(options)}


def end_job(
    plan: NodePlan,
    env: Mapping[str, str],
    run: Run = run_program,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """End the job of a run that is over, if nothing else does.

    Args:
        plan: the node's plan.
        env: the variables that Slurm sets for a process of a step.
        run: runs a program of Slurm.
        sleep: waits for so many seconds.
    """
    job, state = env.get("SLURM_JOB_ID", ""), read_state(plan.logs)
    together = state.get("together") is True
    looking = LOOKING if state.get("excluded") or state.get("state") == "failed" else UNDISTURBED
    if not job.isdigit() or (together and _turn(plan, state) >= looking) or not _is_srun_gone(env):
        return
    if together:
        sleep(SETTLE)
        _cancel(job, run)
        return
    until = time.monotonic() + ALONE
    while time.monotonic() < until:
        nodes = run(["squeue", "-h", "-j", job, "-t", "RUNNING", "-o", "%N"])
        if nodes is not None and nodes.strip() in ("", env.get("SLURMD_NODENAME")):
            if nodes.strip():
                _cancel(job, run)
            return  # else the job ends, or waits in the queue again
        sleep(LOOK)


def request_usable(env: Mapping[str, str], request: Request, run: Run = run_program) -> None:
    """Let a job that waits in the queue again ask only for nodes that are not lost, if these are enough.

    Not while it is running: then Slurm would take nodes from it. Slurm refuses it for a job that ends.
    """
    job, had = env.get("SLURM_JOB_ID", ""), env.get("SLURM_JOB_NUM_NODES", "")
    if run(["squeue", "-h", "-j", job, "-t", "RUNNING", "-o", "%i"]) != "":
        return
    answer = run(["sinfo", "-h", "-N", "-n", ",".join(request.nodes), "-o", "%N|%T"])
    if answer is None:
        return
    states = dict(line.split("|", 1) for line in answer.splitlines() if "|" in line)
    usable = [name for name in request.nodes if not _is_lost(states.get(name, ""))]
    fewer = len(usable) < len(request.nodes) or (had.isdigit() and int(had) < len(request.nodes))
    if fewer and request.least <= len(usable):
        count = str(len(usable))
        update = ["ReqNodeList=" + ",".join(usable), "NumNodes=" + count, "NumTasks=" + count]
        run(["scontrol", "update", "JobId=" + job, *update])


def _is_lost(state: str) -> bool:
    """Whether no job can start on a node in this state. ``*``: it does not answer."""
    return not state or state.startswith(LOST) or "*" in state


def _is_srun_gone(env: Mapping[str, str]) -> bool:
    """Whether srun, which waits for the tasks of the step, no longer listens. False if its address is unknown."""
    host, port = env.get("SLURM_LAUNCH_NODE_IPADDR", ""), env.get("SLURM_SRUN_COMM_PORT", "")
    if not host or not port.isdigit() or is_own(host):
        return False
    for _ in range(2):
        try:
            socket.create_connection((host, int(port)), CONNECT).close()
        except (OSError, OverflowError):
            continue
        return False
    return True


def is_own(host: str) -> bool:
    """Whether it is an address of this node: without srun, Slurm ends the job there."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
            sock.bind((host, 0))
    except OSError:
        return False
    return True


def _turn(plan: NodePlan, state: Dict[str, Any]) -> int:
    """How many agents before this one are left."""
    names = plan.data.link.nodes if plan.data.link is not None else (plan.node,)
    excluded = state.get("excluded")
    return sum(1 for name in names[: plan.rank] if not isinstance(excluded, dict) or name not in excluded)


def _cancel(job: str, run: Run) -> None:
    """Cancel the job, but not one that Slurm has put back into its queue."""
    run(["scancel", "--state=RUNNING", job])
