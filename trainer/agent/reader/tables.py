"""Reads formats over several lines: tables with a header, and ``trainer_state.json``.

A table starts with a header that names a step or an epoch and a loss: columns between ``,``, ``|``, tabs or spaces.
Its rows have as many columns as the header. Only numbers are in the columns that are read; they may be empty, as in
Lightning's ``metrics.csv``. The first other line ends the table; empty lines and rulers do not.

``trainer_state.json`` is transformers' (``TrainerState.save_to_json``: JSON with an indentation of 2). It is parsed
as a whole, up to ``LIMIT`` bytes. Everything else is read in constant memory.
"""

from __future__ import annotations

import json
import re
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from . import general, names

LIMIT = 64 << 20  # bytes of a trainer_state.json
_HEADER = 4096  # bytes of a header
_COLUMNS = 500
_RULER = re.compile(r"[\s|+:=\u2500-\u257f-]*")
_TITLE = re.compile(r"[^\W\d][\w/ .()%#@\-]{0,80}|\#|")
_PLACES = ("step", "epoch", "iter", "update", "batch", "步", "轮", "迭代")  # one of them is in each header
_NEXT = re.compile(rb"\n(?![ \t\r\n])")  # the first line that an indented object cannot continue with


class _Column(NamedTuple):
    place: int
    role: names.Role


class Tables:
    """The tables in a log; ``header`` and ``row`` take its lines in order."""

    def __init__(self) -> None:
        self._columns: Optional[Tuple[_Column, ...]] = None
        self._width = 0
        self._between = ""

    @property
    def open(self) -> bool:
        """Whether the next line may be a row."""
        return self._columns is not None

    def header(self, line: str) -> bool:
        """Start a table if the line is a header."""
        self._columns = None
        if len(line) > _HEADER or ":" in line or "=" in line:
            return False
        lower = line.lower()
        if ("loss" not in lower and "损失" not in lower) or not any(word in lower for word in _PLACES):
            return False
        for between in (",", "|", "\t", "  ", " "):
            titles = _cells(line, between)
            if 2 <= len(titles) <= _COLUMNS and all(map(_TITLE.fullmatch, titles)):
                break
        else:
            return False
        best: Dict[str, _Column] = {}
        for place, title in enumerate(titles):
            known = names.role(title)
            if known and (known.field not in best or known.order < best[known.field].role.order):
                best[known.field] = _Column(place, known)
        if not {"step", "epoch"} & set(best) or not {"loss", "eval_loss"} & set(best):
            return False
        self._columns, self._width, self._between = tuple(best.values()), len(titles), between
        return True

    def row(self, line: str) -> Dict[str, Any]:
        """The values in a row; empty if the line has none. Ends the table if the line is no row."""
        if self._columns is None or _RULER.fullmatch(line[:_HEADER]):
            return {}
        cells = line.split() if self._between in (" ", "  ") else _cells(line, self._between)
        found = general.fields(())
        if len(cells) != self._width:
            self._columns = None
            return {}
        for place, role in self._columns:
            if not cells[place] and self._between in (",", "|", "\t"):
                continue
            if not general.NUMBERS.fullmatch(cells[place]) or (role.field == "step" and not _whole(cells[place])):
                self._columns = None
                return {}
            found.add(role, cells[place])
        values = dict(found.found)
        if not {"step", "epoch"} & set(values):
            return {}
        values["within"] = int("epoch" in values and bool(values.get("within")))
        return values


def _cells(line: str, between: str) -> List[str]:
    """The texts of a line's columns."""
    if between == "|":
        line = line.strip().strip("|")
    if between == "  ":
        return re.split(r"\s{2,}", line.strip())
    if between == " ":
        return line.split()
    return [cell.strip().strip('"') for cell in line.rstrip("\r\n").split(between)]


def _whole(number: str) -> bool:
    return general.whole(number) is not None


class Document:
    """The indented JSON object at the start of a log, if there is one."""

    def __init__(self) -> None:
        self.open = True
        self._data = bytearray()
        self._searched = 0

    def feed(self, data: bytes) -> Tuple[List[Dict[str, Any]], bytes]:
        """Return the values of the finished object, and the bytes that do not belong to it."""
        self._data += data
        start = bytes(self._data[:3]).replace(b"\r", b"")
        if not b"{\n".startswith(start[:2]) or len(self._data) > LIMIT:
            return self._end(0)
        found = _NEXT.search(self._data, max(2, self._searched))
        self._searched = max(0, len(self._data) - 1)
        if found is None or found.end() == len(self._data):
            self._searched = found.start() if found else self._searched
            return [], b""
        if self._data[found.end() : found.end() + 1] != b"}":
            return self._end(0)
        return self._end(found.end() + 1)

    def close(self) -> Tuple[List[Dict[str, Any]], bytes]:
        """The same at the end of the log."""
        return self._end(len(self._data)) if self.open else ([], b"")

    def _end(self, end: int) -> Tuple[List[Dict[str, Any]], bytes]:
        self.open, data = False, bytes(self._data)
        self._data = bytearray()
        values = history(data[:end]) if end else []
        return values, data[end:] if values else data


def history(data: bytes) -> List[Dict[str, Any]]:
    """The values in ``log_history`` of a ``trainer_state.json``; empty if it is another file."""
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        return []
    entries = content.get("log_history") if isinstance(content, dict) else None
    total = content.get("max_steps") if isinstance(entries, list) else None
    known = {"total": total} if isinstance(total, int) and 0 < total < general.MOST else {}
    result = []
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and "train_runtime" not in entry:
            values = general.fields(entry.items()).found
            if "step" in values:
                result.append({**values, **known, "within": 0})
    return result
