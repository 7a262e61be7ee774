"""What the measures of ``tasks/measures`` report, line by line: clocks, ports and shared folders. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from provision.checks import Answer
from provision.checks.kit.host import number
from provision.model import Node


@dataclass(frozen=True)
class Offset:
    """How far a node's clock is ahead of the controller's, in seconds, and by how much that may be wrong."""

    seconds: float
    error: float

    def minus(self, other: Offset) -> Offset:
        """How far this clock is ahead of another one."""
        return Offset(self.seconds - other.seconds, self.error + other.error)


def line(offset: Offset, samples: int, *, whole_seconds: bool) -> str:
    """The answer's ``out``; ``offset`` reads it."""
    resolution = " whole-seconds" if whole_seconds else ""
    return f"offset {offset.seconds:.6f} {offset.error:.6f} {samples}{resolution}\n"


def offset(answer: Answer) -> Offset | None:
    """The offset in an answer; None when there is none."""
    match = re.match(r"offset (-?\d{1,12}\.\d{6}) (\d{1,12}\.\d{6}) \d+", answer.out)
    return Offset(float(match[1]), float(match[2])) if match else None


def show_offset(offset: Offset, *, sign: bool = True) -> str:
    """``+12 ms ± 0.4 ms``, ``-5.0 s ± 1 ms``."""
    seconds = offset.seconds if abs(offset.seconds) >= 5e-5 else 0.0  # no -0.0
    return f"{'+' if sign and seconds >= 0 else ''}{span(seconds)} ± {span(offset.error)}"


def span(seconds: float) -> str:
    """Seconds with a unit that suits them: ``0.4 ms``, ``80 ms``, ``5.0 s``, ``3 h``."""
    size = abs(seconds)
    if size < 0.00995:
        return f"{seconds * 1e3:.1f} ms"
    if size < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if size < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if size < 7200 else f"{seconds / 3600:.0f} h"


EVERY_PAIR = 16  # nodes up to which all pairs are tried; beyond, rank 0 and the neighbours in a ring


def pairs(nodes: Sequence[Node]) -> tuple[tuple[Node, Node], ...]:
    """Who connects to whom, each direction on its own.

    All pairs of a small cluster; of a large one every node with rank 0 and with the next, so that each has three
    partners or more and the work grows with the nodes, not with their pairs.
    """
    if len(nodes) <= EVERY_PAIR:
        return tuple((one, other) for one in nodes for other in nodes if one is not other)
    found: dict[tuple[str, str], tuple[Node, Node]] = {}
    for index, node in enumerate(nodes):
        for other in (nodes[0], nodes[(index + 1) % len(nodes)]):
            if node is not other:
                found[node.name, other.name] = (node, other)
                found[other.name, node.name] = (other, node)
    return tuple(found.values())


def partners(nodes: Sequence[Node], node: Node) -> tuple[str, ...]:
    """The addresses that ``node`` tries to reach."""
    return tuple(other.train_address for one, other in pairs(nodes) if one.name == node.name)


def blamed(tried: Iterable[tuple[str, str]], failed: Iterable[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """The nodes at which failed connections break off, each with the pairs (from, to) that it explains.

    A node that no other reaches explains all of that, then one that reaches no other. What is left over is
    laid to the node that was to be reached: nearly every firewall looks at what comes in.
    """
    tried = set(tried)
    rest = list(dict.fromkeys(failed))
    found: dict[str, list[tuple[str, str]]] = {}
    for side in (1, 0):
        for name in dict.fromkeys(pair[side] for pair in rest):
            mine = [pair for pair in rest if pair[side] == name]
            whole = {pair for pair in tried if pair[side] == name}
            if whole == set(mine) and (side or len(whole) > 1):
                found.setdefault(name, []).extend(mine)
        rest = [pair for pair in rest if not any(pair in mine for mine in found.values())]
    for pair in rest:
        found.setdefault(pair[1], []).append(pair)
    return found


State = Literal["open", "timeout", "refused", "unreachable", "foreign"]
_WORDS = {
    "timeout": "no answer (dropped)",
    "refused": "refused, although our listener is there (rejected)",
    "unreachable": "no way",
    "foreign": "another machine answers at this address",
}


@dataclass(frozen=True)
class Attempt:
    """A connection that a node tried.

    Attributes:
        peer: the node's name that was to be reached.
        kind: ``master`` or ``random``.
        port: the number.
        state: what became of it.
        seen: the source address as the listener saw it; "" where it is not known.
        source: the source address as it was on the connecting node.
        own: that node's data address.
        text: the error text of the system.
    """

    peer: str
    kind: str
    port: int
    state: str
    seen: str = ""
    source: str = ""
    own: str = ""
    text: str = ""

    @property
    def detour(self) -> bool:
        """Whether it came from another address than the node's own for the training."""
        return self.state == "open" and bool(self.own) and not {self.seen, self.source} <= {"", "-", self.own}


@dataclass(frozen=True)
class Heard:
    """All that a node says about ports."""

    own: str = ""
    master: str = ""
    owner: str = ""
    problem: str = ""
    tried: tuple[Attempt, ...] = ()

    def to(self, peer: str, kind: str) -> Attempt | None:
        """What became of a connection."""
        return next((one for one in self.tried if (one.peer, one.kind) == (peer, kind)), None)


def heard(answer: Answer) -> Heard:
    """The lines of one node."""
    named: dict[str, str] = {}
    tried: list[Attempt] = []
    for line in answer.lines:
        key, _, rest = line.partition(" ")
        words = rest.split()
        if key == "tried" and len(words) >= 4 and words[2].isdecimal():
            peer, kind, port, state, *more = words
            seen, source = (*more, "", "")[:2] if state == "open" else ("", "")
            text = " ".join(more) if state != "open" else ""
            tried.append(Attempt(peer, kind, int(port), state, seen, source, named.get("self", ""), text))
        elif key == "listen" and words[:1] == ["master"]:
            named["master"] = " ".join(words[2:])
        else:
            named.setdefault(key, rest)
    problem = named.get("problem", "") or ("" if answer.lines else answer.err)
    return Heard(named.get("self", ""), named.get("master", ""), named.get("owner", ""), problem, tuple(tried))


def detail(one: Attempt, target: Node, port: int) -> tuple[str, str]:
    """What happened to a connection, and what to do."""
    what = _WORDS.get(one.state, one.state) + (f": {one.text}" if one.text else "")
    observed = f"port {port} of {target.name} ({target.train_address}): {what}"
    if one.state == "unreachable":
        return observed, f"ip route get {target.train_address}"
    if one.state == "foreign":
        return observed, f"is {target.train_address} the address of {target.name}? ip -o addr show"
    return (
        observed,
        "trust the training network: firewall-cmd --zone=trusted --add-source=SUBNET; ufw allow from SUBNET; nft",
    )


_NOTHING = {"No such file or directory", "Directory nonexistent", "nonexistent directory"}  # bash, dash, busybox
HUNG = 124  # the exit code of a step that was given up


@dataclass
class Side:
    """One share as one node sees it; the words are those of the lines above."""

    number: int
    server: str
    path: str
    type: str = ""
    source: str = ""
    wrote: str = "not tried"
    read: str = "not tried"
    back: str = "not tried"
    stuck: list[str] = field(default_factory=list)

    def lines(self) -> Iterable[str]:
        """As text."""
        yield f"share {self.number} {self.server} {self.path}"
        yield f"mounted {self.number} {self.type} {self.source}"
        for word in ("wrote", "read", "back"):
            yield f"{word} {self.number} {getattr(self, word)}"
        yield from (f"stuck {process}" for process in self.stuck)


def sides(answer: Answer) -> list[Side]:
    """The shares of one node."""
    found: list[Side] = []
    for line in answer.lines:
        key, _, rest = line.partition(" ")
        words = rest.split(" ", 2)
        if key == "share" and len(words) == 3 and (at := number(words[0])) is not None:
            found.append(Side(at, words[1], words[2]))
        elif key == "mounted" and found and len(words) == 3:
            found[-1].type, found[-1].source = words[1:]
        elif key == "stuck" and found:
            found[-1].stuck.append(rest)
        elif key in {"wrote", "read", "back"} and found:
            setattr(found[-1], key, rest.partition(" ")[2])
    return found


def steps(out: str) -> dict[tuple[str, int], tuple[int, str]]:
    """Exit code and output of every step of a script, by what it was and the share's number."""
    parts = re.findall(r"^begin (\w+) (\d+)\n(.*?)^end \1 \2 (\d+)$", out, re.MULTILINE | re.DOTALL)
    return {(what, int(number)): (int(rc), observed) for what, number, observed, rc in parts}


def outcome(step: tuple[int, str] | None, token: str) -> str:
    """The word for a step: ``token`` is what a file must hold ("" for a step that reads none)."""
    if step is None:
        return "not tried"
    rc, observed = step
    if rc == HUNG:
        return "hung"
    if rc:
        text = " ".join(observed.split()).rpartition(": ")[2] or f"status {rc}"
        return "absent" if text in _NOTHING else text
    return "fine" if not token or token in observed else "absent"
