"""Reads the files in a run's log folder, and logs of other launchers. Truncated and unknown lines never raise."""

from __future__ import annotations

import math
import re
from calendar import timegm
from typing import TYPE_CHECKING

from provision.diagnosis.evidence import Event, Line, Record
from provision.run import fields
from trainer import reader as trainers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# The lines of run.log (trainer/agent/supervisor/supervisor.py).
_OURS = re.compile(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)\.(\d{3})Z \[(launcher|\d{1,6})\] (.*)")
# torch puts the rank before exceptions and its C++ messages; torchrun's --tee uses another prefix.
_RANK = re.compile(r"\s*\[(?:rank|default)(\d{1,6})\]:\s?")
# 2024-06-01 16:22:16,125 (transformers, DeepSpeed), 2026-11-22T07:15:00.123 (many)
_ISO = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
# glog, as torch writes it: E1122 07:15:00.123000, and [E321 02:07:08.408271257 for the 21st of March
_GLOG = re.compile(r"(?:^|\[)[EWIF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{3,9})")
# Nov 22 07:15:00, as syslog and journalctl write it
_SYSLOG = re.compile(
    r"^(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?\b"
)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
# pdsh, srun --label, mpirun --tag-output and operators of Kubernetes put the host or the rank before every line.
_LAUNCHER = re.compile(
    r"^((?:(?!\[(?:rank|default)\d)[^\s:]{1,64}: ?){1,2})(?:\[(?:rank|default)\d{1,6}\]: ?)*Traceback \(most recent",
    re.MULTILINE,
)
_REPORTED = re.compile(r"\s*rank +: (\d{1,6}) \(local_rank: (\d{1,6})\)")
_ROW = 4200  # characters of a line that are read; clusterctl's lines are never longer
_TIME_WITHIN = 80  # characters at the start of a line in which a time can be
_NO_YEAR = 1970
_HALF_YEAR = 180 * 86400.0  # seconds; a time without a year that jumps back by more belongs to the next year

_LOSSES = {"loss", "eval_loss"}


def record(
    node: str,
    files: Mapping[str, str],
    *,
    node_rank: int = 0,
    first_rank: int | None = None,
    events: tuple[Event, ...] = (),
    file: str = "",
    pattern: str | None = None,
) -> Record:
    """A node's part of a run from the texts of its files.

    Args:
        node: its name.
        files: texts by file name: ``run.log``, ``events.jsonl``, ``metrics.jsonl``, ``state.json``, ``machine``;
            without ``run.log``, ``launcher.log`` and ``rank<N>.log``, which have no times. ``where`` is their folder;
            ``skipped`` has a line ``<name> <lines>`` for each file that was cut.
        node_rank: its rank among the nodes.
        first_rank: the global rank of its local rank 0; None: derived from the lines.
        events: additional events after ``events.jsonl``.
        file: the path of ``run.log`` if it has another name.
        pattern: the run's own pattern, if there is no ``state.json`` that has it.
    """

    def read(name: str, rank: int | None = None) -> tuple[Line, ...]:
        path = file or (f"{files['where']}/{name}" if "where" in files else f"{node}/{name}")
        return log_lines(files[name], node, rank=rank, file=path, skipped=skipped.get(name, 0))

    skipped = {
        name: int(count) for name, count in re.findall(r"^(\S+) (\d{1,12})$", files.get("skipped", ""), re.MULTILINE)
    }
    if "run.log" in files:
        lines = read("run.log")
        dated = is_dated(files["run.log"])
    else:
        names = sorted(name for name in files if re.fullmatch(r"launcher\.log|rank\d{1,6}\.log", name))
        lines = tuple(line for name in names for line in read(name, _rank_of(name)))
        dated = any(is_dated(files[name]) for name in names)
    agent = read("agent.log") if "agent.log" in files else ()
    state = parse_objects(files.get("state.json", ""))
    events = (*parse_objects(files.get("events.jsonl", "")), *events)
    dated = dated or not lines or any("time" in event for event in events)
    lines += kernel_lines(files.get("kernel", ""), files.get("machine", ""), node)
    return Record(
        node,
        node_rank,
        _first_rank(lines) if first_rank is None else first_rank,
        lines,
        events,
        parse_objects(files.get("metrics.jsonl", "")),
        state[-1] if state else {},
        *read_machine(files.get("machine", "")),
        dated,
        agent,
        boot_time(files.get("machine", "")),
        files.get("where", ""),
        _text_or_none(state[-1].get("pattern") if state else None) or pattern,
    )


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _first_rank(lines: tuple[Line, ...]) -> int:
    """The global rank of local rank 0: from torchrun's failure report, else the lowest rank with a line."""
    for line in lines:
        if found := _REPORTED.match(line.text):
            return int(found[1]) - int(found[2])
    return min((line.rank for line in lines if line.rank is not None), default=0)


def read_machine(text: str) -> tuple[dict[str, float], int | None]:
    """Links and processors, from the output of ``templates/run/evidence.sh.j2``.

    ``cores 64``, ``link eth0 1000`` (Mbit/s, /sys/class/net/NAME/speed) and ``link mlx5_0/1 200000``.
    """
    links = {
        name: float(speed) * 1e6 / 8 for name, speed in re.findall(r"^link (\S+) (\d{1,12})\b", text, re.MULTILINE)
    }
    cores = re.search(r"^cores (\d{1,9})$", text, re.MULTILINE)
    return links, int(cores[1]) if cores else None


def kernel_lines(text: str, clock: str, node: str) -> tuple[Line, ...]:
    """The lines of dmesg, with times from the line ``clock EPOCH UPTIME`` of ``machine``; none without that line.

    Their times separate the run's lines from earlier ones.
    """
    boot = boot_time(clock)
    if boot is None:
        return ()
    found = re.findall(r"^\[ *(\d{1,12}\.\d{1,12})\] (.+)$", text, re.MULTILINE)
    return tuple(Line(text, node, None, boot + float(seconds), f"{node}: dmesg") for seconds, text in found)


def boot_time(machine: str) -> float | None:
    """When a node booted, from the line ``clock EPOCH UPTIME`` of ``machine``."""
    at = re.search(r"^clock (\d{1,12}) (\d{1,12}(?:\.\d+)?)$", machine, re.MULTILINE)
    return int(at[1]) - float(at[2]) if at else None


def parse_objects(text: str) -> tuple[Event, ...]:
    """The JSON objects of a text, one per line. Skips other lines, and fields of a wrong type."""
    return tuple(found for line in text.splitlines() if (found := fields.read(line)) is not None)


def is_dated(text: str) -> bool:
    """Whether a line of a log has a time with its year."""
    return _year(text) != _NO_YEAR


def log_lines(text: str, node: str, rank: int | None = None, file: str = "", skipped: int = 0) -> tuple[Line, ...]:
    """The lines of a log, clusterctl's ``run.log`` or any other.

    Args:
        text: the file's; of a progress bar's states the last one counts.
        node: the log's node.
        rank: the rank of lines that do not name one.
        file: the file that the user opens to see the lines.
        skipped: lines of the file before the text.
    """
    lines = []
    time: float | None = None
    year = _year(text)
    prefixes = tuple(sorted(set(_LAUNCHER.findall(text)), key=len, reverse=True))
    for number, raw in enumerate(text.split("\n"), skipped + 1):
        row = raw.rstrip("\r").rsplit("\r", 1)[-1][:_ROW]
        owner = rank
        if ours := _OURS.fullmatch(row):
            time = _epoch(*ours.groups()[:7])
            owner = None if ours[8] == "launcher" else int(ours[8])
            row = ours[9]
        else:
            if prefixes and row.startswith(prefixes):
                row = row[len(next(each for each in prefixes if row.startswith(each))) :]
            time, year = _time(row, time, year)
        while prefix := _RANK.match(row):
            owner = int(prefix[1])
            row = row[prefix.end() :]
        if row.strip():
            lines.append(Line(row, node, owner, time, file, number))
    return tuple(lines)


def progress(lines: tuple[Line, ...], pattern: str | None = None) -> tuple[Event, ...]:
    """Progress events from the losses that trainers print, for logs without events.

    With the run's own ``pattern``, only the lines that it matches count. One that cannot be used reads none.

    Lines without a step (those of transformers, whose progress bar is not in ``lines``) are counted. A value that is
    not finite becomes None, as in the agent's events.
    """
    try:
        return tuple(_progress(lines, None if pattern is None else trainers.Pattern(pattern)))
    except trainers.PatternError:  # the record of the run was edited: its agents accept no such pattern
        return ()


def _progress(lines: tuple[Line, ...], pattern: trainers.Pattern | None) -> Iterator[Event]:
    count = 0
    readers: dict[int | None, trainers.Reader] = {}
    for line in lines:
        reader = readers.get(line.rank) or readers.setdefault(
            line.rank, trainers.Reader(rank=line.rank, pattern=pattern)
        )
        if not (reader.reads(line.text) if pattern is None else pattern.mark in line.text):
            continue
        # Closing the reader completes what it waits for: an event has the time of its own line.
        for reading in (*reader.feed(line.text + "\n"), *reader.close()):
            values = {name: getattr(reading, name) for name in ("step", *trainers.FIELDS)}
            found = {name: _finite(value) for name, value in values.items() if value is not None}
            if not found.keys() & _LOSSES:
                continue
            if "step" not in found:
                count += "loss" in found
                found["step"] = count
            yield {"event": "progress", "time": line.time, **found}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rank_of(name: str) -> int | None:
    found = re.search(r"\d{1,9}", name)
    return int(found[0]) if found else None


def _time(row: str, before: float | None, year: int) -> tuple[float | None, int]:
    head = row[:_TIME_WITHIN]
    if (found := _ISO.search(head)) and (absolute := _epoch(*found.groups())) is not None:
        return absolute, int(found[1])
    parts: tuple[str, ...] = ()
    if found := _GLOG.search(head):
        parts = found.groups()
    elif found := _SYSLOG.search(head):
        parts = (str(_MONTHS.index(found[1]) + 1), *found.groups()[1:])
    if not parts:
        return before, year
    at = _epoch(str(year), *parts)
    if at is None:
        return before, year
    if before is not None and before - at > _HALF_YEAR:  # a new year started
        return _epoch(str(year + 1), *parts), year + 1
    return at, year


def _year(text: str) -> int:
    """The first year in a log. ``_NO_YEAR`` without one: its times can only be compared with each other."""
    for row in text.split("\n"):
        found = _OURS.match(row) or _ISO.search(row[:_TIME_WITHIN])
        if found and _epoch(*found.groups()[:6], None) is not None:
            return int(found[1])
    return _NO_YEAR


def _epoch(*parts: str | None) -> float | None:
    """Year, month, day, hour, minute, second and its fraction as epoch seconds; times without a zone are UTC.

    None: the date does not exist.
    """
    year, month, day, hour, minute, second = (int(part or 0) for part in parts[:6])
    if not 1970 <= year <= 2999 or not 1 <= month <= 12:
        return None
    return timegm((year, month, day, hour, minute, second, 0, 0, 0)) + float(f"0.{parts[6] or 0}")
