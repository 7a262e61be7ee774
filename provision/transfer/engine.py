"""The transfer itself: surveys nodes, forms lanes, feeds them, and goes on around whatever fails until all is done.

Every lane has a thread of its own. When one ends early, its nodes are surveyed again and form new lanes for what they
still lack; other lanes do not notice.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError, InterruptedByUser
from provision.model import Emit, Inventory, Leg, Notice, Progress, Wire, ignore
from provision.ssh.fanout import fan_out
from provision.ssh.openssh import bulk
from provision.ssh.wire import NodeUnreachable
from provision.transfer import keys
from provision.transfer.lane import QUIET, Lane, Outcome, Seat
from provision.transfer.members import Member, judge
from provision.transfer.muster import Muster, ask
from provision.transfer.target import Target, Transferred
from provision.transfer.units import UNIT, Digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from provision.model import Node, Remote
    from provision.ssh.remote import Connections

STALL = 60.0  # seconds without a sign of life until a node is treated as failed
RELAY_FROM = 64 << 20  # bytes for all nodes together; less is sent directly, which needs no keys on the nodes
LANES = 16  # that are fed at the same time
_TICK = 0.25  # seconds between two looks at the lanes
_SAY = 0.1  # seconds between two events
_FORGET = 30.0  # seconds for a node to take back its keys


def transfer(
    inventory: Inventory,
    targets: Sequence[Target],
    connections: Connections,
    legs: Mapping[Wire, Sequence[Leg]],
    *,
    relay: bool = True,
    stage: str = "send",
    emit: Emit = ignore,
    stall: float = STALL,
    relay_from: int = RELAY_FROM,
    unit: int = UNIT,
) -> Transferred:
    """Bring every target the legs that its ``have`` does not name; a node that fails stops no other.

    Nodes of a wire form pass units on to each other. What a broken transfer has left in the
    targets' folders is used. A target's ``into`` must be nobody else's: a range is written into the file of its path,
    and what no range covers stays as it is.

    Args:
        inventory: the cluster; its root and the targets' folders name the relay's keys.
        targets: the nodes, in the order in which they pass on.
        connections: the way to them.
        legs: by wire form all legs, in the order in which they are unpacked.
        relay: whether nodes may pass bytes on at all.
        stage: of the ``Progress`` events, whose total is the bytes that all nodes lack.
        emit: is told about the progress, and warned of nodes that others had to go around.
        stall: seconds.
        relay_from: bytes for all nodes together.
        unit: bytes that are verified and passed on at once, of which a node holds two copies for a moment.

    Raises:
        ClusterctlError: a leg's bytes are damaged; every stream was broken off.
        InterruptedByUser: Ctrl-C, after every stream was broken off and the keys were removed.
    """
    run = _Run(inventory, targets, connections, legs, stage, emit, stall, unit)
    try:
        run.go(relay, relay_from)
    except KeyboardInterrupt:
        raise InterruptedByUser("interrupted", hint="run the same command again") from None
    finally:
        run.stop()
        run.clean()
    return Transferred({member.name: member.error for member in run.members}, run.sent)


def clean(
    inventory: Inventory, nodes: Sequence[Node], connections: Connections, place: str
) -> dict[str, ClusterctlError | None]:
    """Remove what the relays of transfers that were killed have left on nodes.

    Args:
        inventory: the cluster.
        nodes: those of its nodes that are meant.
        connections: the way to them.
        place: the folder around those transfers' own (``Target.folder``); nobody else may be at work there. Keys of
            other places are removed only when they were made days ago.

    Returns:
        By node name None, or why it could not be removed there.
    """

    def forget(node: Node) -> None:
        ask(connections, node, keys.forget(inventory, place), deadline=_FORGET)

    return fan_out(nodes, forget)


class _Run:
    """One transfer under way."""

    def __init__(
        self,
        inventory: Inventory,
        targets: Sequence[Target],
        connections: Connections,
        legs: Mapping[Wire, Sequence[Leg]],
        stage: str,
        emit: Emit,
        stall: float,
        unit: int,
    ) -> None:
        self.members = [Member(target, number) for number, target in enumerate(targets)]
        self._inventory = inventory
        self._connections = connections
        self._legs = legs
        self._stage = stage
        self._emit = emit
        self._stall = stall
        self._unit = unit
        self._muster = Muster(inventory, connections, self._warn)
        self._relay = False
        self._slots = threading.Semaphore(LANES)
        self._changed = threading.Condition()
        self._telling = threading.Lock()
        self._lanes: list[Lane] = []  # that run
        self._active = 0  # threads
        self._sent = 0  # by lanes that have ended
        self._failure: BaseException | None = None
        self._stopped = False
        self._said = 0.0
        self._done = 0

    @property
    def sent(self) -> int:
        """Bytes that were sent."""
        return self._sent + sum(lane.sent for lane in self._lanes)

    def go(self, relay: bool, relay_from: int) -> None:
        """Do it all; members that do not have everything at the end have an error."""
        self._muster.survey(self.members)
        for member in self.members:
            member.look(self._legs.get(member.target.wire, ()))
        self._relay = relay and sum(member.needed or 0 for member in self.members if not member.error) >= relay_from
        self._progress(force=True)
        for wire in dict.fromkeys(member.target.wire for member in self.members):
            crew = [member for member in self.members if member.target.wire == wire]
            self._spawn(partial(self._serve, crew))
        with self._changed:
            while self._active and not self._failure:
                self._changed.wait(_TICK)
                for lane in self._lanes:
                    lane.check(self._stall)
        if self._failure:
            raise self._failure
        self._progress(force=True)

    def stop(self) -> None:
        """Break off what still runs, and wait for it, but not for long."""
        self._stopped = True
        until = time.monotonic() + 2 * QUIET
        with self._changed:
            while self._active and time.monotonic() < until:
                for lane in self._lanes:
                    lane.break_off()
                    lane.check(self._stall)
                self._changed.wait(_TICK)

    def clean(self) -> None:
        """Take back what was left on the nodes that can be reached: keys, and what runs there after a broken transfer.

        Others are left to the next run, and to the keys' expiry.
        """
        here = {
            member.name: member
            for member in self.members
            if (member.authorized or member.facts.left or member.lacking)
            and not isinstance(member.error, NodeUnreachable)
        }

        def forget(node: Node) -> None:
            folder = here[node.name].target.folder
            script = keys.forget(self._inventory, keys.place_of(folder), folder)
            ask(self._connections, node, script, deadline=_FORGET)

        fan_out([member.target.node for member in here.values()], forget)

    def _spawn(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised where the caller waits
                with self._changed:
                    self._failure = self._failure or error
            finally:
                with self._changed:
                    self._active -= 1
                    self._changed.notify_all()

        with self._changed:
            self._active += 1
        threading.Thread(target=run, daemon=True).start()

    def _serve(self, crew: Sequence[Member]) -> None:
        """Form lanes of nodes that were surveyed, each with a thread of its own."""
        crew = [member for member in crew if member.lacking and not member.error]
        if not crew or self._stopped:
            return
        stream, digest, lanes = self._muster.form(crew, relay=self._relay)
        for lane in lanes:
            self._spawn(partial(self._feed, lane, stream, digest))

    def _feed(self, crew: Sequence[Member], stream: str, digest: Digest) -> None:
        """Feed one lane, and go on with what its nodes lack afterwards."""
        with self._slots:
            if self._stopped:
                return
            seats = [Seat(member.target, member.number, member.lacking, member.facts.kept) for member in crew]
            legs = self._legs.get(crew[0].target.wire, ())
            lane = Lane(seats, legs, stream, digest, self._on_got, self._unit)
            head = crew[0].target.node
            with self._changed:
                self._lanes.append(lane)
            try:
                with self._way(head) as way:
                    outcome = lane.run(way)
            except NodeUnreachable as error:
                outcome = Outcome(error=error)
            finally:
                with self._changed:
                    self._lanes.remove(lane)
                    self._sent += lane.sent
        if self._stopped:
            return
        for member in crew:
            if member.name in outcome.ended:
                member.facts = replace(member.facts, have=member.facts.have | member.lacking)
                member.look(legs)
        rest = [member for member in crew if member.lacking]
        if not rest:
            return
        for sentence in judge(crew, outcome, self._muster.refused, self._stall):
            self._warn(sentence)
        rest = [member for member in rest if not member.error]
        self._muster.survey(rest)
        for member in rest:
            if not member.error:
                member.look(legs)
        self._serve(rest)

    @contextmanager
    def _way(self, head: Node) -> Iterator[Remote]:
        """A lane's own way to its first node: when it is cut nothing else may end, the command's lock least of all."""
        shared = self._connections[head]
        way = bulk(self._inventory, head, shared)
        if way is shared:
            way = self._connections.open_separate(head)
        try:
            yield way
        finally:
            way.close()

    # --- what is told ----------------------------------------------------------------------------------

    def _warn(self, sentence: str) -> None:
        with self._telling:
            self._emit(Notice(sentence, "warning"))

    def _on_got(self, name: str, size: int) -> None:
        with self._telling:
            for member in self.members:
                if member.name == name:
                    member.arrived += size
            self._progress()

    def _progress(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._said < _SAY:
            return
        self._said = now
        total = sum(member.needed or 0 for member in self.members)
        done = sum(min(member.arrived, member.needed or 0) for member in self.members)
        self._done = max(self._done, done)
        self._emit(Progress(self._stage, self._done, total))
