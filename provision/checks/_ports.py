"""What the ports measure brings back, by line, and how it is said. Pure.

::

    tool perl                                       what listened and connected there
    problem TEXT                                    why it could not
    self 10.0.0.11                                  its own data address
    listen master 29500 open                        or busy, or why not
    owner python3 (pid 4242)                        who has the port
    listen random 40123 open
    tried node02 random 40123 open 10.0.0.11 10.0.0.11   source address as the listener saw it, and as it was here
    tried node03 master 29500 timeout               or refused, unreachable TEXT, foreign (somebody else listens)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from provision.checks import Answer
from provision.model import Node

State = Literal["open", "timeout", "refused", "unreachable", "foreign"]
_WORDS = {
    "timeout": "no answer (dropped)",
    "refused": "refused, although our listener is there (rejected)",
    "unreachable": "no way",
    "foreign": "somebody else answers at this address",
}


@dataclass(frozen=True)
class Tried:
    """A connection that a node tried.

    Attributes:
        peer: the node's name that was to be reached.
        kind: ``master`` or ``random``.
        port: the number.
        state: what became of it.
        seen: the source address as the listener saw it; "" where it could not tell.
        source: the source address as it was on the connecting node.
        own: that node's data address.
        text: what the system said.
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
    tried: tuple[Tried, ...] = ()

    def to(self, peer: str, kind: str) -> Tried | None:
        """What became of a connection."""
        return next((one for one in self.tried if (one.peer, one.kind) == (peer, kind)), None)


def heard(answer: Answer) -> Heard:
    """The lines of one node."""
    named: dict[str, str] = {}
    tried: list[Tried] = []
    for line in answer.lines:
        key, _, rest = line.partition(" ")
        words = rest.split()
        if key == "tried" and len(words) >= 4 and words[2].isdecimal():
            peer, kind, port, state, *more = words
            seen, source = (*more, "", "")[:2] if state == "open" else ("", "")
            text = " ".join(more) if state != "open" else ""
            tried.append(Tried(peer, kind, int(port), state, seen, source, named.get("self", ""), text))
        elif key == "listen" and words[:1] == ["master"]:
            named["master"] = " ".join(words[2:])
        else:
            named.setdefault(key, rest)
    problem = named.get("problem", "") or ("" if answer.lines else answer.err)
    return Heard(named.get("self", ""), named.get("master", ""), named.get("owner", ""), problem, tuple(tried))


def detail(one: Tried, target: Node, port: int) -> tuple[str, str]:
    """What happened to a connection, and what to do."""
    what = _WORDS.get(one.state, one.state) + (f": {one.text}" if one.text else "")
    said = f"port {port} of {target.name} ({target.train_address}): {what}"
    if one.state == "unreachable":
        return said, f"ip route get {target.train_address}"
    if one.state == "foreign":
        return said, f"is {target.train_address} the address of {target.name}? ip -o addr show"
    return (
        said,
        "trust the training network: firewall-cmd --zone=trusted --add-source=SUBNET; ufw allow from SUBNET; nft",
    )
