"""Finds the rank that did not arrive at a collective that timed out, from sequence numbers in the logs. Pure.

torch's watchdog numbers the collectives of a process group. A waiting rank prints the number at which it waits, and the
last number that it enqueued. The other ranks print their last number too, on a signal of the waiting rank (``Received a
dump signal``). A rank whose last enqueued number is lower did not arrive. With TORCH_NCCL_DESYNC_DEBUG=1 torch names
such ranks itself.

A dump of torch's flight recorder has a rank's last collectives. It is a pickle (``nccl_trace_rank_N``) or JSON. A
pickle may contain only plain values: classes and functions are refused, so that a dump from an unknown source runs no
code.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.agent.contract.untrusted import UntrustedError, parse_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from provision.diagnosis.evidence import Evidence, Line

_WAITED = re.compile(
    r"\[Rank (?P<rank>\d{1,6})\] Watchdog caught collective operation timeout: "
    r"WorkNCCL\(SeqNum=(?P<number>\d{1,18}), OpType=(?P<operation>\w+)"
)
_STATUS = re.compile(
    r"\[PG (?:ID )?(?P<group>\S+)(?: PG GUID \S+)? Rank (?P<rank>\d{1,6})\].*?"
    r"[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,18})"
)
_SIZE = re.compile(r"NCCL INFO .*\bnranks (?P<size>\d{1,6})\b")
_DESYNC = re.compile(r"\[(?P<rank>\d{1,6})\] finished collective #(?P<enqueued>\d{1,18}), but didn't join")


@dataclass(frozen=True)
class Arrival:
    """A collective that timed out.

    Attributes:
        number: its sequence number.
        operation: its kind, such as ALLREDUCE.
        waiting: the ranks that waited in it.
        missing: the ranks that did not arrive; empty: the logs do not say.
        complete: all ranks of the communicator wait in it.
        operations: by rank, where ranks wait in different kinds at this number; else empty.
    """

    number: int
    operation: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    complete: bool = False
    operations: Mapping[int, str] = field(default_factory=dict)


def find_arrival(evidence: Evidence) -> Arrival | None:
    """The first collective that timed out; None if none did."""
    waits: dict[int, tuple[int, str]] = {}  # by rank: number and operation of the earliest
    groups: dict[int, str] = {}  # by rank: the process group that its watchdog named
    last: dict[tuple[str, int], int] = {}  # by group and rank: the highest number that it enqueued
    size = 0  # ranks of the largest communicator
    for line in _lines(evidence):
        if found := _WAITED.search(line.text):
            rank = _global(line, found)
            waits[rank] = min(waits.get(rank, (1 << 62, "")), (int(found["number"]), found["operation"]))
        elif found := _STATUS.search(line.text):
            rank = _global(line, found)
            key = (found["group"], rank)
            last[key] = max(last.get(key, -1), int(found["enqueued"]))
            groups.setdefault(rank, found["group"])
        elif found := _DESYNC.search(line.text):
            last["", int(found["rank"])] = int(found["enqueued"])
        elif found := _SIZE.search(line.text):
            size = max(size, int(found["size"]))
    if not waits:
        return None
    counted = Counter(sorted(groups[rank] for rank in waits if rank in groups)) or Counter(sorted(groups.values()))
    group = counted.most_common(1)[0][0] if counted else ""
    number = min(number for number, _ in waits.values())
    waiting = tuple(sorted(rank for rank, (at, _) in waits.items() if at == number))
    status = {rank: enqueued for (of, rank), enqueued in last.items() if of in {group, ""}}
    behind = tuple(sorted(rank for rank, enqueued in status.items() if enqueued < number and rank not in waiting))
    operations = {rank: waits[rank][1] for rank in waiting if not group or groups.get(rank) == group}
    if len(set(operations.values())) > 1:
        return Arrival(number, waits[waiting[0]][1], waiting, (), operations=operations)
    if 1 < size == len(waiting):
        return Arrival(number, waits[waiting[0]][1], waiting, (), complete=True)
    missing = behind or _silent(evidence, {*waits, *status})
    return Arrival(number, waits[waiting[0]][1], waiting, missing)


def _silent(evidence: Evidence, reporting: set[int]) -> tuple[int, ...]:
    """Ranks with a log whose watchdog printed nothing; none if there are too many of them."""
    seen = {line.rank for line in _lines(evidence) if line.rank is not None}
    silent = tuple(sorted(seen - reporting))
    return silent if len(silent) < len(reporting) else ()


def _lines(evidence: Evidence) -> Iterator[Line]:
    for record in evidence.records:
        yield from record.lines


def _global(line: Line, found: re.Match[str]) -> int:
    """The global rank: torch's prefix of the line names it; the text only names the rank in its group."""
    return line.rank if line.rank is not None else int(found["rank"])


def node_of(evidence: Evidence, rank: int) -> str | None:
    """The node or file of a rank: the one with its log lines, else the one whose range has its number."""
    for record in evidence.records:
        if any(line.rank == rank for line in record.lines):
            return record.node
    before = [record for record in evidence.records if record.first_rank <= rank]
    return max(before, key=lambda record: record.first_rank).node if before else None


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-2 and 5``."""
    rows: list[list[int]] = []
    for rank in sorted(ranks):
        if rows and rank == rows[-1][-1] + 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    parts = [str(row[0]) if len(row) == 1 else f"{row[0]}-{row[-1]}" for row in rows]
    word = "rank" if len(rows) == 1 and len(rows[0]) == 1 else "ranks"
    return f"{word} {' and '.join([', '.join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)}"


# --- dumps of the flight recorder -----------------------------------------------------------------

_PICKLE = b"\x80"


class _Plain(pickle.Unpickler):
    """Unpickles plain values only."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every class and function."""
        raise pickle.UnpicklingError(f"{module}.{name}")


def is_dump(name: str, data: bytes) -> bool:
    """Whether a file is a dump of the flight recorder."""
    return dump_rank(name) is not None and data[:1] in {_PICKLE, b"{"} and b"pg_status" in data


def dump_rank(name: str) -> int | None:
    """The rank in the name of a dump."""
    found = re.search(r"rank_?(\d{1,6})(?:\.json)?$", name)
    return int(found[1]) if found else None


def dump_lines(name: str, data: bytes) -> str:
    """A line for each process group with the rank's last collective, in the format of torch's watchdog.

    Raises:
        UntrustedError: the file is not a dump.
    """
    try:
        dump = _Plain(io.BytesIO(data)).load() if data[:1] == _PICKLE else parse_object(data, limit=len(data))
        groups = [(str(group), _numbers(status)) for group, status in dump["pg_status"].items()]
    except UntrustedError:
        raise
    except Exception as error:  # noqa: BLE001 - a pickle fails in many ways
        raise UntrustedError(f"is not a flight recorder dump: {type(error).__name__}") from None
    rank = dump_rank(name)
    return "".join(
        f"[rank{rank}]: [PG ID {group} PG GUID {group} Rank {rank}] flight recorder: last enqueued work: {enqueued}, "
        f"last completed work: {completed}\n"
        for group, (enqueued, completed) in groups
        if re.fullmatch(r"\w{1,40}", group)
    )


def _numbers(status: dict[str, Any]) -> tuple[int, int]:
    return int(status["last_enqueued_collective"]), int(status["last_completed_collective"])
