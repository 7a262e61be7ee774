"""Prepares the checkpoint of an attempt: this node moves aside what cannot be used, and copies what it lacks."""

from __future__ import annotations

from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any, Dict, List, Optional, Set

from ..link import CopyError, DigestError, HolderLostError
from ..link.link import Link
from ..run_files import Events, NodePlan, State
from .control import Control
from .meetings import FOREVER, Meetings

UNPREPARED = 5  # of a node with a full disk, after which a spare replaces it


class Preparing:
    """The checkpoints of all attempts, on one node."""

    def __init__(
        self, plan: NodePlan, control: Control, events: Events, state: State, link: Link, meetings: Meetings
    ) -> None:
        self._plan, self._control, self._events, self._state = plan, control, events, state
        self._link, self._meetings = link, meetings
        self._failed = 0  # attempts in a row for which this node could not prepare the checkpoint
        self._lost_holders: Set[int] = set()  # positions of nodes that were lost in a copy of this attempt

    def begin(self) -> None:
        """Begin an attempt."""
        self._lost_holders.clear()

    def run(self, topic: int, decision: Dict[str, Any], *, more: bool) -> Optional[bool]:
        """Move aside and copy what the decision says.

        False: a copy was damaged and removed, or a node that has copies is lost: decide again. None: a failure came
        first.
        """
        plan, first = self._plan, self._meetings.is_first
        for text in decision.get("refused", ()) if first else ():
            self._events.emit("notice", text="checkpoint skipped: %s" % text)
        copies, aside = decision.get("copy") or {}, decision.get("aside")
        if not (copies or aside):
            return True
        from ..keeping import restoring  # noqa: PLC0415 - rare

        offer: Dict[str, Any] = {}
        try:
            if aside and plan.output is not None:
                self._move_aside(plan.output, aside, report=first)
            files = [tuple(each) for each in copies.get(str(self._meetings.position), [])]
            offer = self._fetch(files, decision["checkpoint"])
        except (CopyError, OSError) as error:
            if not self._tries_again(error, more=more):
                raise
            offer = {"problem": str(error)}
        # No program may start before all nodes are ready: they may share the folder.
        answer = self._meetings.meet(topic, lambda: offer, restoring.join, FOREVER, self._meetings.going)
        failed = restoring.failed(answer, len(self._meetings.roster.names))
        if failed is not None:
            self._control.fail(None, failed[1], self._meetings.roster.names[failed[0]])
        if answer.get("skip") or failed is not None:
            return None
        self._failed = 0
        return restoring.drop(plan, restoring.check(answer), self._events) and answer.get("again") is not True

    def _tries_again(self, error: Exception, *, more: bool) -> bool:
        """Whether a checkpoint that this node cannot prepare fails the attempt, and not the run or the node."""
        if isinstance(error.__cause__, OSError) and error.__cause__.errno not in (ENOSPC, EDQUOT):
            return False  # a checkpoint that cannot be moved: a person must
        self._failed += 1
        return more and (not self._meetings.survives or self._failed <= UNPREPARED)

    def _fetch(self, files: List[Any], checkpoint: Optional[str]) -> Dict[str, Any]:
        """Copy files of the checkpoint. Returns the offer for the meeting after it, see ``restoring.join``.

        In a run that survives the loss of nodes, a failed copy is a failed attempt. The loss of the node that has the
        files is none: the hub decides again, without that node.

        Raises:
            CopyError, OSError: a file could not be copied.
        """
        output = self._plan.output
        if not files or output is None:
            return {}
        output.mkdir(parents=True, exist_ok=True)
        text = "copying %d files of %s" % (len(files), checkpoint)
        self._events.emit("notice", level="info", text=text)
        try:
            self._link.fetch(files, self._meetings.going, lost=self._is_lost)
        except DigestError as error:
            return {"damaged": [(error.holder, error.source)]}
        except HolderLostError as error:
            self._lost_holders.add(error.holder)
            text = "%s is lost while files of %s are copied from it: the agents choose another copy"
            self._events.emit("notice", text=text % (self._meetings.roster.names[error.holder], checkpoint))
            return {"again": True}
        except CopyError as error:
            if not self._meetings.survives:
                raise
            self._control.take()  # the node that has them may be lost
            self._control.fail(None, str(error))
        return {}

    def _is_lost(self, position: int) -> bool:
        """Whether to do without the node at a position, whose files are copied.

        The hub may choose a node again that was lost here. Then it is back, and lost only after ``protocol.SILENCE``.
        """
        if not self._meetings.survives or position in self._lost_holders:
            return False
        return self._meetings.roster.names[position] in self._control.missing

    def _move_aside(self, output: Path, aside: Dict[str, Any], *, report: bool) -> None:
        """Move checkpoints that cannot be used, so that the program does not write over them.

        Raises:
            AsideError: that failed.
        """
        from ..checkpoints.aside import folder_of, move  # noqa: PLC0415 - rare

        kept = output / folder_of(aside["number"])
        if move(output, aside["number"], aside["names"], aside["pointers"]) or (aside["names"] and kept.is_dir()):
            self._state.set(kept=str(kept))
            names = ", ".join(aside["names"][:5]) + (", …" if len(aside["names"]) > 5 else "")
            if report:
                self._events.emit("notice", text="moved to %s, so that nothing writes over it: %s" % (kept, names))
