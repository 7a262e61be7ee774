"""Reads the runs of a node: the last state that each agent wrote, and whether the agent is alive. Pure.

``tasks/runs.py`` asks the nodes with ``templates/run/runs.sh.j2``, and this module reads the answers. So any machine
with the inventory finds every run, no matter who started it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from provision.run import fields
from trainer.agent.contract import effective
from trainer.agent.contract.effective import Effective
from trainer.agent.contract.expected import Expected
from trainer.agent.contract.expected import read as read_expected
from trainer.agent.contract.untrusted import finite

LIVE = ("starting", "meeting", "spare", "running", "ending")
ENDED = ("finished", "failed", "stopped")
LOST = "lost"  # its agent died without writing an end
BEFORE = ("starting", "loading", "tokenizing")  # the phases before the first step, see trainer/agent/silence.py
UNKNOWN = "unknown"  # its node does not answer; nodes that share the folder reported it

_UID = re.compile(r"[0-9]{1,10}")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # also the name of a folder on this machine
_LOGS = re.compile(rf"({_RUN.pattern})/logs/node[0-9]{{1,7}}")
_NETWORKS = 200  # lines of NCCL's log
_NETWORK = 1000  # characters of such a line
_SAMPLES = 100
_SAME_START = 120.0  # seconds between the starts of a run's agents, with the difference of the clocks


@dataclass(frozen=True)
class Part:
    """A run on one node.

    Attributes:
        run: the run's id.
        node: the inventory's name for the node it ran on.
        fields: the agent's ``state.json``; ``trainer/agent`` explains each field.
        alive: whether the agent's process is alive; None if its node did not report it.
        owner: the user who started it.
        samples: the last lines of ``metrics.jsonl``, if the agent is alive.
        logs: the part's log folder, relative to ``<root>/runs``.
        seen_on: the nodes that have this folder; several if they share it.
        network: the network that NCCL used, from NCCL's log; "" if unknown.
    """

    run: str
    node: str
    fields: Mapping[str, Any]
    alive: bool | None
    owner: str = ""
    samples: tuple[Mapping[str, Any], ...] = ()
    logs: str = ""
    seen_on: tuple[str, ...] = ()
    network: str = ""

    @property
    def position(self) -> int:
        """The node's position in the run's roster, which names its plan."""
        position = self.fields.get("node_rank")
        return position if isinstance(position, int) else 0

    @property
    def members(self) -> tuple[str, ...]:
        """The nodes of the newest attempt that this one knows, in the order of their ranks; empty if unknown."""
        found = self.fields.get("members")
        return tuple(map(str, found)) if isinstance(found, list) else ()

    @property
    def spare(self) -> bool:
        """Whether the node has no rank: it waits to replace another one."""
        return bool(self.members) and self.node not in self.members

    @property
    def rank(self) -> int:
        """The node's rank; of a spare its position."""
        return self.members.index(self.node) if self.node in self.members else self.position

    @property
    def state(self) -> str:
        """The state that the agent wrote; ``lost`` or ``unknown`` if it can no longer be true."""
        state = str(self.fields.get("state", UNKNOWN))
        if state not in LIVE or self.alive:
            return state
        return LOST if self.alive is False else UNKNOWN

    @property
    def live(self) -> bool:
        """Whether an agent is running here."""
        return self.alive is True and self.state in LIVE

    def number(self, key: str) -> float | None:
        """A number that the agent wrote."""
        return finite(self.fields.get(key))


@dataclass(frozen=True)
class Run:
    """A run with all its parts, in the order of their ranks."""

    id: str
    parts: tuple[Part, ...]

    @property
    def head(self) -> Part:
        """The part of rank 0, or of the lowest known rank."""
        return self.parts[0]

    @property
    def reporter(self) -> Part:
        """The part with the run's step and loss: of the lowest rank with a loss, else the head."""
        return next((part for part in self.parts if part.number("loss") is not None), self.head)

    def current(self, part: Part) -> Part:
        """A part with the phase and the step to show.

        Ranks whose log shows no progress leave their node in the phase before the first step, with the step of the
        checkpoint. Ranks advance together, so such a node has the reporter's phase and step.
        """
        reporter = self.reporter
        phase = reporter.fields.get("phase")
        both = part.state == reporter.state == "running" and part.number("attempt") == reporter.number("attempt")
        if not both or part.fields.get("phase") not in BEFORE or phase in (*BEFORE, None):
            return part
        return replace(part, fields={**part.fields, "phase": phase, "step": reporter.fields.get("step")})

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that reported it."""
        return tuple(part.node for part in self.parts)

    @property
    def members(self) -> tuple[str, ...]:
        """The nodes that reported it and have ranks, in the order of these."""
        return tuple(part.node for part in self.parts if not part.spare)

    @property
    def spares(self) -> tuple[str, ...]:
        """The nodes that reported it and have no rank."""
        return tuple(part.node for part in self.parts if part.spare)

    @property
    def missing(self) -> int:
        """The number of its nodes with ranks that did not report."""
        count = len(self.head.members) or int(self.head.number("nnodes") or len(self.members))
        return max(0, count - len(self.members))

    @property
    def live(self) -> bool:
        """Whether it is running on any node."""
        return any(part.live for part in self.parts)

    @property
    def ended(self) -> bool:
        """Whether every agent that reported has written an end."""
        return all(part.state in ENDED for part in self.parts)

    @property
    def state(self) -> str:
        """The state of the whole run."""
        states = [part.state for part in self.parts if not part.spare] or [part.state for part in self.parts]
        for state in ("ending", "running", "meeting", "starting"):
            if any(part.live and part.state == state for part in self.parts):
                return state
        for state in ("failed", LOST, UNKNOWN, "stopped"):
            if state in states:
                return state
        return states[0]

    @property
    def owner(self) -> str:
        """The user who started it."""
        return self.head.owner

    @property
    def resumable(self) -> bool:
        """Whether the run's agents know its checkpoint folder."""
        return self.head.fields.get("resumable") is not False

    @property
    def unmatched(self) -> str | None:
        """The user's pattern, if the run is over and no line of its log had the step or the loss of the pattern."""
        pattern = self.head.fields.get("pattern")
        if not isinstance(pattern, str) or not self.ended:
            return None
        names = [name for name in ("step", "loss") if f"(?P<{name}>" in pattern]
        found = any(part.number(name) is not None for part in self.parts for name in names)
        return pattern if names and not found else None

    @property
    def networks(self) -> tuple[str, ...]:
        """The networks that NCCL used on the nodes, where its log names them."""
        return tuple(dict.fromkeys(part.network for part in self.parts if part.network))

    @property
    def expected(self) -> Expected | None:
        """What it is judged by; None if its agent has not written it."""
        return read_expected(self.head.fields.get("expected"))

    @property
    def spent(self) -> Effective | None:
        """Where its time went; None if its agent, an older one, has not written it."""
        return effective.read(self.reporter.fields.get("spent"))

    @property
    def slow(self) -> str:
        """Why it is slow as a whole, or holds more memory than expected; "" if it is as expected."""
        texts = (self.head.fields.get(key) for key in ("slow", "full"))
        return "; ".join(" ".join(text.split()) for text in texts if isinstance(text, str))

    def left(self) -> float | None:
        """Seconds until its last step at the pace of its last samples; None if unknown."""
        step, total = self.reporter.number("step"), self.reporter.number("total")
        pace = pace_of(self.reporter.samples)
        return (total - step) * pace if self.live and pace and step is not None and total else None


@dataclass(frozen=True)
class NodeRuns:
    """One node's answer: the uid of the login, and the parts of runs on it."""

    uid: int | None = None
    parts: tuple[Part, ...] = ()


@dataclass
class _Lines:
    """The lines about one part."""

    logs: str
    owner: str
    state: str = ""
    stat: str = ""
    networks: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)


def parse_runs(node: str, out: str, names: Iterable[str]) -> NodeRuns:
    """Parse the script's output on a node. Skips unknown lines.

    ``names`` are all nodes of the inventory: a part that names one of them belongs to that node.
    """
    uid, boot = None, ""
    found: list[_Lines] = []
    parts: list[Part] = []
    for line in out.splitlines():
        word, _, rest = line.partition(" ")
        match word:
            case "me" if _UID.fullmatch(rest):
                uid = int(rest)
            case "boot":
                boot = rest.strip()
            case "part":
                logs, _, owner = rest.rpartition(" ")
                found.append(_Lines(logs, owner))
            case "private":
                parts.extend(_private(node, rest))
            case "state" if found:
                found[-1].state = rest
            case "network" if found and len(found[-1].networks) < _NETWORKS:
                found[-1].networks.append(rest[:_NETWORK])
            case "stat" if found:
                found[-1].stat = rest
            case "sample" if found and len(found[-1].samples) < _SAMPLES:
                found[-1].samples.append(rest)
    known = set(names)
    parts += [part for lines in found if (part := _part(node, lines, boot, known))]
    return NodeRuns(uid, tuple(parts))


def merge_runs(answers: Iterable[NodeRuns]) -> dict[str, Run]:
    """The runs of all nodes, by id, the oldest first. A node's own report has precedence over the reports of others."""
    best: dict[tuple[str, str], Part] = {}
    seen: dict[tuple[str, str], list[str]] = {}
    for answer in answers:
        for part in answer.parts:
            key = part.run, part.node
            seen.setdefault(key, []).extend(part.seen_on)
            if key not in best or part.alive is not None:
                best[key] = part
    runs: dict[str, list[Part]] = {}
    for key, part in best.items():
        runs.setdefault(part.run, []).append(replace(part, seen_on=tuple(seen[key])))
    kept = {run: sorted(of_now(parts), key=lambda part: (part.rank, part.node)) for run, parts in runs.items()}
    return {run: Run(run, tuple(kept[run])) for run in sorted(kept)}


def of_now(parts: Sequence[Part]) -> list[Part]:
    """The parts of the newest start: a resume on other nodes leaves old parts behind. Running parts always stay."""
    newest = max(parts, key=lambda part: (part.live, part.rank == 0, part.number("began") or 0.0))
    count = newest.number("nnodes")
    gone = [part for part in parts if _left_behind(newest, part) or any(_excludes(other, part) for other in parts)]
    left = [part for part in parts if part not in gone]
    return [part for part in left if part.live or count is None or part.number("nnodes") in {None, count}] or left


def _left_behind(newest: Part, part: Part) -> bool:
    """Whether a part is of an earlier start, and its node has no rank any more."""
    began, since = newest.number("began"), part.number("began")
    if part.live or not newest.members or part.node in newest.members or began is None or since is None:
        return False
    return since < began - _SAME_START


def _excludes(other: Part, part: Part) -> bool:
    """Whether a part of the same start, or of a later one, continues without this one."""
    excluded, began, since = other.fields.get("excluded"), other.number("began"), part.number("began")
    if not isinstance(excluded, dict) or part.node not in excluded or other.node == part.node:
        return False
    return began is None or since is None or began > since - _SAME_START


def pace_of(samples: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds per step over samples with ``time`` and ``step``."""
    points = [
        (float(sample["time"]), int(sample["step"]))
        for sample in samples
        if isinstance(sample.get("time"), int | float) and isinstance(sample.get("step"), int)
    ]
    points = [point for point in points if points and point[1] <= points[-1][1]]  # skip an earlier attempt
    if len(points) < 2 or points[-1][1] <= points[0][1]:
        return None
    return (points[-1][0] - points[0][0]) / (points[-1][1] - points[0][1])


def _part(node: str, lines: _Lines, boot: str, names: set[str]) -> Part | None:
    state = fields.read(lines.state)
    match = _LOGS.fullmatch(lines.logs)
    if state is None or match is None:
        return None
    named = str(state.get("node", node))
    where = named if named in names else node
    alive = None if where != node else _is_alive(state, lines.stat, boot)
    samples = tuple(sample for line in lines.samples if (sample := fields.read(line)) is not None)
    return Part(
        run=match[1],
        node=where,
        fields=state,
        alive=alive,
        owner=lines.owner,
        samples=samples if alive else (),
        logs=lines.logs,
        seen_on=(node,),
        network=str(read_network("\n".join(lines.networks)) or ""),
    )


def _is_alive(state: Mapping[str, Any], stat: str, boot: str) -> bool:
    """Whether the process in /proc is the agent that wrote the state: its pid may belong to another process now."""
    words = stat.rpartition(")")[2].split()
    return (
        len(words) > 19
        and words[0] not in {"Z", "X"}
        and words[19] == str(state.get("start"))
        and (not state.get("boot_id") or state["boot_id"] == boot)
    )


def _private(node: str, rest: str) -> list[Part]:
    """Another user's run: the node reports only ``ID UID OWNER``."""
    run, uid, owner = (*rest.split(), "", "", "")[:3]
    if not _RUN.fullmatch(run) or not _UID.fullmatch(uid):
        return []
    return [Part(run, node, {"uid": int(uid), "state": UNKNOWN}, alive=None, owner=owner, seen_on=(node,))]


# --- the network that NCCL used --------------------------------------------------------------------
#
# Which network NCCL used, from its own log (``NCCL_DEBUG=INFO``, subsystems INIT and NET; 2.4 to 2.28).
#
# Three kinds of lines matter. What NCCL found::
#
#     NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB ib0:192.168.11.1<0>
#     NCCL INFO NET/Socket : Using [0]eth0:10.77.0.10<0>
#
# what it chose (``Using network IB``), and the device of each channel that leaves the node::
#
#     NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA

_FOUND_IB = re.compile(r"NCCL INFO NET/IB ?: Using (.+?)(?:; OOB ([^:\s]+):.*)?$", re.MULTILINE)
_FOUND_SOCKET = re.compile(r"NCCL INFO NET/Socket ?: Using (.+)$", re.MULTILINE)
_IB_DEVICE = re.compile(r"\[(\d+)\](?:\{\d+\} )?([^\s:]+:\d+)/(IB|RoCE)")
_SOCKET_DEVICE = re.compile(r"\[(\d+)\]([^\s:]+):")
_CHOSEN = re.compile(r"NCCL INFO Using network (.+?)\s*$", re.MULTILINE)
_CHANNEL = re.compile(r"NCCL INFO Channel \d+(?:/\d+)? : .* via ([A-Z]\w*)(?:/(\w+))?(?:/(\d+))?(/GDRDMA)?")


@dataclass(frozen=True)
class Used:
    """A network that NCCL used.

    Attributes:
        kind: ``InfiniBand``, ``RoCE``, ``TCP``, ``inside the node``, or the name of NCCL's plugin.
        device: the devices, such as ``mlx5_0:1, mlx5_1:1``; empty if there are none.
        interface: the interface for TCP, or the one that sets up InfiniBand connections.
        direct: whether data goes from GPU to GPU without the host's memory; None: no channel leaves the node.
    """

    kind: str
    device: str = ""
    interface: str = ""
    direct: bool | None = None

    def __str__(self) -> str:
        """For messages: ``InfiniBand, mlx5_0:1, GPUDirect``."""
        parts = [self.kind, self.device or self.interface]
        if self.direct is not None and self.kind != "TCP":
            parts.append("GPUDirect" if self.direct else "without GPUDirect")
        return ", ".join(filter(None, parts))


def read_network(text: str) -> Used | None:
    """The network in the log of one process, or of several processes of a node; None if it names none."""
    devices: dict[str, tuple[str, str]] = {}
    sockets: dict[str, str] = {}
    interface = ""
    for match in _FOUND_IB.finditer(text):
        interface = match[2] or interface
        devices |= {number: (name, layer) for number, name, layer in _IB_DEVICE.findall(match[1])}
    for match in _FOUND_SOCKET.finditer(text):
        sockets |= dict(_SOCKET_DEVICE.findall(match[1]))
    channels = _CHANNEL.findall(text)
    leaving = [(net, number, bool(direct)) for way, net, number, direct in channels if way == "NET"]
    chosen = _CHOSEN.findall(text)
    if not leaving and channels:
        return Used("inside the node")
    if leaving:
        net = leaving[-1][0]
    elif chosen:
        net = chosen[-1]
    else:
        return None
    numbers = {number for name, number, _ in leaving if name == net}
    if net == "Socket":
        names = _chosen(sockets, numbers)
        return Used("TCP", interface=", ".join(names) or interface)
    used = [devices[number] for number in sorted(numbers, key=int) if number in devices] or list(devices.values())
    direct = all(way for name, _, way in leaving if name == net) if leaving else None
    if not net.startswith("IB") or not used:
        return Used("InfiniBand" if net.startswith("IB") else net, direct=direct, interface=interface)
    kind = "RoCE" if any(layer == "RoCE" for _, layer in used) else "InfiniBand"
    return Used(kind, ", ".join(dict.fromkeys(name for name, _ in used)), interface, direct)


def _chosen(found: dict[str, str], numbers: Iterable[str]) -> list[str]:
    names = [found[number] for number in sorted(numbers, key=int) if number in found]
    return list(dict.fromkeys(names or found.values()))
