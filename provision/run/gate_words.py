"""What the gate says: why nodes cannot take part, who goes on without them, and what is odd but stops nothing. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from provision.errors import PreflightError
from provision.hints import again
from provision.inventory import fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from provision.model import CommandLine, Finding, Node

_SHOWN = 12  # warnings of one run that are told


def refusal(
    nodes: Sequence[Node], bad: Mapping[str, str], rest: Sequence[Node], *, exclude: str, way: str
) -> PreflightError:
    """The error for nodes that cannot take part.

    Args:
        nodes: those that were looked at.
        bad: those that cannot, each with its reasons.
        rest: those that would be left.
        exclude: the command that continues with the rest; "" where there is none.
        way: another way out; "" where there is none.
    """
    others = rest and exclude
    ways = [f"to go on with {fold(node.name for node in rest)}: {exclude}" if others else "correct what is named"]
    ways += [way] if way else []
    count = f"{len(bad)} of {len(nodes)} nodes" if len(nodes) > 1 else nodes[0].name
    text = f"{count} cannot take part in the run; nothing was started"
    return PreflightError(text, reasons=bad, hint="; ".join(ways))


def warnings(findings: Iterable[Finding]) -> Iterator[str]:
    """A sentence for every warning, once for all nodes that have it."""
    warned: dict[str, list[str]] = {}
    for each in findings:
        if each.verdict == "WARN":
            warned.setdefault(f"{each.observed}{f'; {each.fix}' if each.fix else ''}", []).append(each.node)
    for text, names in list(warned.items())[:_SHOWN]:
        yield f"{fold(names)}: {text}"
    if len(warned) > _SHOWN:
        yield f"{len(warned) - _SHOWN} more warnings: clusterctl check"


def dropped(
    before: Sequence[Node],
    left: Sequence[Node],
    out: Mapping[str, str],
    *,
    spare: Sequence[str],
    asked: int | None,
    typed: CommandLine,
) -> Iterator[str]:
    """Who was left out, who goes on with which rank, and who could have taken a place.

    Args:
        before: the nodes that were to take part.
        left: those that do.
        out: those that do not, each with its reasons.
        spare: nodes of the inventory that were not to take part.
        asked: how many nodes were asked for, where a number was.
        typed: the user's command.
    """
    if not out:
        return
    for name, why in out.items():
        yield f"without {name}: {why}"
    moved = renumbered(left, before)
    names = fold(node.name for node in left)
    yield f"going on with {len(left)} of {len(before)} nodes: {names}" + (f"; {moved}" if moved else "")
    if spare and asked:
        are = "is" if len(spare) == 1 else "are"
        how = again(typed, "train", exclude=fold(out), nodes=str(asked))
        yield f"{fold(spare)} could take their place, and {are} not used: {how}"


def renumbered(nodes: Sequence[Node], before: Sequence[Node]) -> str:
    """Which ranks have changed: ``node03 is rank 1, node04 rank 2``; empty where none has."""
    old = {node.name: rank for rank, node in enumerate(before)}
    moved = [f"{node.name} is rank {rank}" for rank, node in enumerate(nodes) if old[node.name] != rank]
    return (
        ", ".join(moved) if len(moved) <= 8 else f"{fold(node.name for node in nodes)} are ranks 0 to {len(nodes) - 1}"
    )
