"""A case code: a few lines that carry a diagnosis out of a room by phone, with a checksum for each line. Pure.

A code has digits and letters without I, L, O and U (Crockford's base 32). A line has four groups of four: 14 symbols of
the case, and two that check them together with the line's number. So a wrong line is named, and lines that were swapped
are too. Three symbols at the end of the case check that all lines are of the same code.

======  ==================================================================================
symbols  content
======  ==================================================================================
1       the format, 1
1       the number of lines
n       clusterctl's version: three numbers
1, 1    the run's state, and the grade of the cause; both are places in the tables below
1       1: no other node shows the cause; 2: the logs have no common time
5       the cause, by 25 bits of the sha256 of its id: ids of other versions are recognized
n       numbers: nodes, nodes without logs, and node, rank, attempts, step, exit
0 or 7  after a symbol that is 1 if it is known, the first 8 hex digits of the release
5 each  after a symbol with their number: conditions, as the cause
3       the checksum of all symbols before
======  ==================================================================================

A number has four bits in each symbol, the lowest first; the fifth bit is set if another symbol follows.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from provision import __version__
from provision.diagnosis.cause import GRADES
from provision.diagnosis.causes import TABLE
from provision.diagnosis.conditions import RULES
from provision.errors import UsageError
from trainer.agent.contract.untrusted import whole

if TYPE_CHECKING:
    from provision.diagnosis.conditions import Condition
    from provision.diagnosis.evidence import Event, Evidence
    from provision.diagnosis.verdict import Verdict

FORMAT = 1
STATES = ("", "running", "finished", "failed", "stopped")
SYMBOLS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
DATA, LINE, GROUP = 14, 16, 4  # symbols: of the case in a line, of a line, of a group
LINES = 8  # of a code, at most
TYPED = 2000  # characters of a typed code that are read
CONDITIONS = 3

_PRIME = 1021  # below 32 * 32: two symbols hold the remainder
_DIGITS = 12  # symbols of a number
_HASH = 5  # symbols of a cause
_RELEASE = 8  # hex digits
_END = 3  # symbols of the whole checksum
_READ = {"O": "0", "I": "1", "L": "1"}  # as people write them
_ALIKE = ("BDEGPTV3CZ", "MN", "FSX", "5S", "2Z", "8AHJK", "1Y", "0Q", "8B", "6G", "VW", "7T")  # heard or seen alike
_SEPARATOR = re.compile(r"[-\u2010-\u2015\u2212_.\s]+")


@dataclass(frozen=True)
class Case:
    """The content of a case code.

    Attributes:
        version: clusterctl's version that wrote it.
        state: the run's state; "" if unknown.
        cause: the cause's id, or its hash in 7 hex digits if this version has no such cause; "" without a verdict.
        grade: the grade of the cause; "" without one.
        alone: only one of several nodes shows the cause.
        by_file: the logs have no common time.
        nodes: how many nodes the run has.
        missing: how many of them gave no logs.
        node: the rank of the node that failed first.
        rank: the rank that failed first.
        attempts: how often the run was started.
        step: its last step.
        exit_code: of the node that failed first.
        signal: the number of the signal that ended its processes.
        release: the first 8 hex digits of the release.
        conditions: ids of the training's problems, or hashes.
    """

    version: str = "0.0.0"
    state: str = ""
    cause: str = ""
    grade: str = ""
    alone: bool = False
    by_file: bool = False
    nodes: int = 0
    missing: int = 0
    node: int | None = None
    rank: int | None = None
    attempts: int = 1
    step: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    release: str = ""
    conditions: tuple[str, ...] = ()

    @property
    def confidence(self) -> str:
        """``high``, ``medium`` or ``low``: how well the logs explain the failure."""
        if self.grade == "cause":
            return "medium" if self.by_file else "high"
        return "medium" if self.grade in {"ended", "late"} else "low"


def case_of(
    evidence: Evidence, state: str, verdict: Verdict | None, conditions: Iterable[Condition], attempts: int
) -> Case:
    """The case of a diagnosis.

    Args:
        evidence: the evidence of the last attempt.
        state: the run's state.
        verdict: why it failed.
        conditions: the training's problems.
        attempts: how often the run was started.
    """
    record = next((each for each in evidence.records if verdict is not None and each.node == verdict.node), None)
    first = verdict.first if verdict is not None else None
    blamed = record if verdict is not None and not verdict.unresolved else None
    ends = [event for event in record.events if event.get("event") == "exit"] if record else []
    last: Event = ends[-1] if ends else {}
    taken = [
        step
        for each in evidence.records
        for step in (each.state.get("step"), *(event.get("step") for event in each.events))
        if isinstance(step, int)
    ]
    return Case(
        __version__,
        state if state in STATES else "",
        first.cause.id if first is not None else "",
        first.cause.grade if first is not None else "",
        verdict.alone if verdict is not None else False,
        verdict.by_file if verdict is not None else False,
        len(evidence.records) + len({*evidence.missing} - {each.node for each in evidence.records}),
        len(evidence.missing),
        blamed.node_rank if blamed is not None else None,
        verdict.rank if verdict is not None and not verdict.unresolved else None,
        attempts,
        max(taken, default=None),
        whole(last.get("rc")),
        whole(last.get("signal")),
        evidence.release[:_RELEASE],
        tuple(each.id for each in conditions)[:CONDITIONS],
    )


def encode(case: Case) -> tuple[str, ...]:
    """The lines of a case's code."""
    body = list(_body(case))
    count = -(-(len(body) + 2 + _END) // DATA)
    symbols = [FORMAT, count, *body]
    symbols += [*_checksum(symbols)]
    symbols += [0] * (count * DATA - len(symbols))
    parts = [symbols[start : start + DATA] for start in range(0, len(symbols), DATA)]
    return tuple(_line([*part, *_check(number, part)]) for number, part in enumerate(parts, 1))


def decode(typed: Sequence[str]) -> Case:
    """The case of a typed code.

    Args:
        typed: the lines, or all of them in one text.

    Raises:
        UsageError: a line is wrong, missing or of another code; it says which one.
    """
    if sum(map(len, typed)) > TYPED:
        raise UsageError("this is no case code: it is too long", hint="a code has two to eight lines of 16 symbols")
    lines = _lines(typed)
    parts = [_part(number, line) for number, line in enumerate(lines, 1)]
    if parts[0][0] != FORMAT:
        raise UsageError(
            f"this code has format {parts[0][0]}; this clusterctl reads format {FORMAT}",
            hint="decode it with the version that wrote it, or a newer one",
        )
    if len(parts) != parts[0][1]:
        raise UsageError(f"this code has {parts[0][1]} lines, and {len(parts)} were typed")
    reader = _Symbols(list(chain.from_iterable(parts)))
    return _case(reader)


def _body(case: Case) -> Iterator[int]:
    for number in [*map(int, re.findall(r"\d+", case.version)), 0, 0, 0][:3]:
        yield from _number(number)
    yield STATES.index(case.state) if case.state in STATES else 0
    yield GRADES.index(case.grade) + 1 if case.grade in GRADES else 0
    yield case.alone + 2 * case.by_file
    yield from _hash(case.cause)
    ended = 0 if case.exit_code is None else 1 + 2 * case.exit_code
    ended = ended if case.signal is None else 2 + 2 * case.signal
    optional = (0 if each is None else each + 1 for each in (case.node, case.rank))
    for number in (case.nodes, case.missing, *optional, case.attempts):
        yield from _number(number)
    yield from _number(0 if case.step is None else case.step + 1)
    yield from _number(ended)
    release = case.release[:_RELEASE] if re.match(r"[0-9a-f]{8}", case.release) else ""
    yield int(bool(release))
    if release:
        yield from _fixed(int(release, 16), 7)
    conditions = case.conditions[:CONDITIONS]
    yield len(conditions)
    for each in conditions:
        yield from _hash(each)


def _case(symbols: _Symbols) -> Case:
    symbols.take(2)
    version = ".".join(str(symbols.number()) for _ in range(3))
    state, grade, flags = symbols.take(3)
    cause = symbols.fixed(_HASH)
    nodes, missing, node, rank, attempts, step, ended = (symbols.number() for _ in range(7))
    release = f"{symbols.fixed(7):08x}" if symbols.take(1)[0] else ""
    conditions = tuple(named(symbols.fixed(_HASH)) for _ in range(min(symbols.take(1)[0], CONDITIONS)))
    symbols.finish()
    return Case(
        version,
        STATES[state] if state < len(STATES) else "",
        named(cause) if grade else "",
        GRADES[grade - 1] if 0 < grade <= len(GRADES) else "",
        bool(flags & 1),
        bool(flags & 2),
        nodes,
        missing,
        node - 1 if node else None,
        rank - 1 if rank else None,
        attempts,
        step - 1 if step else None,
        (ended - 1) // 2 if ended % 2 else None,
        (ended - 2) // 2 if ended and not ended % 2 else None,
        release,
        conditions,
    )


def hash_of(name: str) -> int:
    """25 bits that stand for a cause's id."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 7


_IDS = (*(each.id for each in TABLE), *(each.id for each in RULES))
KNOWN: Mapping[int, str] = {hash_of(each): each for each in _IDS}


def named(code: int) -> str:
    """The id of a cause or condition by its hash; the hash in hex if this version has none."""
    return KNOWN.get(code, f"{code:07x}")


class _Symbols:
    """Reads a case's symbols in order; every error is that of a code whose lines are right, but do not fit."""

    def __init__(self, values: list[int]) -> None:
        self._values, self._at = values, 0

    def take(self, count: int) -> list[int]:
        """The next symbols."""
        found = self._values[self._at : self._at + count]
        if len(found) < count:
            raise _mixed()
        self._at += count
        return found

    def number(self) -> int:
        """A number of any length."""
        value = 0
        for place in range(_DIGITS):
            symbol = self.take(1)[0]
            value |= (symbol & 15) << (4 * place)
            if symbol < 16:
                return value
        raise _mixed()

    def fixed(self, count: int) -> int:
        """A number of a fixed length."""
        value = 0
        for symbol in self.take(count):
            value = value << 5 | symbol
        return value

    def finish(self) -> None:
        """Compare the checksum; only zeros may follow it."""
        expected = [*_checksum(self._values[: self._at])]
        if self.take(_END) != expected or any(self._values[self._at :]):
            raise _mixed()


def _mixed() -> UsageError:
    return UsageError("these lines are right, but not of the same code", hint="read the whole code again, line by line")


def _lines(typed: Sequence[str]) -> list[str]:
    """The lines' symbols. Lines are on their own, or follow each other in one text."""
    texts = [unicodedata.normalize("NFKC", each).upper() for each in typed]
    parts = [part for text in texts for part in re.split(r"[\n,;/|]+", text) if part.strip()]
    if len(parts) == 1 and min(map(len, words := parts[0].split())) > GROUP + 1:
        parts = words  # whole lines with spaces between them
    lines = ["".join(_READ.get(letter, letter) for letter in _SEPARATOR.sub("", part)) for part in parts]
    if len(lines) == 1:
        lines = [lines[0][at : at + LINE] for at in range(0, len(lines[0]), LINE)]
    if not lines or len(lines) > LINES:
        raise UsageError(f"this is no case code: it has {len(lines)} lines", hint="a code has two to eight lines")
    return lines


def _part(number: int, line: str) -> list[int]:
    """A line's symbols without its check."""
    strange = next((letter for letter in line if letter not in SYMBOLS), None)
    if strange is not None:
        hint = "it may be V" if strange == "U" else "codes have digits and letters without I, L, O and U"
        raise UsageError(f"line {number} of the code has {strange!r}, which no code has", hint=hint)
    if len(line) != LINE:
        raise UsageError(f"line {number} of the code has {len(line)} symbols, not {LINE}", hint="read this line again")
    values = [SYMBOLS.index(letter) for letter in line]
    if not _is_right(number, values):
        raise UsageError(f"line {number} of the code is wrong", hint=_hint(number, values))
    return values[:DATA]


def _is_right(number: int, values: Sequence[int]) -> bool:
    return list(values[DATA:]) == [*_check(number, values[:DATA])]


def _hint(number: int, values: list[int]) -> str:
    """The line as it may be meant: one that is heard alike, or with two neighbours swapped, if there is only one."""
    found = {_line(each) for each in _similar(values) if _is_right(number, each)}
    if len(found) == 1:
        return f"is it {found.pop()}? Else read this line again"
    return "read this line again; the others before it are right" if number > 1 else "read this line again"


def _similar(values: list[int]) -> Iterator[list[int]]:
    for place, value in enumerate(values):
        for alike in _ALIKE:
            if SYMBOLS[value] in alike:
                yield from ([*values[:place], SYMBOLS.index(letter), *values[place + 1 :]] for letter in alike)
        if place + 1 < len(values):
            yield [*values[:place], values[place + 1], value, *values[place + 2 :]]


def _line(values: Sequence[int]) -> str:
    text = "".join(SYMBOLS[value] for value in values)
    return "-".join(text[at : at + GROUP] for at in range(0, len(text), GROUP))


def _check(number: int, part: Sequence[int]) -> Iterator[int]:
    """A line's check: the line as a number in base 32, after the line's own number, modulo a prime."""
    value = number
    for symbol in part:
        value = (value * 32 + symbol) % _PRIME
    return _fixed(value, 2)


def _checksum(symbols: Sequence[int]) -> Iterator[int]:
    return _fixed(zlib.crc32(bytes(symbols)) & 0x7FFF, _END)


def _hash(name: str) -> Iterator[int]:
    is_hash = re.fullmatch(r"[0-9a-f]{7}", name)
    return _fixed(int(name, 16) if is_hash else hash_of(name) if name else 0, _HASH)


def _fixed(value: int, count: int) -> Iterator[int]:
    return ((value >> (5 * place)) & 31 for place in reversed(range(count)))


def _number(value: int) -> Iterator[int]:
    value = min(max(value, 0), (1 << (4 * _DIGITS)) - 1)
    while value > 15:
        yield 16 | (value & 15)
        value >>= 4
    yield value
