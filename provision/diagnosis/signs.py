"""Finds matches of the table of causes in a run's logs and events.

Matching is fast: logs have tens of thousands of lines, the table hundreds of rows. Every match of most patterns
contains some plain text. Searching for that text first takes a tenth of the time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from provision.diagnosis.arrivals import find_arrival, name_ranks, node_of
from provision.diagnosis.cause import Cause, Sign
from provision.diagnosis.causes import TABLE, files, memory, nccl, processes
from provision.diagnosis.evidence import comparable
from provision.diagnosis.reading import progress
from provision.inventory import fold
from provision.run.ignored import find_unsent

if TYPE_CHECKING:
    from provision.diagnosis.evidence import Event, Evidence, Line, Record


def required_text(pattern: str) -> str:
    """The longest plain text that every match of a pattern contains; "" if there is none.

    It looks only outside of groups and character classes, at text that is not repeated or optional.
    """
    if "(?i" in pattern:
        return ""
    parts: list[str] = [""]  # pieces of plain text, split at everything else
    depth = place = 0
    while place < len(pattern):
        sign = pattern[place]
        if sign == "|" and depth == 0:
            return ""
        plain = ""
        step = 1
        if sign == "\\":
            plain, step = ("" if pattern[place + 1].isalnum() else pattern[place + 1]), 2
        elif sign == "[":
            step = pattern.index("]", place + 2) + 1 - place
        elif sign in "?*{":
            parts[-1] = parts[-1][:-1]
            step = pattern.index("}", place) + 1 - place if sign == "{" else 1
        elif sign in "()":
            depth += 1 if sign == "(" else -1
        elif sign not in ".^$+|":
            plain = sign
        if plain and depth == 0:
            parts[-1] += plain
        else:
            parts.append("")
        place += step
    return max(parts, key=len)


_PATTERNS = tuple(
    (required_text(source), re.compile(source), re.compile(context), cause)
    for cause in TABLE
    if not cause.differs
    for source, context in (*((line, cause.context) for line in cause.lines), *cause.traced)
)
_OF_EVENTS = tuple(cause for cause in TABLE if cause.events)
COMPARING = tuple(cause for cause in TABLE if cause.differs)


def match_line(text: str) -> Iterator[tuple[Cause, dict[str, str], re.Pattern[str]]]:
    """The rows that match a line, in the table's order, with the captured groups and the context that it needs.

    Rows that compare nodes are omitted.
    """
    last = None
    for plain, pattern, context, cause in _PATTERNS:
        if plain in text and (cause.id, context.pattern) != last and (found := pattern.search(text)):
            last = cause.id, context.pattern
            yield cause, {name: value for name, value in found.groupdict().items() if value}, context


def match_event(event: Mapping[str, Any]) -> Iterator[tuple[Cause, dict[str, str]]]:
    """The rows that match an event."""
    for cause in _OF_EVENTS:
        if (captured := cause.take(event)) is not None:
            yield cause, captured


CONTEXT = 120  # lines before a sign that give its context: a trainer's traceback has about 60
_SOURCE = re.compile(r'\s*(?:\|\s*)?File "[^"]+", line \d+')  # a frame of a traceback; source code follows
_TRACEBACK = "Traceback (most recent call last):"
_FRAMES = 4  # innermost frames of a traceback that are shown
_LINES = 200  # lines of a traceback that are searched
_SHOWN = 4  # ranks that are named with their operations
_BEHIND = frozenset({"nccl.timeout", "nccl.timeout.evaluating"})  # sequence numbers can name the missing rank
SURVIVED = 2.0  # seconds before the last progress in which a failure may be: progress is written late


def signs(evidence: Evidence) -> tuple[Sign, ...]:
    """All signs, except signs that the run survived."""
    several = len(evidence.records) > 1
    found = [sign for record in evidence.records for sign in _of_record(record, several=several)]
    found = _with_missing_rank(found, evidence)
    found = [_of_other_process(_of_unsent_file(_of_lost_node(sign, evidence), evidence)) for sign in found]
    if evidence.run:
        found = [replace(sign, captured={**sign.captured, "host": sign.node}) for sign in found]
    if comparable(evidence):
        alive = dict.fromkeys((record.node for record in evidence.records), _last_progress(evidence.records))
    else:
        alive = {record.node: _last_progress([record]) for record in evidence.records}
    return tuple(sign for sign in [*found, *_differences(evidence)] if _is_fatal(sign, alive.get(sign.node)))


def _is_fatal(sign: Sign, alive: float | None) -> bool:
    return sign.cause.lasting or alive is None or sign.time is None or sign.time >= alive - SURVIVED


def _with_missing_rank(found: list[Sign], evidence: Evidence) -> list[Sign]:
    """The signs with the rank that did not arrive instead of those that waited; or what all of them show."""
    if not any(sign.cause.id in _BEHIND for sign in found):
        return found
    met = find_arrival(evidence)
    if met is None:
        return found
    if met.operations:
        pairs = ", ".join(f"{operation} on rank {rank}" for rank, operation in sorted(met.operations.items())[:_SHOWN])
        values = {"which": f"at number {met.number} {pairs}"}
        return [
            replace(each, cause=nccl.MISMATCH, captured=values) if each.cause.id in _BEHIND else each for each in found
        ]
    if met.complete:
        counts = {"count": str(len(met.waiting)), "number": str(met.number), "operation": met.operation}
        return [
            replace(sign, cause=nccl.STUCK, captured={**sign.captured, **counts}) if sign.cause.id in _BEHIND else sign
            for sign in found
        ]
    if not met.missing:
        return found
    rank = met.missing[0]
    node = node_of(evidence, rank)
    values = {"missing": name_ranks(met.missing), "late": str(rank)}
    return [
        replace(sign, node=node or sign.node, rank=rank, captured={**sign.captured, **values})
        if sign.cause.id in _BEHIND
        else sign
        for sign in found
    ]


def _of_lost_node(sign: Sign, evidence: Evidence) -> Sign:
    """The sign of a silent node with its real cause: an agent's traceback, or a machine that stayed up."""
    if sign.cause.id != "node.lost":
        return sign
    record = next((each for each in evidence.records if each.node == sign.node), None)
    if record is None:
        return sign
    texts = [line.text for line in record.agent]
    if _TRACEBACK in texts:
        end = len(texts) - 1
        while end and not re.match(r"\w[\w.]*(?:Error|Exception|Interrupt)\b", texts[end]):
            end -= 1
        line = record.agent[end]
        return replace(
            sign, cause=processes.AGENT_FAILED, text=line.text, captured={"text": line.text}, place=place_of(line),
            before=_frames(record.agent, end),
        )  # fmt: skip
    if record.boot is not None and sign.time is not None and record.boot < sign.time:
        return replace(sign, cause=processes.NODE_SILENT)
    return sign


def _of_unsent_file(sign: Sign, evidence: Evidence) -> Sign:
    """The sign of a missing file with its real cause, if git ignores the file and so it was not sent."""
    if sign.cause.id != "file.missing" or not evidence.unsent:
        return sign
    path = find_unsent(sign.captured.get("path", "").strip("'\""), evidence.unsent)
    return sign if path is None else replace(sign, cause=files.UNSENT, captured={**sign.captured, "path": path})


def _of_other_process(sign: Sign) -> Sign:
    """The sign of a full GPU with its real cause, if the numbers show that another process holds much of it."""
    other = memory.other_memory(sign.captured) if sign.cause.id.startswith("cuda.oom") else None
    return replace(sign, cause=memory.OTHERS, captured={**sign.captured, "other": other}) if other else sign


def _of_record(record: Record, *, several: bool) -> Iterator[Sign]:
    streams: dict[int | None, list[int]] = {}  # by rank: the places of its lines
    for place, line in enumerate(record.lines):
        streams.setdefault(line.rank, []).append(place)
    for rank in sorted(streams, key=lambda rank: (rank is None, rank)):
        yield from _of_stream(record, streams[rank], several=several)
    for order, event in enumerate(record.events):
        yield from _of_event(record, event, order)


def _of_stream(record: Record, places: list[int], *, several: bool) -> Iterator[Sign]:
    lines = [record.lines[place] for place in places]
    known: dict[str, bool] = {}  # logs repeat many lines
    for order, line in enumerate(lines):
        if line.text not in known:
            known[line.text] = any(True for _ in match_line(line.text))
        is_source = order and line.text.startswith(" ") and _SOURCE.match(lines[order - 1].text)
        if not known[line.text] or is_source:
            continue
        before = lines[max(0, order - CONTEXT) : order]
        for cause, captured, context in match_line(line.text):
            around = record.lines[max(0, places[order] - CONTEXT) : places[order]] if cause.anywhere else before
            if context.pattern and not any(context.search(each.text) for each in reversed(around)):
                continue
            if cause.several and not several:
                continue
            after = 0 if "local_rank" in captured else cause.more  # a launcher's line is followed by its own traceback
            more = tuple(each.text for each in lines[order + 1 : order + 1 + after])
            rank = _rank(line.rank, captured, record)
            frames = _frames(lines, order)
            yield Sign(cause, record.node, rank, line.time, line.text, captured, order, more, frames, place_of(line))
            break


def _frames(lines: Sequence[Line], order: int) -> tuple[str, ...]:
    """The innermost frames of the traceback that ends with this line; none if no traceback does."""
    start = order
    for start in range(order - 1, max(-1, order - _LINES), -1):
        text = lines[start].text
        if text.strip() == _TRACEBACK:
            break
        if not text.startswith(" "):
            return ()
    else:
        return ()
    frames = [place for place in range(start + 1, order) if _SOURCE.match(lines[place].text)]
    return tuple(line.text for line in lines[frames[-_FRAMES:][0] : order]) if frames else ()


def place_of(line: Line) -> str:
    """The file and line number of a line."""
    return f"{line.file}, line {line.number}" if line.file and line.number else line.file


def _rank(rank: int | None, captured: dict[str, str], record: Record) -> int | None:
    """The rank of a sign: a launcher names the process that failed."""
    if rank is None and (local := _whole(captured.get("local_rank"))) is not None:
        return record.first_rank + local
    return _whole(captured.get("rank")) if rank is None else rank


def _whole(text: str | None) -> int | None:
    """The text as a rank; None if it is not one."""
    return int(text) if text and re.fullmatch(r"\d{1,6}", text) else None


def _of_event(record: Record, event: Event, order: int) -> Iterator[Sign]:
    for cause, captured in match_event(event):
        why = event.get("why")
        source = why if isinstance(why, dict) else event
        rank = source.get("rank")
        if rank is None and "odd" in captured:
            rank = _whole(captured["odd"])
        yield Sign(
            cause,
            str(captured.get("lost") or (source.get("node") if source is why else None) or record.node),
            rank if isinstance(rank, int) else None,
            _time(event),
            str(source.get("text") or event.get("error") or _describe(event)),
            captured,
            order,
            place=f"{record.folder}/events.jsonl" if record.folder else "",
        )
        return


def _describe(event: Event) -> str:
    fields = {key: value for key, value in event.items() if key not in {"event", "time", "attempt"}}
    return " ".join([str(event.get("event")), *(f"{key}={value}" for key, value in fields.items())])


def _differences(evidence: Evidence) -> Iterator[Sign]:
    """A sign for each value that differs between nodes, on the node with the rarest value."""
    for cause in COMPARING:
        seen: dict[str, dict[str, Line]] = {}  # name: {value: first line}
        where: dict[str, dict[str, set[str]]] = {}  # name: {value: nodes}
        for record in evidence.records:
            for line in record.lines:
                if "version" not in line.text:
                    continue
                for name, value in (cause.read(line.text) or {}).items():
                    seen.setdefault(name, {}).setdefault(value, line)
                    where.setdefault(name, {}).setdefault(value, set()).add(record.node)
        for name, values in where.items():
            if len(values) > 1 and len(set().union(*values.values())) > 1:
                odd = min(values, key=lambda value: (len(values[value]), value))
                text = ", ".join(f"{value} on {fold(sorted(nodes))}" for value, nodes in sorted(values.items()))
                line = seen[name][odd]
                yield Sign(cause, line.node, None, line.time, line.text, {"what": name, "values": text})


def _last_progress(records: Sequence[Record]) -> float | None:
    """The time of the run's last reported step."""
    events = (event for record in records for event in record.events if event.get("event") == "progress")
    printed = (event for record in records for event in progress(record.lines, record.pattern))
    return max((time for event in [*events, *printed] if (time := _time(event)) is not None), default=None)


def _time(event: Event) -> float | None:
    value = event.get("time")
    return None if value is None else float(value)


def drop_repeats(found: Iterable[Sign]) -> tuple[Sign, ...]:
    """The first sign of each cause on each rank; a rank's own line is preferred to its launcher's."""
    first: dict[tuple[str, str, int | None], Sign] = {}
    for sign in found:
        key = sign.cause.id, sign.node, sign.rank
        known = first.setdefault(key, sign)
        if "local_rank" in known.captured and "local_rank" not in sign.captured:
            first[key] = sign
    return tuple(first.values())


def last_lines(record: Record, rank: int | None, count: int) -> tuple[Line, ...]:
    """The last lines of a rank, or of the launcher."""
    own = (line for line in reversed(record.lines) if line.rank == rank)
    return tuple(reversed(list(islice(own, count))))
