"""Copies each node's part of a checkpoint to other nodes while the training runs. Works for every known layout.

Each agent looks at its output folder. When files changed and are quiet again, it sends an offer to rank 0 (``saved``).
Rank 0 finds the newest complete checkpoint and sends each holder the list of its files (``copy``). The holders fetch
them from the nodes that have them, in the background (``pacing.py``), and report the end (``copied``). When all have
reported, rank 0 sends ``kept``: then older copies may be removed. One checkpoint is copied at a time; the next one is
the newest that is complete by then.

A spare is one more node that holds copies, like every other one: the nodes are in a ring, with the spares at its end.
So each node receives the files of ``Copies.peers`` others. A spare that got all files would receive as much as all
nodes together, and its link would make the newest copied checkpoint older. A spare that replaces a node fetches its
files at full speed from the node that holds them.

The agent's main thread only calls ``take`` and ``look``. One thread looks and decides, another one copies.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Deque, Dict, List, Optional, Tuple

from ..contract import offers as checkpoint_offers
from ..contract.offers import file_name
from ..contract.plan import Copies
from ..contract.untrusted import is_whole
from ..link import CopyError
from ..link.copies import lower_priority
from ..link.direct import Direct
from ..run_files import Events, NodePlan, State
from .choices import Generation, files_to_copy, shared_by_all
from .jobs import addresses_of, files_of, generation_chosen, generation_of
from .pacing import Pacer
from .watcher import DOUBTFUL, EARLY, Watcher

if TYPE_CHECKING:
    from ..supervisor.control import Control

LOOK = 1.0  # seconds between looks at the output folder
JOIN = 30.0  # seconds in which a thread ends: a write to a slow disk cannot be cancelled
NOTICE = "copies"  # kind of notices
LEFT = ("gone", "lost")  # kinds of messages about another agent that exited or is silent
PEERS = 1  # copies where nodes do not share the output folder, unless the user says otherwise


class Keeper:
    """One attempt's copies on one node. Without other nodes, or without an output folder, it does nothing.

    Attributes:
        plan: the node's plan.
        peers: the number of copies; ``asked``: whether the user gave it.
        world_size: the ranks of the attempt.
        members: the positions of the nodes in ``Link.nodes``, in the order of their ranks. The link and the lists of
            files know a node by its position.
        names: of all nodes of the run, by position; an attempt's plan has those of the members only.
        everyone: the positions of the members and of the spares.
    """

    def __init__(
        self,
        plan: NodePlan,
        decision: Dict[str, Any],
        control: "Control",
        events: Events,
        state: State,
        spare: Optional[int] = None,
    ) -> None:
        """``spare``: the position of this node, if it is a spare; ``plan`` is then that of the whole run."""
        copies = plan.data.copies or Copies(peers=0)
        self.plan, self._control, self._events, self._state = plan, control, events, state
        self.world_size = int(decision["world_size"])
        self.members: Tuple[int, ...] = tuple(decision["members"])
        self.names = control.all_nodes
        self.everyone = everyone(len(self.names), decision)
        self.position = self.members[plan.rank] if spare is None else spare
        self.peers = peers_of(copies)
        self.asked = copies.peers is not None
        self._copies = copies
        self._threads: List[threading.Thread] = []
        self._closed = threading.Event()
        self._messages: "queue.Queue[Dict[str, Any]]" = queue.Queue(maxsize=1000)
        self._jobs: "queue.Queue[Optional[Dict[str, Any]]]" = queue.Queue()
        self._reports: Deque[Tuple[str, Dict[str, Any]]] = deque()  # for the main thread
        self._kept_folder: Optional[str] = None  # of the newest copies that are complete on all nodes
        self._pacer = Pacer(copies.rate)
        self._watcher = Watcher(plan, spare=spare is not None)
        self._direct: Optional[Direct] = None
        self._address: Optional[Tuple[str, int]] = None  # at which other nodes get files from here
        self._coordinator = _Coordinator(self) if self.position == self.members[0] else None

    def start(self) -> None:
        """Start the threads."""
        if self.plan.data.link is None or self.plan.output is None or not self.peers:
            return
        others = len(self.everyone) - 1
        if self.peers > others:
            text = "--copies %d: there are %d other nodes, so there are %d copies"
            if self._coordinator is not None:
                self.notice(text % (self.peers, others, others))
            self.peers = others
        self._control.keeping = self.take
        self._direct = Direct(self._control.link.copies, len(self.names))
        self._address = self._direct.start()
        for name, work in (("checkpoints", self._watch), ("copier", self._copy_all)):
            thread = threading.Thread(target=work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """End the threads. A copy that is running is cancelled; its complete files stay, and the next run uses them."""
        self._control.keeping = None
        self._closed.set()
        self._jobs.put(None)
        for thread in self._threads:
            thread.join(JOIN)
        if self._direct is not None:
            self._direct.close()
        self.look()

    def take(self, message: Dict[str, Any]) -> None:
        """Take a message of another agent. Drops it if too many wait."""
        with contextlib.suppress(queue.Full):
            self._messages.put_nowait(message)

    def look(self) -> None:
        """Write the events of the threads."""
        while self._reports:
            event, fields = self._reports.popleft()
            if event == "copied":
                self._state.set(copied=fields)  # first: who sees the event may read the state at once
            self._events.emit(event, **fields)

    def report(self, event: str, **fields: Any) -> None:
        """Let the main thread write an event."""
        self._reports.append((event, fields))

    def notice(self, text: str) -> None:
        """Let the main thread write a notice."""
        self.report("notice", kind=NOTICE, text=text)

    def send(self, position: int, kind: str, **fields: Any) -> None:
        """Send to the node at a position; rank 0's node also to itself."""
        if position == self.position:
            self.take(dict(fields, kind=kind, rank=position))
        else:
            self._control.link.send(kind, to=position, **fields)

    # --- the thread that looks and decides ---------------------------------------------------------------------

    def _watch(self) -> None:
        lower_priority()
        try:
            due = time.monotonic()
            while not self._closed.is_set():
                with contextlib.suppress(queue.Empty):
                    self._handle(self._messages.get(timeout=max(0.05, min(LOOK, due - time.monotonic()))))
                now = time.monotonic()
                if now < due:
                    continue
                due = now + LOOK
                if self._coordinator is not None:
                    self._coordinator.look(now)
                offer = self._watcher.look(now)
                if offer is not None:
                    self.send(self.members[0], "saved", offer=offer, address=self._address)
                for text in (*self._watcher.doubts(now), *(self._coordinator.doubts(now) if self._coordinator else ())):
                    self.notice(text)
        except Exception as error:  # noqa: BLE001 - the training must continue
            self.notice("checkpoints are not copied any more: %s: %s" % (type(error).__name__, error))

    def _handle(self, message: Dict[str, Any]) -> None:
        kind, sender = message.get("kind"), message.get("rank")
        if self._coordinator is not None and sender in self.everyone and kind in ("saved", "copied", *LEFT):
            with contextlib.suppress(CopyError):  # an invalid answer is none
                self._coordinator.take(str(kind), int(sender), message)
        elif sender == self.members[0] and kind == "copy":
            self._jobs.put(message)
        elif sender == self.members[0] and kind == "kept" and file_name(message.get("folder")):
            self._kept_folder = message["folder"]

    # --- the thread that copies --------------------------------------------------------------------------------

    def _copy_all(self) -> None:
        from .copier import Copier  # noqa: PLC0415 - only where there are checkpoints

        lower_priority()
        pacer = self._pacer

        def pause(count: int) -> None:
            self._closed.wait(pacer.pause(count))

        link, closed = self._control.link, self._closed
        copier = Copier(self.plan, link, closed, pace=lambda: pacer.rate, begin=pacer.begin, on_bytes=pause)
        while True:
            job = self._jobs.get()
            if job is None or self._closed.is_set():
                return
            began = time.monotonic()
            try:
                generation, files = generation_of(job), files_of(job.get("files"))
                self._control.link.copies.addresses = addresses_of(job.get("addresses"), self.everyone, self.position)
            except CopyError as problem:
                self.notice(str(problem))
                continue
            try:
                copied = copier.copy(generation, files, self._kept_folder)
                error = ""
            except (CopyError, OSError) as problem:
                copied, error = 0, str(problem)
                if not self._closed.is_set():
                    self.notice("%s is not copied to this node: %s" % (generation.name, error))
            answer = dict(generation._asdict(), bytes=copied, seconds=round(time.monotonic() - began, 3), error=error)
            self.send(self.members[0], "copied", **answer)


def peers_of(copies: Copies) -> int:
    """How many other nodes should copy a node's files."""
    return PEERS if copies.peers is None else copies.peers


def everyone(count: int, decision: Dict[str, Any]) -> Tuple[int, ...]:
    """The positions of the nodes that may hold copies in an attempt, among ``count``: its members and the spares."""
    excluded = decision.get("excluded") or {}
    return tuple(position for position in range(count) if str(position) not in excluded)


class _Coordinator:
    """Rank 0: finds the newest complete checkpoint and lets the holders copy it."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._nodes = keeper.names
        self._offers: Dict[int, Dict[str, Any]] = {}
        self._addresses: Dict[str, Any] = {}
        self._current: Optional[Generation] = None
        self._waiting: Dict[int, int] = {}  # holders that are copying, with their bytes
        self._answers: Dict[int, Dict[str, Any]] = {}
        self._done: Optional[Generation] = None
        self._failed: Optional[Generation] = None
        self._began = 0.0
        self._refused: Dict[Tuple[str, str], float] = {}
        self._reported: "set[str]" = set()
        self._until = time.monotonic() + EARLY  # the time at which spares are no longer awaited
        self._lost: "set[int]" = set()  # spares
        self._changed = False  # since the last decision

    def take(self, kind: str, rank: int, message: Dict[str, Any]) -> None:
        """Handle an offer, or the end of a copy on one node."""
        self._changed = True
        if kind in LEFT:
            self._leave(rank)
        elif kind == "saved":
            offer = message.get("offer")
            if isinstance(offer, dict) and not checkpoint_offers.problem(offer):
                self._offers[rank] = offer
                self._lost.discard(rank)
                self._addresses[str(rank)] = message.get("address")
        elif self._current is not None and generation_of(message) == self._current and rank in self._waiting:
            del self._waiting[rank]
            self._answers[rank] = message
            if not self._waiting:
                self._finish(self._current)
        self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Decide, if all nodes have made offers since the last decision. Spares have a limited time for theirs."""
        known = self._offers.keys() | self._lost
        complete = known >= set(self._keeper.everyone) or now >= self._until
        if self._changed and complete and not self._waiting and known >= set(self._keeper.members):
            self._changed = False
            self._decide()

    def _leave(self, position: int) -> None:
        """Do without a spare that is lost; the loss of a member ends the attempt."""
        if position in self._keeper.members:
            return
        self._offers.pop(position, None)
        self._lost.add(position)
        if self._waiting.pop(position, None) is not None:
            self._answers[position] = {"error": LEFT[0]}
            if not self._waiting and self._current is not None:
                self._finish(self._current)

    def _decide(self) -> None:
        from ..checkpoints import selection  # noqa: PLC0415

        keeper, offers = self._keeper, self._offers
        own = {position: offers[position] for position in keeper.members}
        choice = selection.newest(own, keeper.world_size)
        self._note(choice)
        if choice.name is None:
            return
        generation = generation_chosen(choice, own)
        if generation in (self._done, self._failed):
            return
        if shared_by_all(own, choice.name):
            if self._keeper.asked and "shared" not in self._reported:
                self._reported.add("shared")
                text = "all nodes share the output folder, so another copy of it in there is no use: --copies 0"
                self._keeper.notice(text)
            self._done = generation
            return
        lists = files_to_copy(offers, generation, keeper.peers, keeper.members)
        self._current, self._began = generation, time.monotonic()
        self._answers = {rank: {} for rank, files in lists.items() if not files}
        self._waiting = {rank: sum(size for _, size, _, _ in files) for rank, files in lists.items() if files}
        for rank in self._waiting:
            self._keeper.send(rank, "copy", files=lists[rank], addresses=self._addresses, **generation._asdict())
        if not self._waiting:
            self._finish(generation)

    def _finish(self, generation: Generation) -> None:
        """All holders have answered."""
        from . import held  # noqa: PLC0415

        self._current = None
        errors = {answer.get("error") for answer in self._answers.values()} - {"", None}
        if errors == {LEFT[0]}:
            return  # a spare is lost: other nodes get its files
        if errors:
            self._failed = generation  # each holder has reported why; the next checkpoint is tried again
            return
        self._done = generation
        for position in self._keeper.everyone:
            self._keeper.send(position, "kept", folder=held.folder_of(generation))
        copied = sum(answer["bytes"] for answer in self._answers.values() if is_whole(answer.get("bytes")))
        self._keeper.report(
            "copied",
            checkpoint=generation.name,
            step=generation.step,
            seconds=round(time.monotonic() - self._began, 3),
            bytes=copied,
            on=[self._nodes[rank] for rank in sorted(self._answers)],
        )

    def _note(self, choice: Any) -> None:
        """Remember since when a checkpoint is refused."""
        now = time.monotonic()
        refused = [tuple(each) for each in choice.refused[:1]]
        if choice.error is not None:
            refused = [("the newest checkpoint", choice.error)]
        self._refused = {each: self._refused.get(each, now) for each in refused}

    def doubts(self, now: float) -> List[str]:
        """The newest checkpoint, if it has not been complete for a while; once for each."""
        texts = []
        for (name, why), since in self._refused.items():
            if now - since >= DOUBTFUL and name not in self._reported:
                self._reported.add(name)
                texts.append("%s is not copied to other nodes, because it is not complete: %s" % (name, why))
        return texts
