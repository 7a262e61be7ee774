"""Owns a run on one node: its attempts one after the other, together with the agents of the other nodes.

Each attempt starts with a meeting of all agents, in which the hub chooses the nodes, the port and the checkpoint. It
ends with another meeting, in which the hub decides the outcome of the attempt. So all nodes report the same state and
the same reason. Agents that can no longer meet decide alone.

A run with spares or ``min_nodes`` survives the loss of nodes (``meetings.py``). A spare takes part in the meetings
only.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Dict, Optional, Set

from ..link import CopyError, LinkError
from ..link.link import Link
from ..lost_gpus import SpareGpus
from ..notify import RESTART, Notifier
from ..run_files import Events, NodePlan, State
from ..textfile import Textfile, remove
from ..tracker import STUBBORN
from . import roster as rosters
from .attempt import Attempt
from .control import SIGNAL, Control
from .decisions import (
    AGAIN,
    FAILED,
    STOPPED,
    check_end,
    check_start,
    decide_end,
    decide_start,
    describe_outcome,
    describe_reason,
    judge,
    offer_end,
    offer_start,
    own_checkpoints,
    saved_step,
)
from .meetings import FOREVER, ExcludedError, Meetings
from .preparing import Preparing

if TYPE_CHECKING:
    from ..keeping.keeper import Keeper
    from .spent import KeptAccount

MEET = 180.0  # seconds in which all agents must meet to start an attempt
FEWER = 60.0  # the same if a requeued Slurm job lacks nodes, of which one may be the hub's
SLURM = "Slurm"  # start of ``Stop.who``, if the time of the job is almost over
SLACK = 15.0  # seconds that a meeting waits beyond the time that ending processes may take
STEADY = 120.0  # seconds of an attempt after which its failure counts as the first one again
ROUNDS = 8  # decisions before an attempt: each damaged copy, or lost node with copies, needs another one
# Numbers of the meetings of an attempt, from its first one on: two for each round, its end, and two for last copies.
READY, END, LAST, MEETINGS = 1, 2 * ROUNDS, 2 * ROUNDS + 1, 2 * ROUNDS + 3
MORE = 64  # attempts beyond those that the plan and the roster allow, when nodes disagree: then the run fails

_NOTHING: Dict[str, Any] = {"rc": None, "signal": None, "stopped": False, "left": [], "step": None}


class Supervisor:
    """One run on one node. ``run`` does all of it. ``guard``: a pipe that closes when the guard exits."""

    def __init__(
        self,
        plan: NodePlan,
        events: Events,
        state: State,
        guard: Optional[int],
        account: Optional["KeptAccount"] = None,
    ) -> None:
        self._plan, self._events, self._state = plan, events, state
        self._control = Control(plan, events, guard)
        self._control.account = account
        self._link = Link(plan.data, self._control.nudge)
        self._textfile = Textfile(plan, events)
        self._notifier = Notifier(plan)
        self._meetings = Meetings(plan, self._control, events, state, self._notifier, self._link)
        self._preparing = Preparing(plan, self._control, events, state, self._link, self._meetings)
        self._restarted = 0  # attempts that count against ``restarts``
        self._last_failure: Optional[Dict[str, Any]] = None  # why the last attempt failed
        self._last: Optional[Dict[str, Any]] = None  # the decision of the last attempt, if all agents have judged it
        self._keeper: Optional[Keeper] = None  # of a spare
        self._gpus = SpareGpus(self._control.wait)
        self._condemns: Optional[str] = None  # why a spare should replace this node
        events.listener = self._notifier.take

    def run(self) -> int:
        """Run all attempts and write the event ``end``. Returns the exit code: 0 when the run finished, else 1."""
        self._control.open()
        self._control.link = self._link
        self._rescue()
        try:
            self._link.start()
            if self._plan.output is not None:
                self._link.share(str(self._plan.output))
            verdict = self._attempts()
            self._finish_copies()
        except LinkError as error:  # rank 0 cannot listen
            verdict = self._alone({}, error)
        try:
            return self._end(verdict)
        finally:
            self._link.close()
            self._control.close()

    def _rescue(self) -> None:
        """Move to the disk what an agent that was killed left in RAM."""
        if self._plan.data.copies is None:
            return
        from ..keeping.memory import rescue  # noqa: PLC0415 - rare

        try:
            if rescue(self._plan):
                self._events.emit("notice", level="info", text="moved checkpoints from RAM to %s" % self._plan.output)
        except OSError as error:
            self._events.emit("notice", text="checkpoints in RAM could not be moved to the disk: %s" % error)

    def _attempts(self) -> Dict[str, Any]:
        number, failures, top = 1, 0, -1
        while True:
            self._events.attempt = number
            self._control.begin()
            if self._meetings.survives:
                self._control.members = set()  # the meeting decides who takes part
            verdict = self._pause(failures)
            started = time.monotonic()
            verdict = verdict or self._attempt(number)
            if verdict["state"] != AGAIN:
                return verdict
            if number > self._plan.data.attempts + len(self._meetings.roster.names) + MORE:
                return dict(verdict, state=FAILED)
            self._meetings.replaces = bool(verdict.get("replaces"))
            self._restarted += not self._meetings.replaces
            step = -1 if verdict["step"] is None else verdict["step"]
            seconds = time.monotonic() - started
            failures = 0 if self._meetings.replaces else failures_in_row(failures, seconds, new_steps=step > top)
            top = max(top, step)
            of = "" if self._meetings.survives else " of %d" % self._plan.data.attempts
            text = "attempt %d%s failed: %s" % (number, of, describe_reason(verdict["why"]))
            self._events.emit("notice", kind=RESTART, text=text, why=verdict["why"])
            number += 1

    def _pause(self, failures: int) -> Optional[Dict[str, Any]]:
        """Pause after quick ``failures`` in a row. Returns a verdict when a stop or a failure comes first."""
        until = time.monotonic() + (self._plan.data.pause(failures) if failures else 0.0)
        while not self._control.over() and time.monotonic() < until:
            self._control.wait(until - time.monotonic())
        return self._alone({}) if self._control.over() and not self._meetings.survives else None

    def _attempt(self, number: int) -> Dict[str, Any]:
        """Run one attempt from meeting to meeting. Returns the verdict (see ``decisions.judge``) with ``saved``."""
        self._state.set(state="meeting", attempt=number, hub=self._link.hub)
        self._last = None
        try:
            decision = self._begin(number)
        except (LinkError, CopyError, OSError) as error:
            self._meetings.settle()
            return self._alone({}, error)
        if decision.get("error"):
            why = {"node": decision["node"], "rank": None, "text": decision["error"]}
            return {"state": FAILED, "why": why, "step": None, "saved": False, "replaces": False, "together": True}
        if decision.get("skip"):
            return self._judge(dict(_NOTHING, stopped=self._control.stop is not None))
        self._state.set(
            checkpoint=decision["checkpoint"],
            port=decision["port"],
            world_size=decision["world_size"],
            step=self._step_at_start(decision),
        )
        if not self._meetings.is_member:
            self._state.set(state="spare")
            return self._judge_as_spare(decision)
        plan = self._plan._replace(data=self._plan_of_attempt(decision))
        outcome = Attempt(plan, decision, self._control, self._events, self._state, self._textfile).run()
        self._condemns = outcome.get("condemned")
        # To rank 0 only: a thousand agents that each inform all others are a million messages and events.
        self._link.send("ended", to=self._control.first, text=describe_outcome(outcome))
        verdict = self._judge(outcome)
        self._remember(decision, verdict)
        return verdict

    def _judge_as_spare(self, decision: Dict[str, Any]) -> Dict[str, Any]:
        """Wait for the end of an attempt of the other nodes, and hold copies meanwhile."""
        self._gpus.learn()
        copies = self._plan.data.copies
        if copies is not None:
            from ..keeping.keeper import Keeper  # noqa: PLC0415 - few runs have spares

            self._keeper = Keeper(
                self._plan, decision, self._control, self._events, self._state, self._meetings.position
            )
            self._keeper.start()
        try:
            verdict = self._judge(dict(_NOTHING, spare=True))
        finally:
            if self._keeper is not None:
                self._keeper.close()
            self._keeper = None
        self._remember(decision, verdict)
        return verdict

    def _look_at_gpus(self, attempt: int) -> None:
        """Look for lost GPUs of this spare after the failure of an attempt, before it may take a rank."""
        if self._gpus.look(attempt):
            self._events.emit("notice", text="this spare takes no rank: %s" % self._gpus.lost)

    def _remember(self, decision: Dict[str, Any], verdict: Dict[str, Any]) -> None:
        """Remember the decision of an attempt after which the agents may copy the last checkpoint together."""
        self._last = decision if verdict.get("together") else None

    def _finish_copies(self) -> None:
        """Copy the last checkpoint to other nodes.

        Not after a signal, because what sent it (Slurm, a shutdown) soon kills this process.
        """
        data, decision, stop = self._plan.data, self._last, self._control.stop
        if decision is None or data.copies is None or data.copies.peers == 0 or self._plan.output is None:
            return
        if data.link is None or (stop is not None and stop.who.startswith((SIGNAL, SLURM))):
            return
        from ..keeping.finishing import Finishing  # noqa: PLC0415 - only where copies are made
        from ..keeping.keeper import everyone, peers_of  # noqa: PLC0415

        members, plan = tuple(decision["members"]), self._plan
        if self._meetings.position in members:
            plan = plan._replace(data=self._plan_of_attempt(decision))
        offer = own_checkpoints(plan)
        tolerance = self._meetings.tolerance()
        first = self._events.attempt * MEETINGS + LAST

        def meet(offer: Any, decide: Any, patience: float, going: Any, number: int) -> Dict[str, Any]:
            return self._link.meet(offer, decide, patience, going, first + number, tolerance)

        count = min(peers_of(data.copies), len(everyone(len(self._control.all_nodes), decision)) - 1)
        about = (self._control, self._events, self._state)
        Finishing(self._plan, self._meetings.position, members, decision["world_size"], count, *about).run(offer, meet)

    def _plan_of_attempt(self, decision: Dict[str, Any]) -> Any:
        """The plan with this attempt's ranks, addresses and port."""
        data = self._plan.data
        members = rosters.members(self._meetings.roster, data, decision["processes"])
        interface = None
        if data.needs_interface():
            from ..probe import interface_to  # noqa: PLC0415 - not every launcher needs it

            interface = interface_to(members.master or data.env.get("MASTER_ADDR") or "127.0.0.1")
        return data.for_attempt(members, decision["port"], interface)

    def _step_at_start(self, decision: Dict[str, Any]) -> Optional[int]:
        """The step that the state shows until the attempt prints one, which it never does if none is left.

        The checkpoint's, and the last known one for a checkpoint without a step; none without a checkpoint.
        """
        if decision["checkpoint"] is None:
            return None
        step: Optional[int] = decision.get("step")
        return self._state.fields.get("step") if step is None else step

    def _started(self) -> Optional[int]:
        """How many agents Slurm has started, if a requeued job has fewer nodes than the run."""
        nodes = os.environ.get("SLURM_STEP_NUM_NODES", "")
        fewer = self._meetings.survives and nodes.isdigit() and int(nodes) < len(self._meetings.roster.names)
        return int(nodes) if fewer else None

    def _begin(self, number: int) -> Dict[str, Any]:
        """Meet, and copy the files of the checkpoint that this node lacks.

        Raises:
            LinkError, CopyError, AsideError, OSError: the attempt cannot start.
        """
        plan, meetings = self._plan, self._meetings
        resume = plan.data.resuming or number > 1

        def offer() -> Dict[str, Any]:
            return dict(offer_start(plan, number, resume), condemned=self._condemns, unfit=self._gpus.lost)

        def decide(offers: Dict[int, Dict[str, Any]]) -> Dict[str, Any]:
            return decide_start(plan, offers, number, resume, meetings.roster, self._reasons(), self._condemned())

        topic = number * MEETINGS
        self._preparing.begin()
        if not meetings.is_member:
            self._look_at_gpus(number - 1)
        count = self._started() if number == 1 else None
        for _ in range(ROUNDS):
            decision = meetings.meet(topic, offer, decide, MEET if count is None else FEWER, meetings.going, count)
            check_start(plan, decision, self._link.hub)
            if decision.get("error") or decision.get("skip"):
                return decision
            meetings.adopt(decision)
            why = meetings.roster.excluded.get(meetings.position)
            if why is not None:
                raise ExcludedError("a spare replaces this node: %s" % why)
            ready = self._preparing.run(topic + READY, decision, more=self._more)
            if ready is None:
                return {"skip": True}
            if ready:
                about = {"checkpoint": decision["checkpoint"], "port": decision["port"]}
                about.update({"began": self._state.fields["began"]} if number == 1 else {})
                about.update({"step": decision["step"]} if decision.get("step") is not None else {})
                self._events.emit("attempt", **about, nodes=list(meetings.roster.nodes))
                return decision
            topic += READY + 1
        raise LinkError("copies of the checkpoint are damaged or lost again and again; see the notices")

    @property
    def _more(self) -> bool:
        """Whether another attempt may follow a failed one."""
        return self._restarted < self._plan.data.restarts

    def _reasons(self) -> Dict[int, str]:
        """Why nodes are lost, by position, as far as it is known."""
        known: Set[str] = set(self._meetings.roster.names)
        why = self._last_failure
        if why is None or why["node"] not in known:
            return {}
        return {self._meetings.roster.names.index(why["node"]): str(why["text"])}

    def _condemned(self) -> Dict[int, str]:
        """The node that a spare should replace although its agent is well, by position, with the reason."""
        why = self._last_failure
        return self._reasons() if why is not None and why.get("condemned") is True else {}

    def _judge(self, outcome: Dict[str, Any]) -> Dict[str, Any]:
        """Decide the outcome of the attempt with all agents."""
        plan, control = self._plan, self._control
        is_spare = bool(outcome.get("spare"))

        def decide(offers: Dict[int, Dict[str, Any]]) -> Dict[str, Any]:
            return decide_end(plan, offers, control.failure, more=self._more, roster=self._meetings.roster)

        def going() -> bool:
            control.take()
            if self._keeper is not None:
                self._keeper.look()
            if is_spare and control.failure is not None:
                self._look_at_gpus(self._events.attempt)
            if self._meetings.survives:
                return not control.broken and not (is_spare and control.failed_here())
            return not control.broken and not control.lost_nodes()

        patience = plan.grace + STUBBORN + SLACK + plan.data.memory_patience
        if control.stop is not None and control.stop.save:
            patience += plan.data.save_patience
        offer = offer_end(plan, outcome)
        topic = self._events.attempt * MEETINGS + END
        try:
            verdict = self._meetings.meet(topic, lambda: offer, decide, patience if control.over() else FOREVER, going)
            verdict = check_end(plan, verdict, self._link.hub)
        except LinkError as error:
            self._meetings.settle()
            return self._alone(offer, error)
        self._last_failure = verdict["why"] or control.failure
        return dict(verdict, together=True)

    def _alone(self, offer: Dict[str, Any], error: Optional[Exception] = None) -> Dict[str, Any]:
        """Decide from what this node knows, after an error that let the agents meet no more."""
        if error is not None:
            self._control.fail(None, str(error))
        stopped = self._control.stop is not None
        failure = self._control.failure
        if isinstance(error, ExcludedError):
            failure = {"node": self._plan.node, "rank": None, "text": str(error)}
        verdict = judge({0: offer.get("outcome") or dict(_NOTHING, stopped=stopped)}, failure, more=False)
        # Without rank 0's decision its agent may be lost. Two agents that report a failure are better than none.
        self._notifier.stands_in = self._plan.rank == 1 and verdict["state"] == FAILED
        return dict(verdict, saved=saved_step({0: offer}) if verdict["state"] == STOPPED and offer else None)

    def _end(self, verdict: Dict[str, Any]) -> int:
        """Write the end of the run."""
        remove(self._plan)
        why, saved = verdict["why"], verdict.get("saved")
        step = saved if saved is not None else verdict["step"]
        why = why and {key: why.get(key) for key in ("node", "rank", "text")}
        self._events.emit("end", state=verdict["state"], why=why, step=step, saved=saved is not None)
        self._events.close()
        known = {} if step is None else {"step": step}  # else the last step that was read stays
        together = verdict.get("together") is True
        self._state.set(state=verdict["state"], why=why, saved=saved is not None, together=together, **known)
        return 0 if verdict["state"] == "finished" else 1


def failures_in_row(before: int, seconds: float, *, new_steps: bool = False) -> int:
    """How many attempts in a row have failed quickly, after one that took ``seconds``.

    ``new_steps``: it made steps beyond those of all earlier ones, so the cluster works and the next need not wait.
    """
    return 1 if seconds >= STEADY or new_steps else before + 1
