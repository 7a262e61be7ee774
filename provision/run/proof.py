"""What a node says after a stop: how the agent ended, and whether anything of the run is left there. Pure.

``templates/run/stop.sh.j2`` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from provision.run import fields

ALL = ("processes", "ports", "gpus")


@dataclass(frozen=True)
class Proof:
    """One node after a stop.

    Attributes:
        said: the agent's own answer; empty when it gave none.
        left: what is still there, one sentence each.
        unproved: what could not be looked at, one sentence each.
    """

    said: Mapping[str, Any] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    unproved: tuple[str, ...] = ()

    @property
    def problem(self) -> str:
        """What is wrong with this node; "" when nothing is."""
        return "; ".join([*self.left, *self.unproved])


def proof(out: str, err: str = "") -> Proof:
    """Read a node's answer.

    Args:
        out: what the script printed.
        err: what it printed beside that: why the agent gave no answer.
    """
    lines = [line.partition(" ")[::2] for line in out.splitlines()]
    said = next((found for line in out.splitlines() if (found := fields.read(line)) is not None), {})
    left = [text for word, rest in lines if (text := _left(word, rest))]
    left += _left_by_agent(said) if not left else []
    unproved = [f"nvidia-smi does not tell what the GPUs hold: {rest}" for word, rest in lines if word == "unproved"]
    if said.get("error"):
        unproved.append(str(said["error"]))
    elif not said:
        status = next((rest for word, rest in lines if word == "agent"), "?")
        why = " ".join(err.split()) or f"it ended with status {status}"
        unproved.append(f"the agent gave no answer: {why[-300:]}")
    looked = {rest for word, rest in lines if word == "proved"}
    missing = [name for name in ALL if name not in looked]
    if missing and not unproved:
        unproved.append(f"could not look at its {', '.join(missing)}")
    return Proof(said, tuple(left), tuple(unproved))


def _left(word: str, rest: str) -> str:
    """What a line says is still there; "" when it says nothing of that kind."""
    first, _, more = rest.partition(" ")
    match word:
        case "left":
            return f"process {first} is still there: {more.strip()[:80] or '?'}"
        case "port":
            return f"port {first} is still in use"
        case "gpu":
            return f"a GPU still holds {more} of process {first}, which is gone"
    return ""


def _left_by_agent(said: Mapping[str, Any]) -> list[str]:
    found = []
    for key, what in (("left", "processes that nothing could end"), ("gpu", "processes that still hold GPU memory")):
        if pids := said.get(key):
            found.append(f"{what}: {', '.join(map(str, pids))}")
    return found
