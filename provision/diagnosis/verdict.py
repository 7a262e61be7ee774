"""Finds the rank that failed first, and the cause among its echoes. Pure.

A line has the time at which the agent read it, up to a quarter of a second late, and clocks differ by milliseconds. So
signs within ``CLOSE`` count as simultaneous, and the strongest explanation of them comes first. A quiet period after an
exception shows that the run survived it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from provision.diagnosis.cause import GRADES, Sign
from provision.diagnosis.causes import TABLE
from provision.diagnosis.evidence import comparable
from provision.diagnosis.signs import drop_repeats, last_lines, place_of, signs

if TYPE_CHECKING:
    from provision.diagnosis.evidence import Evidence, Line, Record

CLOSE = 0.5  # seconds within which the order of signs is unknown: the agent's interval (0.25 s) and clock differences
QUIET = 60.0  # seconds after which a run has survived an exception, if others follow: a failed run is stopped sooner
TIMEOUT = "nccl.timeout"  # starts the ids of causes whose rank did not arrive
LAST = 15  # last lines that are shown if no cause was found

_NO_RANK = 1 << 30  # a sign without a rank sorts after signs with one
_PLACE = {cause.id: place for place, cause in enumerate(TABLE)}


@dataclass(frozen=True)
class Verdict:
    """Why a run failed.

    Attributes:
        first: the first failure; None if no row of the table explains it.
        also: the same cause on other ranks at the same time.
        echoes: the other signs, in the order of their times: consequences.
        alone: only one of several nodes shows the cause.
        node: the node of the first failure, also without an explanation.
        rank: the rank of the first failure; None: the launcher, or unknown.
        last: without an explanation, the last lines of that rank.
        reason: the agents' reason for the first failure.
        place: the file and line number of the last line in ``last``.
        by_file: the logs' times cannot be compared, so the order of the files counts.
    """

    first: Sign | None
    also: tuple[Sign, ...] = ()
    echoes: tuple[Sign, ...] = ()
    alone: bool = False
    node: str = ""
    rank: int | None = None
    last: tuple[str, ...] = ()
    reason: str = ""
    by_file: bool = False
    place: str = ""

    @property
    def unresolved(self) -> bool:
        """Whether a collective timed out, and the logs do not say which rank did not arrive."""
        first = self.first
        return first is not None and first.cause.id.startswith(TIMEOUT) and "missing" not in first.captured


def judge(evidence: Evidence, *, ended: bool = True) -> Verdict:
    """Find the first failure.

    Args:
        evidence: the evidence of one attempt.
        ended: whether the run has ended; while it is running, a sign that it may survive is not a failure.
    """
    places = {record.node: record.node_rank for record in evidence.records}
    by_file = not comparable(evidence)
    found = drop_repeats(sorted(signs(evidence), key=lambda sign: _order(sign, places, by_file=by_file)))
    if not ended:
        found = tuple(sign for sign in found if _is_consistent(sign, evidence))
    reason = _reason(evidence)
    first = _first_of_files(found, evidence) if by_file else _first(found, places)
    if first is None:
        node, rank = _failed_place(found, evidence)
        record = next((each for each in evidence.records if each.node == node), None)
        last = _last(record, rank) if record else ()
        reason = reason or _exit(found)
        texts = tuple(line.text for line in last)
        place = place_of(last[-1]) if last else ""
        return Verdict(None, (), found, node=node, rank=rank, last=texts, reason=reason, by_file=by_file, place=place)
    same = [sign for sign in found if sign.cause is first.cause and sign is not first]
    same = [sign for sign in same if sign.node != first.node or sign.rank is not None]  # the launcher repeats it
    also = tuple(
        sign for sign in same if abs(_when(sign) - _when(first)) <= CLOSE and not (by_file and sign.node != first.node)
    )
    echoes = tuple(
        sign
        for sign in found
        if sign is not first and sign not in also and (sign.cause is not first.cause or sign in same)
    )
    nodes = {sign.node for sign in same} - {first.node}
    alone = len(evidence.records) > 1 and not nodes
    return Verdict(first, also, echoes, alone, first.node, first.rank, reason=reason, by_file=by_file)


def _is_consistent(sign: Sign, evidence: Evidence) -> bool:
    """Whether a sign of a running run is a failure: its rank has been silent since."""
    if sign.cause.grade != "cause":
        return sign.cause.grade == "ended" or sign.cause.id == "rank.hangs"
    record = next((each for each in evidence.records if each.node == sign.node), None)
    times = [line.time for line in record.lines if line.rank == sign.rank and line.time is not None] if record else []
    return sign.time is None or not times or max(times) - sign.time <= QUIET


def _first(found: Sequence[Sign], places: dict[str, int]) -> Sign | None:
    """The sign that explains the failure; None if all are echoes."""
    fatal = _final([sign for sign in found if sign.cause.grade in {"cause", "unknown"}])
    for grades in ({"cause", "unknown"}, {"ended"}, {"late"}):
        pool = fatal if "cause" in grades else [sign for sign in found if sign.cause.grade in grades]
        if pool:
            start = min(_when(sign) for sign in pool)
            close = [sign for sign in pool if _when(sign) <= start + CLOSE]
            return min(close, key=lambda sign: _weight(sign, places))
    return None


def _first_of_files(found: Sequence[Sign], evidence: Evidence) -> Sign | None:
    """The strongest explanation among the files' first failures; of equal ones, the first file's."""
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
    """The signs after the last quiet period: the run survived the earlier ones."""
    final: list[Sign] = []
    for sign in sorted(found, key=_when):
        if final and _when(sign) - _when(final[-1]) > QUIET:
            final = []
        final.append(sign)
    return final


def _when(sign: Sign) -> float:
    return sign.time if sign.time is not None else 0.0


def _weight(sign: Sign, places: dict[str, int]) -> tuple[int, int, int, int, int]:
    """The sort key: the strongest explanation first, then the lowest rank."""
    rank = sign.rank if sign.rank is not None else _NO_RANK
    first_of_rank = sign.order if sign.time is None else 0
    return (GRADES.index(sign.cause.grade), first_of_rank, _PLACE[sign.cause.id], places.get(sign.node, 0), rank)


def _order(sign: Sign, places: dict[str, int], *, by_file: bool) -> tuple[int, float, int, int, int]:
    rank = sign.rank if sign.rank is not None else _NO_RANK
    return (places.get(sign.node, 0) if by_file else 0, _when(sign), places.get(sign.node, 0), rank, sign.order)


def _reason(evidence: Evidence) -> str:
    """The agents' reason: the field ``why`` of the event ``end``, or of the notice that an attempt failed."""
    return next((str(why["text"]) for why in _reasons(evidence) if why.get("text")), "")


def _reasons(evidence: Evidence) -> Iterator[Mapping[str, Any]]:
    """The reasons that agents gave, of each node the newest first."""
    for record in evidence.records:
        for event in reversed(record.events):
            why = event.get("why")
            if event.get("event") in {"end", "notice"} and isinstance(why, dict):
                yield why


def _exit(found: Sequence[Sign]) -> str:
    """The exit code of the launcher's process."""
    codes = [sign.captured["rc"] for sign in found if "rc" in sign.captured]
    return f"ended with exit code {codes[0]}" if codes else ""


def _failed_place(found: Sequence[Sign], evidence: Evidence) -> tuple[str, int | None]:
    """Node and rank of an unexplained first failure: from the agents' reason, else from the first echo."""
    for why in _reasons(evidence):
        if why.get("node"):
            rank = why.get("rank")
            return str(why["node"]), rank if isinstance(rank, int) else None
    if found:
        named = [sign for sign in found if sign.rank is not None and "local_rank" in sign.captured]
        sign = (named or list(found))[0]
        return sign.node, sign.rank
    failed = [
        record
        for record in evidence.records
        if any(event.get("event") == "exit" and event.get("rc") != 0 for event in record.events)
    ]
    return (failed or list(evidence.records))[0].node if evidence.records else "", None


def _last(record: Record, rank: int | None) -> tuple[Line, ...]:
    """The last lines of that rank; if it has none, of the launcher, else of any rank."""
    ranks = sorted({line.rank for line in record.lines if line.rank is not None})
    for each in [rank, None, *ranks]:
        if lines := last_lines(record, each, LAST):
            return lines
    return ()
