"""A model of commands on many nodes: clusterctl's own planning code, with modelled handshakes, bandwidths and faults.

Time is virtual. The real ``fan_out`` runs its real threads: a node's work, in place of a connection, sleeps in virtual
time and takes turns at the controller's one core (Python runs one thread at a time). So order, limits and waves are
those of the product. Jump hosts come from the real ``in_turn``. Chains come from the real ``form_chains`` and ``hops``,
their units from the real ``batches``. The ports between nodes that the gate tries come from the real ``pairs``. Equal
arguments give equal results: the jitter of a node depends only on the seed and its name, and one thread runs at a time.

What is modelled: round trips, CPU time here and on the node, bandwidth, nodes and jump hosts that are dead, slow nodes.
What is not: loss, disks, other users.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from provision.checks.kit.measures import pairs
from provision.errors import ClusterctlError
from provision.model import Node, Part, Ssh
from provision.session.session import AT_ONCE, steps_at_once
from provision.ssh.fanout import fan_out
from provision.ssh.jumps import in_turn
from provision.ssh.wire import NodeUnreachable
from provision.tasks import check
from provision.transfer.chain import UNIT, batches
from provision.transfer.engine import CHAINS, RELAY_FROM
from provision.transfer.prepare import RelayNode, form_chains, hops

TRANSFERS_AT_ONCE = 32  # ``fan_out``'s own limit, which transfers use
CLOCKS_AT_ONCE = 16  # of ``tasks/measures/clock.py``


def all_at_once(nodes: int) -> int:
    """The limit of stages in which all nodes must take part at the same time."""
    return nodes


class Processor:
    """Cores that serve in the order of requests. None: as many as needed."""

    def __init__(self, cores: int | None) -> None:
        self._free = None if cores is None else [0.0] * cores

    def take(self, now: float, seconds: float) -> float:
        """When work that is requested now ends."""
        if self._free is None:
            return now + seconds
        end = max(now, heapq.heappop(self._free)) + seconds
        heapq.heappush(self._free, end)
        return end


class World:
    """Virtual time, for the threads of one ``fan_out`` at a time; one of them runs, and the others sleep."""

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()
        self._sleeping: list[tuple[float, int, int, threading.Event]] = []
        self._order = itertools.count()
        self._awake = 0
        self._mine = threading.local()

    def sleep_until(self, when: float) -> None:
        """Sleep until this time. Ties are resolved by the number of the node, so that results do not vary."""
        event = threading.Event()
        with self._lock:
            entry = (max(when, self.now), self._mine.number, next(self._order), event)
            heapq.heappush(self._sleeping, entry)
            self._awake -= 1
            self._wake_next()
        event.wait()

    def each(
        self, nodes: Sequence[Node], work: Callable[[Node], None], limit: int
    ) -> dict[str, ClusterctlError | None]:
        """Run ``work`` for all nodes through the real ``fan_out``; ends at the time of the last one."""
        numbers = {node.name: number for number, node in enumerate(nodes)}
        begun = 0
        self._awake = min(limit, len(nodes))

        def one(node: Node) -> None:
            nonlocal begun
            with self._lock:
                begun += 1
            self._mine.number = numbers[node.name]
            try:
                self.sleep_until(self.now)  # until each thread has a node
                work(node)
            finally:
                with self._lock:
                    if begun == len(nodes):  # this thread finds no other node
                        self._awake -= 1
                        self._wake_next()

        return fan_out(nodes, one, limit=limit)

    def _wake_next(self) -> None:
        if not self._awake and self._sleeping:
            self.now, _, _, event = heapq.heappop(self._sleeping)
            self._awake = 1
            event.set()


@dataclass(frozen=True)
class Visit:
    """One script on every node.

    Attributes:
        name: for the result.
        trips: round trips on an open connection.
        here: seconds of the controller's CPU time.
        there: seconds of the node's CPU time.
        waits: seconds in which the node waits for something.
        sent: bytes that the controller sends to each node, over its one link.
        limit: nodes at a time, or a function of the number of nodes.
        neighbours: the nodes connect to one another in pairs.
    """

    name: str
    trips: int = 3
    here: float = 0.0
    there: float = 0.0
    waits: float = 0.0
    sent: int = 0
    limit: int | Callable[[int], int] = AT_ONCE
    neighbours: bool = False


@dataclass(frozen=True)
class Meeting:
    """The agents' meetings through the hub; ``here`` is the hub's CPU time for one agent."""

    name: str
    here: float


@dataclass(frozen=True)
class Send:
    """A transfer of so many bytes along chains."""

    name: str
    size: int
    part: int = UNIT


Stage = Visit | Meeting | Send


@dataclass(frozen=True)
class Costs:
    """What the model takes from measurements, in seconds; docs/scale.md says how they were measured.

    Attributes:
        connect_here: the controller's CPU time for a connection.
        connect_there: the node's.
        open_here: the controller's CPU time for each second of an open connection.
        connect_trips: round trips of a login.
        jump_here: the controller's further CPU time for a connection through a jump host and the scripts on it.
        jump_there: the jump host's.
        round_trip: between the controller and a node.
        jitter: relative, of each node's own times.
        link: bytes per second of every link.
        unit_there: a node's CPU time for a unit of a transfer: verifying and passing it on.
        cores: cores that controller and nodes share, if the nodes are on the controller's machine; None: they are not.
    """

    connect_here: float = 0.0048
    connect_there: float = 0.018
    open_here: float = 0.000043
    connect_trips: int = 7
    jump_here: float = 0.0049
    jump_there: float = 0.006
    round_trip: float = 0.0003
    jitter: float = 0.2
    link: float = 125e6
    unit_there: float = 0.03
    cores: int | None = None


@dataclass(frozen=True)
class Faults:
    """Nodes and jump hosts that are not as they should be, by name."""

    dead: Collection[str] = ()
    slow: Mapping[str, float] = field(default_factory=dict)  # by how much everything takes longer there
    refused: Collection[tuple[str, str]] = ()  # hops that do not work


@dataclass(frozen=True)
class Command:
    """A command: seconds of CPU time until it connects and for its output, and its stages."""

    start: float
    stages: tuple[Stage, ...]


STATUS = Command(
    0.55,
    (
        Visit("asking", here=0.0025, there=0.009),
        Visit("clocks", trips=6, here=0.0034, there=0.012, limit=CLOCKS_AT_ONCE),
    ),
)
CHECK = Command(0.95, (Visit("probes", here=0.009, there=0.19, waits=1.5, limit=check.at_once),))
START = Command(
    1.05,
    (
        Visit("prepare", here=0.008, there=0.16, sent=600_000),
        Visit("probes", here=0.008, there=0.06),
        Visit("talk", trips=12, here=0.005, there=0.06, limit=all_at_once),
        Visit("ports", trips=2, here=0.002, there=0.005, limit=all_at_once, neighbours=True),
        Visit("agents", here=0.005, there=0.3, limit=all_at_once),
        Meeting("meeting", here=0.0011),
    ),
)
STOP = Command(
    0.55,
    (
        Visit("finding", here=0.003, there=0.02),
        Visit("stopping", here=0.005, there=0.15, waits=0.3, limit=all_at_once),
    ),
)


def deploy(size: int) -> Command:
    """``deploy`` of a bundle of so many bytes; the smoke test of the last stage takes 10 s."""
    return Command(
        1.0,
        (
            Visit("examine", here=0.004, there=0.02),
            Visit("survey", here=0.003, there=0.02, limit=TRANSFERS_AT_ONCE),
            Visit("install", here=0.004, there=0.03, limit=TRANSFERS_AT_ONCE),
            Visit("hops", here=0.003, there=0.05, limit=TRANSFERS_AT_ONCE),
            Send("sending", size),
            Visit("clean", here=0.003, there=0.02, limit=TRANSFERS_AT_ONCE),
            Visit("switch", here=0.006, there=0.1, waits=10.0, limit=steps_at_once),
        ),
    )


COMMANDS: Mapping[str, Command] = {
    "status": STATUS,
    "check": CHECK,
    "start": START,
    "stop": STOP,
    "deploy of 3 GB": deploy(3_000_000_000),
}


@dataclass(frozen=True)
class Outcome:
    """What a command took.

    Attributes:
        seconds: of the whole command.
        stages: the seconds of each.
        here: the controller's CPU time.
        failed: nodes that failed, each with its reason.
    """

    seconds: float
    stages: Mapping[str, float]
    here: float
    failed: Mapping[str, str]


def simulate(
    command: Command,
    names: Sequence[str],
    costs: Costs | None = None,
    faults: Faults | None = None,
    *,
    jumps: Sequence[str] = (),
    seed: int = 0,
) -> Outcome:
    """Run a command on nodes; a node that failed takes part in no later stage. ``jumps``: jump hosts."""
    run = _Command(costs or Costs(), faults or Faults(), jumps, seed)
    return run.run(command, [Node(name, name) for name in names])


class _Command:
    def __init__(self, costs: Costs, faults: Faults, jumps: Sequence[str], seed: int) -> None:
        self._costs, self._faults, self._jumps, self._seed = costs, faults, jumps, seed
        self._numbers: Mapping[str, int] = {}
        self._given_up: dict[str, float] = {}  # dead jump hosts, and when each first counts as dead
        self._world = World()
        self._shared = Processor(costs.cores)
        self._python = Processor(1)
        self._uplink = Processor(1)
        self._connected: set[str] = set()
        self._here = 0.0

    def run(self, command: Command, nodes: Sequence[Node]) -> Outcome:
        """See ``simulate``."""
        took: dict[str, float] = {}
        failed: dict[str, str] = {}
        self._numbers = {node.name: number for number, node in enumerate(nodes)}
        self._compute(command.start)
        for stage in command.stages:
            began = self._world.now
            left = [node for node in nodes if node.name not in failed]
            if not left:
                break
            if isinstance(stage, Visit):
                failed |= self._visit(stage, left)
            elif isinstance(stage, Meeting):
                self._world.now += stage.here * len(left) + 2 * self._costs.round_trip
            else:
                self._world.now += self._send(stage, left)
            took[stage.name] = self._world.now - began
        return Outcome(self._world.now, took, self._here, failed)

    def _visit(self, stage: Visit, nodes: Sequence[Node]) -> dict[str, str]:
        limit = stage.limit if isinstance(stage.limit, int) else stage.limit(len(nodes))
        degree: dict[str, int] = {}
        if stage.neighbours:
            for one, _ in pairs(nodes):
                degree[one.name] = degree.get(one.name, 0) + 1
        found = self._world.each(nodes, lambda node: self._work(stage, node, degree), limit)
        return {name: str(error) for name, error in found.items() if error is not None}

    def _work(self, stage: Visit, node: Node, degree: Mapping[str, int]) -> None:
        costs, world, rate = self._costs, self._world, self._rate(node)
        if node.name in self._faults.dead:
            world.sleep_until(world.now + Ssh().timeout)
            raise NodeUnreachable(node, f"no answer within {Ssh().timeout:g} s")
        if node.name not in self._connected:
            if self._jumps:
                self._use_jump_host(node)
            jump_here, jump_there = (costs.jump_here, costs.jump_there) if self._jumps else (0.0, 0.0)
            self._connect(node.name, costs.connect_here + jump_here, costs.connect_there * rate + jump_there)
        if stage.sent:
            world.sleep_until(self._uplink.take(world.now, stage.sent / costs.link))
        self._turn(stage.here / 2, stage.there * rate, stage.trips)
        world.sleep_until(world.now + stage.waits * rate + degree.get(node.name, 0) * costs.round_trip)
        self._turn(stage.here / 2, 0.0, 0)

    def _use_jump_host(self, node: Node) -> None:
        """Wait for the first jump host that is alive; the nodes of a dead one find out together."""
        world = self._world
        for jump in sorted(in_turn(self._numbers[node.name], self._jumps), key=self._is_given_up):
            if jump in self._faults.dead:
                world.sleep_until(self._given_up.setdefault(jump, world.now + Ssh().timeout))
                continue
            if jump not in self._connected:
                self._connect(jump, self._costs.connect_here, self._costs.connect_there)
            return
        raise NodeUnreachable(node, "no jump host can be used")

    def _is_given_up(self, jump: str) -> bool:
        return self._given_up.get(jump, self._world.now) < self._world.now

    def _connect(self, name: str, here: float, there: float) -> None:
        """Three turns on each side: the key exchange, the login, the channel."""
        self._connected.add(name)
        for _ in range(3):
            self._turn(here / 3, there / 3, self._costs.connect_trips / 3)

    def _turn(self, here: float, there: float, trips: float) -> None:
        """Compute here, cross the network, compute there."""
        self._compute(here)
        world = self._world
        world.sleep_until(world.now + trips * self._costs.round_trip)
        if there:
            world.sleep_until(self._shared.take(world.now, there))

    def _compute(self, seconds: float) -> None:
        """Use the controller's core: one thread at a time, and the shared cores if there are any."""
        world = self._world
        # Open connections look at their timers: a share of the core.
        seconds /= 1 - min(0.9, self._costs.open_here * len(self._connected))
        self._here += seconds
        end = max(self._python.take(world.now, seconds), self._shared.take(world.now, seconds))
        if threading.current_thread() is threading.main_thread():
            world.now = end
        else:
            world.sleep_until(end)

    def _rate(self, node: Node) -> float:
        """How much longer everything takes on this node than on an average one."""
        draw = random.Random(f"{self._seed} {node.name}").uniform(-1, 1)
        return (1 + self._costs.jitter * draw) * self._faults.slow.get(node.name, 1.0)

    def _send(self, stage: Send, nodes: Sequence[Node]) -> float:
        """Seconds of a transfer: every node of a chain is one unit behind the one before."""
        relay = stage.size * len(nodes) >= RELAY_FROM
        chains = form_chains([RelayNode(node.name, True, True) for node in nodes], self._faults.refused, relay=relay)
        assert sum(map(len, chains)) == len(nodes) == len(hops(chains)) + len(chains)
        parts = [
            Part(str(start), "tar", min(stage.part, stage.size - start), lambda: iter(()))
            for start in range(0, stage.size, stage.part)
        ]
        keys = [{part.key for part in parts}]
        sizes = [
            min(UNIT, batch.size - start) for batch in batches(parts, keys) for start in range(0, batch.size, UNIT)
        ]
        by_name = {node.name: node for node in nodes}
        took = [self._chain(sizes, [by_name[name] for name in chain], min(CHAINS, len(chains))) for chain in chains]
        # At most CHAINS at a time, which share this machine's link.
        running = Processor(CHAINS)
        return max(running.take(0.0, seconds) for seconds in took)

    def _chain(self, sizes: Sequence[int], chain: Sequence[Node], share: int) -> float:
        costs = self._costs
        done = [0.0] * len(sizes)  # when the node before has passed each unit on
        for place, node in enumerate(chain):
            each = costs.unit_there * self._rate(node)
            link = costs.link / (share if place == 0 else 1)
            free = 0.0
            for number, size in enumerate(sizes):
                free = max(free, done[number]) + max(size / link, each)
                done[number] = free
        spread = len(chain) * len(sizes) * costs.unit_there / costs.cores if costs.cores else 0.0
        return max(done[-1], spread)


def on_this_machine(costs: Costs, cores: int) -> Costs:
    """The costs where nodes and controller share cores, as on sandbox nodes."""
    return replace(costs, cores=cores)
