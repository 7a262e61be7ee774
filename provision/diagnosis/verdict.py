"""Which rank failed first and why: the cause among its echoes. Pure.

Lines carry the time at which the agent read them, up to a quarter of a second late, and nodes' clocks differ by some
milliseconds. So what lies within ``CLOSE`` counts as simultaneous, and then what explains more comes first. An earlier
exception that a run has survived is told from the fatal one by the quiet that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from provision.diagnosis.cause import GRADES, Sign
from provision.diagnosis.causes import TABLE
from provision.diagnosis.evidence import comparable
from provision.diagnosis.signs import last_lines, once, place_of, signs

if TYPE_CHECKING:
    from provision.diagnosis.evidence import Evidence, Line, Record

CLOSE = 0.5  # seconds within which no order is believed: the agent's look (0.25 s), and clocks that differ
QUIET = 60.0  # seconds after which an exception was survived, if others followed: a failed run is ended sooner
LAST = 15  # lines that are shown where nothing is known

_NO_RANK = 1 << 30  # what names no rank says less than what names one
_PLACE = {cause.id: place for place, cause in enumerate(TABLE)}


@dataclass(frozen=True)
class Verdict:
    """Why a run failed.

    Attributes:
        first: what happened first; None where no row of the table explains it.
        also: the same cause on other ranks at the same moment.
        echoes: other signs, in the order of their times: consequences.
        alone: whether no other node shows the cause, although there are others.
        node: of the first failure, also where nothing explains it.
        rank: of the first failure; None: the launcher, or unknown.
        last: where nothing explains it, the last lines of that rank.
        said: what the agents themselves say of the first failure.
        place: the file and the number of the last of ``last``.
        by_file: the logs' times cannot be compared: they count in the order of the files.
    """

    first: Sign | None
    also: tuple[Sign, ...] = ()
    echoes: tuple[Sign, ...] = ()
    alone: bool = False
    node: str = ""
    rank: int | None = None
    last: tuple[str, ...] = ()
    said: str = ""
    by_file: bool = False
    place: str = ""


def judge(evidence: Evidence, *, ended: bool = True) -> Verdict:
    """Find the first failure.

    Args:
        evidence: of one attempt.
        ended: whether the run has ended; while it goes on, what may be survived or late is no failure yet.
    """
    places = {record.node: record.node_rank for record in evidence.records}
    by_file = not comparable(evidence)
    found = once(sorted(signs(evidence), key=lambda sign: _order(sign, places, by_file=by_file)))
    if not ended:
        found = tuple(sign for sign in found if _holds(sign, evidence))
    said = _said(evidence)
    first = _first_of_files(found, evidence) if by_file else _first(found, places)
    if first is None:
        node, rank = _whose(found, evidence)
        record = next((each for each in evidence.records if each.node == node), None)
        last = _last(record, rank) if record else ()
        said = said or _exit(found)
        texts = tuple(line.text for line in last)
        place = place_of(last[-1]) if last else ""
        return Verdict(None, (), found, node=node, rank=rank, last=texts, said=said, by_file=by_file, place=place)
    same = [sign for sign in found if sign.cause is first.cause and sign is not first]
    same = [sign for sign in same if sign.node != first.node or sign.rank is not None]  # the launcher tells it again
    also = tuple(sign for sign in same if _near(sign, first) and not (by_file and sign.node != first.node))
    echoes = tuple(
        sign
        for sign in found
        if sign is not first and sign not in also and (sign.cause is not first.cause or sign in same)
    )
    nodes = {sign.node for sign in same} - {first.node}
    alone = len(evidence.records) > 1 and not nodes
    return Verdict(first, also, echoes, alone, first.node, first.rank, said=said, by_file=by_file)


def _holds(sign: Sign, evidence: Evidence) -> bool:
    """Whether a sign is a failure although the run goes on: its rank has fallen silent after it."""
    if sign.cause.grade != "cause":
        return sign.cause.grade == "ended" or sign.cause.id == "rank.hangs"
    record = next((each for each in evidence.records if each.node == sign.node), None)
    times = [line.time for line in record.lines if line.rank == sign.rank and line.time is not None] if record else []
    return sign.time is None or not times or max(times) - sign.time <= QUIET


def _first(found: Sequence[Sign], places: dict[str, int]) -> Sign | None:
    """The sign that explains the failure; None where all only echo it."""
    fatal = _final([sign for sign in found if sign.cause.grade in {"cause", "unknown"}])
    for grades in ({"cause", "unknown"}, {"ended"}, {"late"}):
        pool = fatal if "cause" in grades else [sign for sign in found if sign.cause.grade in grades]
        if pool:
            start = min(_when(sign) for sign in pool)
            close = [sign for sign in pool if _when(sign) <= start + CLOSE]
            return min(close, key=lambda sign: _weight(sign, places))
    return None


def _first_of_files(found: Sequence[Sign], evidence: Evidence) -> Sign | None:
    """Of every file's own first failure the one that explains most; of equals that of the file named first."""
    places = {record.node: record.node_rank for record in evidence.records}
    firsts = [_first([sign for sign in found if sign.node == record.node], places) for record in evidence.records]
    return min(
        (sign for sign in firsts if sign is not None),
        key=lambda sign: (*_weight(sign, places)[:1], places.get(sign.node, 0), _number(sign.rank), sign.node),
        default=None,
    )


def _number(rank: int | None) -> int:
    return rank if rank is not None else _NO_RANK


def _final(found: Sequence[Sign]) -> list[Sign]:
    """What comes after the last quiet: what was before it has been survived."""
    final: list[Sign] = []
    for sign in sorted(found, key=_when):
        if final and _when(sign) - _when(final[-1]) > QUIET:
            final = []
        final.append(sign)
    return final


def _when(sign: Sign) -> float:
    return sign.time if sign.time is not None else 0.0


def _near(one: Sign, other: Sign) -> bool:
    return abs(_when(one) - _when(other)) <= CLOSE


def _weight(sign: Sign, places: dict[str, int]) -> tuple[int, int, int, int, int]:
    """What explains more is less: of the same, the lowest rank."""
    rank = sign.rank if sign.rank is not None else _NO_RANK
    first_of_rank = sign.order if sign.time is None else 0
    return (GRADES.index(sign.cause.grade), first_of_rank, _PLACE[sign.cause.id], places.get(sign.node, 0), rank)


def _order(sign: Sign, places: dict[str, int], *, by_file: bool) -> tuple[int, float, int, int, int]:
    rank = sign.rank if sign.rank is not None else _NO_RANK
    return (places.get(sign.node, 0) if by_file else 0, _when(sign), places.get(sign.node, 0), rank, sign.order)


def _said(evidence: Evidence) -> str:
    """The agents' own word: why of the event end."""
    for record in evidence.records:
        for event in reversed(record.events):
            why = event.get("why")
            if event.get("event") == "end" and isinstance(why, dict) and why.get("text"):
                return str(why["text"])
    return ""


def _exit(found: Sequence[Sign]) -> str:
    """How the launcher says that its process ended."""
    codes = [sign.captured["rc"] for sign in found if "rc" in sign.captured]
    return f"ended with exit code {codes[0]}" if codes else ""


def _whose(found: Sequence[Sign], evidence: Evidence) -> tuple[str, int | None]:
    """Node and rank of the first failure where nothing explains it: the agents' word, else the first echo's."""
    for record in evidence.records:
        for event in reversed(record.events):
            why = event.get("why")
            if event.get("event") == "end" and isinstance(why, dict) and why.get("node"):
                rank = why.get("rank")
                return str(why["node"]), rank if isinstance(rank, int) else None
    if found:
        named = [sign for sign in found if sign.rank is not None and "local_rank" in sign.captured]
        sign = (named or list(found))[0]
        return sign.node, sign.rank
    failed = [record for record in evidence.records if _failed(record)]
    return (failed or list(evidence.records))[0].node if evidence.records else "", None


def _failed(record: Record) -> bool:
    return any(event.get("event") == "exit" and event.get("rc") != 0 for event in record.events)


def _last(record: Record, rank: int | None) -> tuple[Line, ...]:
    """The last lines of that rank, of the launcher where it has none, else of any rank."""
    ranks = sorted({line.rank for line in record.lines if line.rank is not None})
    for each in [rank, None, *ranks]:
        if lines := last_lines(record, each, LAST):
            return lines
    return ()
