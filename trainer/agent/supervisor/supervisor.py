"""Owns a run on one node: its attempts one after the other, together with the agents of the other nodes.

Each attempt starts with a meeting of all agents, in which rank 0 chooses the port and the checkpoint. It ends with
another meeting, in which rank 0 decides the outcome of the attempt. So all nodes report the same state and the same
reason. Agents that can no longer meet decide alone.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Dict, Optional

from ..link import CopyError, LinkError
from ..link.link import Link
from ..notify import RESTART, Notifier
from ..run_files import Events, NodePlan, State
from ..textfile import Textfile, remove
from ..tracker import STUBBORN
from .attempt import Attempt
from .control import Control
from .decisions import (
    AGAIN,
    FAILED,
    STOPPED,
    check_end,
    check_start,
    decide_end,
    decide_start,
    judge,
    offer_end,
    offer_start,
    saved_step,
)

MEET = 180.0  # seconds in which all agents must meet to start an attempt
SLACK = 15.0  # seconds that a meeting waits beyond the time that ending processes may take
FOREVER = 10 * 365 * 86400.0  # for a node that has finished, while the others are running
STEADY = 120.0  # seconds of an attempt after which its failure counts as the first one again
RELAY = 2.0  # seconds in which rank 0's decision arrives


class Supervisor:
    """One run on one node. ``run`` does all of it. ``guard``: a pipe that closes when the guard exits."""

    def __init__(self, plan: NodePlan, events: Events, state: State, guard: Optional[int]) -> None:
        self._plan, self._events, self._state = plan, events, state
        self._control = Control(plan, events, guard)
        self._link = Link(plan.data, self._control.nudge)
        self._textfile = Textfile(plan, events)
        self._notifier = Notifier(plan)
        events.listener = self._notifier.take

    def run(self) -> int:
        """Run all attempts and write the event ``end``. Returns the exit code: 0 when the run finished, else 1."""
        self._control.open()
        self._control.link = self._link
        try:
            self._link.start()
            if self._plan.output is not None:
                self._link.share(str(self._plan.output))
            verdict = self._attempts()
        except LinkError as error:  # rank 0 cannot listen
            self._control.fail(None, str(error))
            verdict = self._alone({})
        try:
            return self._end(verdict)
        finally:
            self._link.close()
            self._control.close()

    def _attempts(self) -> Dict[str, Any]:
        number, failures = 1, 0
        while True:
            self._events.attempt = number
            self._control.begin()
            verdict = self._wait(failures)
            started = time.monotonic()
            verdict = verdict or self._attempt(number)
            failures = failures_in_row(failures, time.monotonic() - started)
            if verdict["state"] != AGAIN:
                return verdict
            text = "attempt %d of %d failed: %s" % (number, self._plan.data.attempts, describe_reason(verdict["why"]))
            self._events.emit("notice", kind=RESTART, text=text, why=verdict["why"])
            number += 1

    def _wait(self, failures: int) -> Optional[Dict[str, Any]]:
        """Pause after quick ``failures`` in a row. Returns a verdict when a stop or a failure comes first."""
        until = time.monotonic() + (self._plan.data.pause(failures) if failures else 0.0)
        while not self._control.over() and time.monotonic() < until:
            self._control.wait(until - time.monotonic())
        return self._alone({}) if self._control.over() else None

    def _attempt(self, number: int) -> Dict[str, Any]:
        """Run one attempt from meeting to meeting. Returns the verdict (see ``decisions.judge``) with ``saved``."""
        self._state.set(state="meeting", attempt=number)
        try:
            decision = self._begin(number)
        except (LinkError, CopyError, OSError) as error:
            self._settle()
            self._control.fail(None, str(error))
            return self._alone({})
        if decision.get("error"):
            why = {"node": decision["node"], "rank": None, "text": decision["error"]}
            return {"state": FAILED, "why": why, "step": None, "saved": False}
        began = {"began": self._state.fields["began"]} if number == 1 else {}
        at = {"step": decision["step"]} if decision.get("step") is not None else {}
        self._events.emit("attempt", checkpoint=decision["checkpoint"], port=decision["port"], **began, **at)
        self._state.set(
            checkpoint=decision["checkpoint"],
            port=decision["port"],
            world_size=decision["world_size"],
            step=self._step_at_start(decision),
        )
        outcome = Attempt(self._plan, decision, self._control, self._events, self._state, self._textfile).run()
        self._link.send("ended", text=describe_outcome(outcome))
        return self._judge(outcome)

    def _step_at_start(self, decision: Dict[str, Any]) -> Optional[int]:
        """The step that the state shows until the attempt prints one, which it never does if none is left.

        The checkpoint's, and the last known one for a checkpoint without a step; none without a checkpoint.
        """
        if decision["checkpoint"] is None:
            return None
        step: Optional[int] = decision.get("step")
        return self._state.fields.get("step") if step is None else step

    def _begin(self, number: int) -> Dict[str, Any]:
        """Meet, and copy the files of the checkpoint that this node lacks.

        Raises:
            LinkError, CopyError, AsideError, OSError: the attempt cannot start.
        """
        plan = self._plan
        resume = plan.data.resuming or number > 1

        def going() -> bool:
            self._control.take()
            return not self._control.over()

        decision = self._link.meet(
            offer_start(plan, resume), lambda offers: decide_start(plan, offers, number, resume), MEET, going
        )
        check_start(plan, decision)
        for text in decision.get("refused", ()) if plan.rank == 0 else ():
            self._events.emit("notice", text="checkpoint skipped: %s" % text)
        copies, aside = decision.get("copy") or {}, decision.get("aside")
        if aside and plan.output is not None:
            self._move_aside(plan.output, aside)
        if copies:
            mine = [tuple(each) for each in copies.get(str(plan.rank), [])]
            if mine and plan.output is not None:
                plan.output.mkdir(parents=True, exist_ok=True)
                text = "copying %d files of %s" % (len(mine), decision["checkpoint"])
                self._events.emit("notice", level="info", text=text)
                self._link.fetch(mine, going)
        if copies or aside:  # no program may start before all nodes are ready: they may share the folder
            self._link.meet({}, lambda _: {}, FOREVER, going)
        return decision

    def _move_aside(self, output: Path, aside: Dict[str, Any]) -> None:
        """Move checkpoints that cannot be used, so that the program does not write over them.

        Raises:
            AsideError: that failed.
        """
        from ..checkpoints.aside import folder_of, move  # noqa: PLC0415 - rare

        kept = output / folder_of(aside["number"])
        if move(output, aside["number"], aside["names"], aside["pointers"]) or kept.is_dir():
            self._state.set(kept=str(kept))
            names = ", ".join(aside["names"][:5]) + (", …" if len(aside["names"]) > 5 else "")
            if self._plan.rank == 0:
                self._events.emit("notice", text="moved to %s, so that nothing writes over it: %s" % (kept, names))

    def _judge(self, outcome: Dict[str, Any]) -> Dict[str, Any]:
        """Decide the outcome of the attempt with all agents."""
        plan, control = self._plan, self._control
        more = self._events.attempt < plan.data.attempts

        def decide(offers: Dict[int, Dict[str, Any]]) -> Dict[str, Any]:
            return decide_end(plan, offers, control.failure, more=more)

        def going() -> bool:
            control.take()
            return not control.broken and not control.lost_nodes()

        patience = plan.grace + STUBBORN + SLACK
        if control.stop is not None and control.stop.save:
            patience += plan.data.save_patience
        offer = offer_end(plan, outcome)
        try:
            verdict = self._link.meet(offer, decide, patience if control.over() else FOREVER, going)
            return check_end(plan, verdict)
        except LinkError as error:
            self._settle()
            control.fail(None, str(error))
            return self._alone(offer)

    def _alone(self, offer: Dict[str, Any]) -> Dict[str, Any]:
        """Decide from what this node knows."""
        stopped = self._control.stop is not None
        nothing: Dict[str, Any] = {"rc": None, "signal": None, "stopped": stopped, "left": [], "step": None}
        verdict = judge({0: offer.get("outcome") or nothing}, self._control.failure, more=False)
        # Without rank 0's decision its agent may be lost. Two agents that report a failure are better than none.
        self._notifier.stands_in = self._plan.rank == 1 and verdict["state"] == FAILED
        return dict(verdict, saved=saved_step({0: offer}) if verdict["state"] == STOPPED and offer else None)

    def _settle(self) -> None:
        """Take the messages that came before a meeting failed, and wait a moment for rank 0's reason."""
        self._control.take()
        until = time.monotonic() + RELAY
        while self._plan.rank and not self._control.over() and time.monotonic() < until:
            self._control.wait(until - time.monotonic())

    def _end(self, verdict: Dict[str, Any]) -> int:
        """Write the end of the run."""
        remove(self._plan)
        why, saved = verdict["why"], verdict.get("saved")
        step = saved if saved is not None else verdict["step"]
        why = why and {key: why.get(key) for key in ("node", "rank", "text")}
        self._events.emit("end", state=verdict["state"], why=why, step=step, saved=saved is not None)
        self._events.close()
        known = {} if step is None else {"step": step}  # else the last step that was read stays
        self._state.set(state=verdict["state"], why=why, saved=saved is not None, **known)
        return 0 if verdict["state"] == "finished" else 1


def failures_in_row(before: int, seconds: float) -> int:
    """How many attempts in a row have failed quickly, after one that took ``seconds``."""
    return 1 if seconds >= STEADY else before + 1


def describe_reason(why: Optional[Dict[str, Any]]) -> str:
    """Describe a reason."""
    if why is None:
        return "the cause is unknown"
    return "%s: %s" % (why["node"], why["text"])


def describe_outcome(outcome: Dict[str, Any]) -> str:
    """Describe how a node's command ended."""
    if outcome["stopped"]:
        return "it stopped"
    if outcome["signal"]:
        return "its command was killed by %s" % outcome["signal"]
    return "its command exited with code %s" % outcome["rc"]
