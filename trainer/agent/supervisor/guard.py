"""The agent's two processes: the supervisor, and a guard that only waits for the supervisor's end.

The guard adopts orphaned processes of the run. When the supervisor exits without having ended the run (it was killed or
crashed), the guard ends every process of the run, informs the other nodes, and writes the end. When the guard is
killed, the supervisor notices that a pipe closes, and ends the run as failed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from ..processes import adopt_orphans, describe_status
from ..run_files import Events, NodePlan, State, delete_request, lock_run, read_state, start_time

GRACE = 2.0  # seconds between SIGTERM and SIGKILL after the supervisor's end
RETURN = 4.0  # seconds in which the other agents reconnect to receive the failure
BROKEN = 70  # the supervisor's exit code after a crash (EX_SOFTWARE of sysexits.h)
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def run(plan: NodePlan, ready: Callable[[Dict[str, Any]], None], echo: Optional[int] = None, notice: str = "") -> int:
    """Own a run on this node until its end. Returns the exit code: 0 when the run finished.

    Args:
        plan: the node's plan.
        ready: called in both processes when the supervisor owns the run, or cannot; its argument is the message for the
            starting command.
        echo: a descriptor for a copy of the events.
        notice: the text of a first event.

    Raises:
        OSError: the folder of the run cannot be written.
    """
    plan.logs.mkdir(parents=True, exist_ok=True)
    lock = lock_run(plan.logs)
    if lock is None:
        who = read_state(plan.logs)
        text = "the run %s is already running on %s (process %s)" % (plan.run, plan.node, who.get("pid"))
        ready({"started": False, "error": text})
        return 1
    delete_request(plan.logs)
    adopt_orphans()
    # A new agent would take what an agent that was killed has left of the run for its own ranks.
    ended = end_here(plan, GRACE) if read_state(plan.logs) else Ended(0, [])
    if ended.left:
        text = "processes that an earlier agent of the run has left cannot be ended: %s"
        ready({"started": False, "error": text % ", ".join(map(str, ended.left))})
        return 1
    if ended.found:
        earlier = "ended processes that an earlier agent of the run had left: %d" % ended.found
        notice = "%s; %s" % (notice, earlier) if notice else earlier
    ours, theirs = os.pipe()
    guard = os.getpid()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(theirs)
        os._exit(_supervise(plan, ready, ours, guard, echo, notice))
    os.close(ours)
    return _Guard(plan, supervisor, echo).watch(ready)


def _supervise(
    plan: NodePlan,
    ready: Callable[[Dict[str, Any]], None],
    pipe: int,
    guard: int,
    echo: Optional[int],
    notice: str,
) -> int:
    """The supervisor's process, from the fork to its exit code."""
    try:
        from .spent import keep_account  # noqa: PLC0415
        from .supervisor import Supervisor  # noqa: PLC0415

        events = Events(plan.logs, echo)
        before = read_state(plan.logs)  # of an earlier start
        state = State(
            plan.logs,
            run=plan.run,
            node=plan.node,
            node_rank=plan.rank,
            nnodes=plan.data.nnodes,
            members=list(plan.data.members.nodes),
            excluded={},
            hub=0,
            phase="starting",
            step=None,
            total=None,
            loss=None,
            attempt=1,
            attempts=plan.data.attempts,
            checkpoint=None,
            port=plan.data.port,
            why=None,
            left=[],
            resumable=plan.output is not None,
            pattern=plan.data.pattern,
            world_size=None,
            **_who(os.getpid(), guard),
        )
        at = events.size()
        account = keep_account(events, state, before)
        state.set(state="starting")
        ready({"started": True, "pid": os.getpid(), "guard": guard, "at": at})
        if notice:
            events.emit("notice", text=notice)
        return Supervisor(plan, events, state, pipe, account).run()
    except OSError as error:
        import traceback  # noqa: PLC0415 - imported only after a crash

        traceback.print_exc()
        ready({"started": False, "error": "%s: %s" % (plan.logs, error)})
        return BROKEN
    except BaseException:  # noqa: BLE001 - the guard must learn that nothing supervises the run
        import traceback  # noqa: PLC0415 - imported only after a crash

        traceback.print_exc()
        return BROKEN
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()


def _who(supervisor: int, guard: int) -> Dict[str, Any]:
    return {
        "pid": supervisor,
        "start": start_time(supervisor),
        "guard": guard,
        "guard_start": start_time(guard),
    }


class _Guard:
    """The guard's process."""

    def __init__(self, plan: NodePlan, supervisor: int, echo: Optional[int]) -> None:
        self._plan = plan
        self._supervisor = supervisor
        self._echo = echo

    def watch(self, ready: Callable[[Dict[str, Any]], None]) -> int:
        """Wait for the supervisor's end, and clean up when it crashed or was killed."""
        for number in FORWARDED:
            signal.signal(number, self._forward)
        status = self._wait(ready)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) in (0, 1):
            return os.WEXITSTATUS(status)
        if os.WIFEXITED(status):
            text = "the agent crashed; its traceback is in %s" % (self._plan.logs / "agent.log")
        else:
            text = "the agent %s" % describe_status(status)
        self._clean(text)
        return 1

    def _wait(self, ready: Callable[[Dict[str, Any]], None]) -> int:
        """Reap orphans until the supervisor exits."""
        ready({})  # this process has no message, and closes the starter's descriptors
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == self._supervisor:
                return status

    def _forward(self, number: int, _: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._supervisor, number)

    def _clean(self, text: str) -> None:
        """End the run on this node, inform the others, and write the end."""
        report = threading.Thread(target=self._report, args=(text,), name="report", daemon=True)
        report.start()
        left = end_here(self._plan, GRACE, adopter=os.getpid()).left
        self._rescue()
        report.join(RETURN + 1)
        finish(self._plan, "failed", {"node": self._plan.node, "rank": None, "text": text}, left, self._echo)

    def _rescue(self) -> None:
        """Move to the disk what the program saved to RAM."""
        if self._plan.data.copies is None:
            return
        from ..keeping.memory import rescue  # noqa: PLC0415

        try:
            rescue(self._plan)
        except OSError as error:  # the next agent of the run tries again
            sys.stderr.write("agent: checkpoints stay in RAM: %s\n" % error)

    def _report(self, text: str) -> None:
        """Inform the other agents instead of the supervisor. Otherwise they notice only after some seconds."""
        if self._plan.data.link is None:
            return
        from ..link import LinkError  # noqa: PLC0415
        from ..link.link import Link  # noqa: PLC0415

        hub = read_state(self._plan.logs).get("hub")
        link = Link(self._plan.data, lambda: None, hub if isinstance(hub, int) else 0)
        try:
            link.start()
        except LinkError as error:
            sys.stderr.write("%s\n" % error)
            return
        link.send("failed", attempt=read_state(self._plan.logs).get("attempt", 1), failed=None, text=text)
        link.close()


class Ended(NamedTuple):
    """How many processes of a run were found, and the pids of those that could not be ended."""

    found: int
    left: List[int]


def end_here(plan: NodePlan, grace: float, adopter: Optional[int] = None) -> Ended:
    """End every process of a run without a supervisor."""
    from ..tracker import Group, ProcessTracker, end_all  # noqa: PLC0415

    tracker = ProcessTracker(plan.run, plan.node, Group(plan.run, plan.node), adopter)
    ended = Ended(len(tracker.all()), end_all(tracker, grace))
    tracker.close()
    return ended


def finish(
    plan: NodePlan, state: str, why: Optional[Dict[str, Any]], left: Any, echo: Optional[int] = None
) -> Dict[str, Any]:
    """Write the end of a run instead of its supervisor: the events ``exit`` and ``end``, and the state."""
    from ..notify import Notifier  # noqa: PLC0415
    from ..textfile import remove  # noqa: PLC0415

    remove(plan)
    known = read_state(plan.logs)
    events = Events(plan.logs, echo)
    events.listener = Notifier(plan).take
    events.attempt = int(known.get("attempt") or 1)
    outcome: Dict[str, Any] = {"rc": None, "signal": None, "stopped": state == "stopped"}
    events.emit("exit", **outcome, **({"left": left} if left else {}))
    spent = {"spent": known["spent"]} if "spent" in known else {}
    events.emit("end", state=state, why=why, step=known.get("step"), saved=False, **spent)
    events.close()
    written = State(plan.logs, **{key: value for key, value in known.items() if key not in _FRESH})
    written.fields["began"] = known.get("began")
    written.set(state=state, why=why, left=left)
    return written.fields


_FRESH = ("boot_id", "uid", "began")
