"""Copies each node's part of a checkpoint to other nodes while the training runs. Works for every known layout.

Each agent looks at its output folder. When files changed and are quiet again, it sends an offer to rank 0 (``saved``).
Rank 0 finds the newest complete checkpoint and sends each holder the list of its files (``copy``). The holders fetch
them from the nodes that have them, in the background (``pacing.py``), and report the end (``copied``). When all have
reported, rank 0 sends ``kept``: then older copies may be removed. One checkpoint is copied at a time; the next one is
the newest that is complete by then.

The agent's main thread only calls ``take`` and ``look``. One thread looks and decides, another one copies.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Deque, Dict, List, Optional, Sequence, Tuple

from ..checkpoints.names import COPIES
from ..contract import offers as checkpoint_offers
from ..contract.offers import file_name, number
from ..contract.plan import Copies
from ..link import CopyError
from ..link.copies import FASTEST, Wanted, lower_priority
from ..link.direct import Direct
from ..run_files import Events, NodePlan, State
from .choices import Generation, Room, files_to_copy, shared_by_all, to_remove
from .pacing import Pacer

if TYPE_CHECKING:
    from ..supervisor.control import Control

LOOK = 1.0  # seconds between looks at the output folder
BUSY = 30.0  # seconds after which an offer is made although files still change: a program that is always saving
DOUBTFUL = 60.0  # seconds after which a checkpoint that is not complete, or not recognised, is reported
LARGE = 1 << 20  # bytes of files that are no known checkpoint, from which they are reported
TRIES = 3  # of a copy
PAUSE = 5.0  # seconds between them
JOIN = 30.0  # seconds in which a thread ends: a write to a slow disk cannot be cancelled
NOTICE = "copies"  # kind of notices
ADDRESS = 64  # characters of an IP address
PEERS = 1  # copies where nodes do not share the output folder, unless the user says otherwise


class Keeper:
    """One attempt's copies on one node. Without other nodes, or without an output folder, it does nothing.

    Attributes:
        plan: the node's plan.
        peers: the number of copies; ``asked``: whether the user gave it.
        world_size: the ranks of the attempt.
        members: the positions of the nodes in the run's ``Link.nodes``, in the order of their ranks. Spares have no
            ranks, and hold no copies. The link and the lists of files know a node by its position.
    """

    def __init__(
        self, plan: NodePlan, decision: Dict[str, Any], control: "Control", events: Events, state: State
    ) -> None:
        copies = plan.data.copies or Copies(peers=0)
        self.plan, self._control, self._events, self._state = plan, control, events, state
        self.world_size = int(decision["world_size"])
        self.members: Tuple[int, ...] = tuple(decision["members"])
        self.position = self.members[plan.rank]
        self.peers = PEERS if copies.peers is None else copies.peers
        self.asked = copies.peers is not None
        self._copies = copies
        self._threads: List[threading.Thread] = []
        self._closed = threading.Event()
        self._messages: "queue.Queue[Dict[str, Any]]" = queue.Queue(maxsize=1000)
        self._jobs: "queue.Queue[Optional[Dict[str, Any]]]" = queue.Queue()
        self._reports: Deque[Tuple[str, Dict[str, Any]]] = deque()  # for the main thread
        self._kept_folder: Optional[str] = None  # of the newest copies that are complete on all nodes
        self._pacer = Pacer(copies.rate)
        self._watcher = _Watcher(plan)
        self._direct: Optional[Direct] = None
        self._address: Optional[Tuple[str, int]] = None  # at which other nodes get files from here
        self._coordinator = _Coordinator(self) if plan.rank == 0 else None

    def start(self) -> None:
        """Start the threads."""
        link = self.plan.data.link
        if link is None or self.plan.output is None or not self.peers:
            return
        others = len(self.members) - 1
        if self.peers > others:
            text = "--copies %d: there are %d other nodes, so there are %d copies"
            if self.plan.rank == 0:
                self.notice(text % (self.peers, others, others))
            self.peers = others
        self._control.keeping = self.take
        self._direct = Direct(self._control.link.copies, max(self.members) + 1)
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
            self._events.emit(event, **fields)
            if event == "copied":
                self._state.set(copied=fields)

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
                offer = self._watcher.look(now)
                if offer is not None:
                    self.send(self.members[0], "saved", offer=offer, address=self._address)
                for text in (*self._watcher.doubts(now), *(self._coordinator.doubts(now) if self._coordinator else ())):
                    self.notice(text)
        except Exception as error:  # noqa: BLE001 - the training must continue
            self.notice("checkpoints are not copied any more: %s: %s" % (type(error).__name__, error))

    def _handle(self, message: Dict[str, Any]) -> None:
        kind, sender = message.get("kind"), message.get("rank")
        if self._coordinator is not None and sender in self.members and kind in ("saved", "copied"):
            with contextlib.suppress(CopyError):  # an invalid answer is none
                self._coordinator.take(str(kind), int(sender), message)
        elif sender == self.members[0] and kind == "copy":
            self._jobs.put(message)
        elif sender == self.members[0] and kind == "kept" and file_name(message.get("folder")):
            self._kept_folder = message["folder"]

    # --- the thread that copies --------------------------------------------------------------------------------

    def _copy_all(self) -> None:
        lower_priority()
        while True:
            job = self._jobs.get()
            if job is None or self._closed.is_set():
                return
            began = time.monotonic()
            try:
                generation, files = _job_of(job)
                self._control.link.copies.addresses = _addresses_of(job, self.members, self.position)
            except CopyError as problem:
                self.notice(str(problem))
                continue
            try:
                copied = self._copy(generation, files)
                error = ""
            except (CopyError, OSError) as problem:
                copied, error = 0, str(problem)
                if not self._closed.is_set():
                    self.notice("%s is not copied to this node: %s" % (generation.name, error))
            answer = dict(generation._asdict(), bytes=copied, seconds=round(time.monotonic() - began, 3), error=error)
            self.send(self.members[0], "copied", **answer)

    def _copy(self, generation: Generation, files: Dict[str, Tuple[int, int, int]]) -> int:
        """Copy the files of a checkpoint. Returns the number of bytes.

        Raises:
            CopyError, OSError: not all of them could be copied.
        """
        from . import held  # noqa: PLC0415 - only where there are checkpoints

        output = self.plan.output
        assert output is not None
        held.begin(output, generation)
        folder = held.folder_of(generation)
        total = [0]

        def on_bytes(count: int) -> None:
            total[0] += count
            self._closed.wait(self._pacer.pause(count))

        def done(wanted: Wanted, digest: str) -> None:
            name = wanted.target[len(folder) + 1 :]
            held.record(output, generation, name, held.Recorded(wanted.size, files[name][1], digest))

        for left in range(TRIES - 1, -1, -1):
            have = next((copy.files for copy in held.read(output) if copy.folder == folder), {})
            missing = {name: file for name, file in files.items() if have.get(name, (0, 0))[:2] != file[:2]}
            self._make_room(folder, sum(size for size, _, _ in missing.values()))
            pace = self._pacer.rate or FASTEST
            base = "" if generation.single else generation.name + "/"
            wanted = [
                Wanted("%s/%s" % (folder, name), size, rank, generation.name if generation.single else base + name, "",
                       mtime, pace)
                for name, (size, mtime, rank) in sorted(missing.items())
            ]  # fmt: skip
            self._pacer.begin()
            try:
                self._control.link.fetch(wanted, lambda: not self._closed.is_set(), on_bytes, done)
                break
            except CopyError:
                if not left or self._closed.wait(PAUSE):
                    raise
        return total[0]

    def _make_room(self, folder: str, needed: int) -> None:
        """Remove old copies, so that ``needed`` bytes fit.

        Raises:
            OSError: they do not fit.
        """
        from . import held  # noqa: PLC0415

        output = self.plan.output
        assert output is not None
        found = os.statvfs(output)
        room = Room(self._copies.space, found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
        protected = {folder} | ({self._kept_folder} if self._kept_folder else set())
        removed, lacking = to_remove(held.kept(output), needed, protected, room)
        if lacking is not None:
            limit = "the disk must keep a tenth free" if room.space is None else "--copies-space is %d" % room.space
            raise OSError(
                "it needs %d bytes in %s, and %d of them do not fit (%s). Free some space, or resume with "
                "a larger --copies-space or with --copies 0" % (needed, output / COPIES, lacking, limit)
            )
        for each in removed:
            held.remove(output, each)


def _job_of(message: Dict[str, Any]) -> Tuple[Generation, Dict[str, Tuple[int, int, int]]]:
    """Rank 0's request to copy files: by path below the checkpoint, size, modification time and rank. Bounded."""
    generation = _generation(message)
    listed = message.get("files")
    if not isinstance(listed, list) or len(listed) > checkpoint_offers.FILES:
        raise CopyError("rank 0 sent an invalid list of files")
    files = {}
    for each in listed:
        if (
            not isinstance(each, (list, tuple))
            or len(each) != 4
            or not file_name(each[0])
            or not all(map(number, each[1:]))
        ):
            raise CopyError("rank 0 sent an invalid list of files")
        files[each[0]] = (each[1], each[2], each[3])
    return generation, files


def _addresses_of(message: Dict[str, Any], members: Sequence[int], own: int) -> Dict[int, Tuple[str, int]]:
    """The addresses of other agents in rank 0's request, by position, without invalid ones."""
    listed = message.get("addresses")
    found: Dict[int, Tuple[str, int]] = {}
    for position in members:
        each = listed.get(str(position)) if isinstance(listed, dict) and position != own else None
        if isinstance(each, (list, tuple)) and len(each) == 2 and isinstance(each[0], str) and number(each[1]):
            found[position] = (each[0][:ADDRESS], min(each[1], 65535))
    return found


def _generation(message: Dict[str, Any]) -> Generation:
    name, saved, step = message.get("name"), message.get("saved"), message.get("step")
    if not file_name(name) or not number(saved) or not (step is None or number(step)):
        raise CopyError("an agent sent an invalid checkpoint")
    return Generation(str(name), message.get("single") is True, int(saved or 0), step)


class _Watcher:
    """Sees that the checkpoints in this node's output folder changed, and that they are quiet again."""

    def __init__(self, plan: NodePlan) -> None:
        self.plan = plan
        self._signs: Any = None
        self._offered: Any = None
        self._offered_at = 0.0
        self._strange: Optional[float] = None  # since when there are large files, but no checkpoint
        self._doubted = False

    def look(self, now: float) -> Optional[Dict[str, Any]]:
        """A new offer, if there is one."""
        from ..checkpoints import selection  # noqa: PLC0415
        from . import held  # noqa: PLC0415

        output = self.plan.output
        assert output is not None
        before, self._signs = self._signs, selection.signs(output)
        known, files = self._signs
        if known or sum(size for _, size, _ in files) < LARGE:
            self._strange = None
        elif self._strange is None:
            self._strange = now
        quiet = self._signs == before or now - self._offered_at >= BUSY
        if not quiet or before is None or self._signs == self._offered:
            return None
        self._offered, self._offered_at = self._signs, now
        data = self.plan.data
        found = selection.offer(output, data.first_rank, data.processes)
        return dict(found, copies=held.offers(output))

    def doubts(self, now: float) -> List[str]:
        """What the user should know about the output folder, once."""
        if self._strange is None or now - self._strange < DOUBTFUL or self._doubted:
            return []
        self._doubted = True
        return [
            "no checkpoint is recognised in %s, so none is copied to other nodes. Its files must be as in "
            "docs/runs.md, section Resuming" % self.plan.output
        ]


class _Coordinator:
    """Rank 0: finds the newest complete checkpoint and lets the holders copy it."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        link = keeper.plan.data.link  # an attempt's has the names of its members alone
        names = link.nodes if link is not None else ()
        self._names = {position: names[rank] for rank, position in enumerate(keeper.members[: len(names)])}
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

    def take(self, kind: str, rank: int, message: Dict[str, Any]) -> None:
        """Handle an offer, or the end of a copy on one node."""
        if kind == "saved":
            offer = message.get("offer")
            if isinstance(offer, dict) and not checkpoint_offers.problem(offer):
                self._offers[rank] = offer
                self._addresses[str(rank)] = message.get("address")
        elif self._current is not None and _generation(message) == self._current and rank in self._waiting:
            del self._waiting[rank]
            self._answers[rank] = message
            if not self._waiting:
                self._finish(self._current)
        if not self._waiting and len(self._offers) == len(self._keeper.members):
            self._decide()

    def _decide(self) -> None:
        from ..checkpoints import selection  # noqa: PLC0415

        offers = self._offers
        choice = selection.newest(offers, self._keeper.world_size)
        self._note(choice)
        if choice.name is None:
            return
        single = any(
            one["single"] for each in offers.values() for one in each["checkpoints"] if one["name"] == choice.name
        )
        generation = Generation(choice.name, single, choice.time, choice.step)
        if generation in (self._done, self._failed):
            return
        if shared_by_all(offers, choice.name):
            if self._keeper.asked and "shared" not in self._reported:
                self._reported.add("shared")
                text = "all nodes share the output folder, so another copy of it in there is no use: --copies 0"
                self._keeper.notice(text)
            self._done = generation
            return
        lists = files_to_copy(offers, generation, self._keeper.peers)
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
        if any(answer.get("error") for answer in self._answers.values()):
            self._failed = generation  # each holder has reported why; the next checkpoint is tried again
            return
        self._done = generation
        for position in self._keeper.members:
            self._keeper.send(position, "kept", folder=held.folder_of(generation))
        copied = sum(answer["bytes"] for answer in self._answers.values() if number(answer.get("bytes")))
        self._keeper.report(
            "copied",
            checkpoint=generation.name,
            step=generation.step,
            seconds=round(time.monotonic() - self._began, 3),
            bytes=copied,
            on=[self._names[rank] for rank in sorted(self._answers)],
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
