"""What is done about a hang: the stacks of all ranks are gathered, the odd one is named, then the policy acts.

Stacks take seconds, in which a failure elsewhere must not wait: a thread collects this node's, the link brings those
of the others, and ``look`` goes on when all are there or ``GATHER`` has passed.
"""

from __future__ import annotations

import threading
from typing import Any, Dict, Optional

from events import Events
from life.inbox import Inbox
from plan import NodePlan
from processes.census import Census
from watch import stacks
from watch.watch import Hang, Watch

GATHER = 12.0  # seconds for the stacks of all nodes
STACK = 20_000  # characters of each that go into the event


class Hangs:
    """The hangs of one attempt on one node."""

    def __init__(self, plan: NodePlan, watch: Watch, census: Census, inbox: Inbox, events: Events) -> None:
        self._plan, self._watch, self._census, self._inbox, self._events = plan, watch, census, inbox, events
        self._stops = plan.data.hang.policy == "stop"
        self._others = set(plan.data.link.nodes if plan.data.link else ()) - {plan.node}
        self._hang: Optional[Hang] = None
        self._until = 0.0
        self._own: Optional[Dict[int, str]] = None
        self._collecting: Optional[threading.Thread] = None

    def look(self, now: float) -> None:
        """Look for a hang, or go on with the one that was found."""
        found = self._watch.look(self._census.known, now)
        for text in self._watch.notices():
            self._events.emit("notice", text=text)
        if self._inbox.stacks_wanted and self._hang is None:
            self._inbox.stacks_wanted = False
            self._collect(tell=True)
        if found is not None and self._hang is None:
            self._hang, self._until, self._own = found, now + GATHER, None
            self._inbox.stacks.clear()
            self._inbox.answered.clear()
            self._inbox.link.tell("stacks?")
            self._collect(tell=False)
        if self._hang is not None and (now >= self._until or self._gathered()):
            hang, self._hang = self._hang, None
            self._act(hang)

    def _gathered(self) -> bool:
        return self._own is not None and self._others <= set(self._inbox.answered)

    def _collect(self, tell: bool) -> None:
        """Collect this node's stacks, in a thread; one at a time."""
        if self._collecting is not None and self._collecting.is_alive():
            return
        members = dict(self._census.known)

        def work() -> None:
            collected = stacks.collect(members, self._plan.data.first_rank, self._plan.data.prefix)
            found = {rank: text[:STACK] for rank, text in collected.items()}
            if tell:
                self._inbox.link.tell("stacks", rank_stacks=found)
            self._own = found
            self._inbox.nudge()

        self._collecting = threading.Thread(target=work, name="stacks", daemon=True)
        self._collecting.start()

    def _act(self, hang: Hang) -> None:
        found = dict(self._inbox.stacks)
        found.update(self._own or {})
        text = hang.text
        odd = [rank for rank in stacks.odd(found) if rank != hang.rank]
        if hang.rank is None and odd:
            text += "; elsewhere than the others: rank %s" % ", ".join(map(str, odd))
        said: Dict[str, Any] = {"kind": hang.kind, "rank": hang.rank, "text": text}
        if found:
            said["stacks"] = {str(rank): stack for rank, stack in sorted(found.items())}
        self._events.emit("hang", **said)
        if self._stops:
            self._inbox.fail(hang.rank if hang.rank is not None or len(odd) != 1 else odd[0], "hangs: " + text)
