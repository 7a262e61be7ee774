"""``agent stop``: asks the agent to stop, ends the run itself without an agent, and verifies that nothing is left."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import time
from typing import Any, Dict, List, Optional, Set, Tuple

from .contract.plan import LAST_COPIES
from .probe import can_listen
from .processes import Stat, open_pidfd, send, stat_of
from .run_files import FINAL, NodePlan, lock_run, read_state, running_agents, start_time, write_request
from .start import owner_name
from .supervisor.guard import finish
from .tracker import STUBBORN, Group, ProcessTracker, end_all

ANSWER = 5.0  # seconds in which a running agent must start to end the run
SLACK = 20.0  # seconds beyond the grace period and ``STUBBORN``: for the agents' last meeting
PROOF = 10.0  # seconds in which the driver frees memory and the kernel frees the port
LOOK = 0.1  # seconds between looks where there is no event to wait for
ASK = ("nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader")


class RefusedError(Exception):
    """The run belongs to another user. The text names the owner."""


def stop(plan: NodePlan, *, save: bool, who: str, patience: Optional[float]) -> Dict[str, Any]:
    """Stop a run on this node. Returns the answer that ``__main__.py`` documents.

    Raises:
        RefusedError: it belongs to another user.
        OSError: the run's folder cannot be used.
    """
    allowed(plan)
    tracker = ProcessTracker(plan.run, plan.node, Group(plan.run, plan.node))
    before = tracker.all()
    state = read_state(plan.logs)
    agents = running_agents(state)
    if agents:
        if patience is None:
            patience = plan.grace + STUBBORN + SLACK + plan.data.memory_patience
            patience += plan.data.save_patience if save else 0.0
        if not _ask(plan, agents, save=save, who=who, patience=patience):
            _kill(agents)
    left = _end(plan, tracker)
    state = read_state(plan.logs)
    if state and state.get("state") not in FINAL:
        state = _write_end(plan, left)
    proof = _prove(plan, tracker, state, before)
    tracker.close()
    return dict(
        proof, event="stopped", step=state.get("step"), saved=bool(state.get("saved")), state=state.get("state")
    )


def allowed(plan: NodePlan) -> None:
    """Refuse the run of another user.

    Raises:
        RefusedError: the run belongs to another user.
    """
    owner = plan.path.stat().st_uid
    if os.geteuid() not in (0, owner):
        raise RefusedError(refusal(owner))


def refusal(owner: int) -> str:
    """The message for a user who may not stop a run."""
    name = owner_name(owner)
    return "the run belongs to %s: only %s or root may stop it" % (name, name)


def _ask(plan: NodePlan, agents: List[Tuple[int, str]], *, save: bool, who: str, patience: float) -> bool:
    """Ask the agent to stop and wait until it exits. False when it does not react or takes too long."""
    write_request(plan.logs, save=save, who=who)
    for pid, start in agents[:1]:
        send(pid, Stat("", 0, start), signal.SIGUSR1)
    began = time.monotonic()
    answered = False
    while True:
        state = read_state(plan.logs)
        if not running_agents(state):
            return True
        now = time.monotonic()
        answered = answered or state.get("state") in ("ending", *FINAL)
        copying = LAST_COPIES if state.get("copying") else 0.0
        if now - began > (patience + copying if answered else min(ANSWER, patience)):
            return False
        _wait([pid for pid, _ in agents], LOOK if not answered else 1.0)


def _wait(pids: List[int], seconds: float) -> None:
    """Wait until one of these processes ends."""
    handles = [handle for handle in map(open_pidfd, pids) if handle is not None]
    try:
        select.select(handles, [], [], seconds if len(handles) == len(pids) else LOOK)
    finally:
        for handle in handles:
            os.close(handle)


def _kill(agents: List[Tuple[int, str]]) -> None:
    """Kill an agent that does not react: the guard first, because it would clean up at the same time."""
    for pid, start in reversed(agents):
        send(pid, Stat("", 0, start), signal.SIGKILL)
    limit = time.monotonic() + ANSWER
    while time.monotonic() < limit and any(_lives(pid, start) for pid, start in agents):
        _wait([pid for pid, start in agents if _lives(pid, start)], 1.0)


def _lives(pid: int, start: str) -> bool:
    return start_time(pid) == start


def _end(plan: NodePlan, tracker: ProcessTracker) -> List[int]:
    """End the remaining processes."""
    return end_all(tracker, plan.grace) if tracker.all() else []


def _write_end(plan: NodePlan, left: List[int]) -> Dict[str, Any]:
    """Write the end of a run whose agent was killed, unless another agent has started meanwhile."""
    lock = lock_run(plan.logs)
    if lock is None:
        return read_state(plan.logs)
    try:
        return finish(plan, "stopped", None, left)
    finally:
        os.close(lock)


def _prove(plan: NodePlan, tracker: ProcessTracker, state: Dict[str, Any], before: Dict[int, Stat]) -> Dict[str, Any]:
    """Look until nothing is left, for at most ``PROOF`` seconds."""
    limit = time.monotonic() + PROOF
    members = state.get("members") or [plan.node]
    port = state.get("port") if members[0] == plan.node else None
    host = plan.host or "127.0.0.1"
    while True:
        living = tracker.all()
        on_gpu = sorted(_on_gpus() & (set(living) | {pid for pid, stat in before.items() if _is(pid, stat)}))
        free = port is None or can_listen(host, int(port))
        if (not living and not on_gpu and free) or time.monotonic() >= limit:
            break
        time.sleep(LOOK)  # neither a port nor a driver has an event for this
    return {"left": sorted(living), "gpu": on_gpu, "port_free": free}


def _is(pid: int, stat: Stat) -> bool:
    """Whether a pid is still the same process. A zombie counts: a driver may hold memory for it."""
    now = stat_of(pid)
    return now is not None and now.start == stat.start


def _on_gpus() -> Set[int]:
    """The processes that use GPUs; none where nvidia-smi is missing or does not answer."""
    program = shutil.which(ASK[0])
    if program is None:
        return set()
    try:
        done = subprocess.run(
            [program, *ASK[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PROOF,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return set()
    return {int(word) for word in done.stdout.split() if word.isdigit()}
