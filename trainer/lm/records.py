"""Reads records from JSON, JSONL and Parquet files: one after the other, each with its place in the file.

``.gz`` and ``.zst`` behind a name are unpacked. Parquet needs the package pyarrow, zst the package zstandard.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

from trainer.lm.errors import RefusedError

LINE = 64 << 20  # bytes of a record's line
WHOLE = 4 << 30  # bytes of a JSON file, which is read at once
GROUP = 4 << 20  # bytes of records that a process takes at a time
ROWS = 1024  # rows of a Parquet file in memory, at most
READ = 64 << 20  # bytes of rows of a Parquet file in memory: rows with images are large
PACKED = (".gz", ".zst")
SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Group:
    """Consecutive records of a file: lines of JSON, or objects. ``unit`` is line, record or row."""

    path: Path
    unit: str
    first: int
    items: Sequence[Union[str, Dict[str, Any]]]
    size: int

    def places(self) -> Iterator[Tuple[str, Union[str, Dict[str, Any]]]]:
        """Yield each record for ``parse`` with its place: ``data.jsonl: line 7``. Empty lines are no records."""
        for number, item in enumerate(self.items, self.first):
            if not isinstance(item, str) or item.strip():
                yield "%s: %s %d" % (self.path, self.unit, number), item


def parse(item: Union[str, Dict[str, Any]], place: str) -> Dict[str, Any]:
    """Return the record in a line of JSON.

    Raises:
        RefusedError: it is not a JSON object.
    """
    try:
        record = json.loads(item) if isinstance(item, str) else item
    except (ValueError, RecursionError) as error:
        raise RefusedError("%s is not JSON: %s" % (place, error), "write each record as JSON in one line") from error
    if not isinstance(record, dict):
        raise RefusedError("%s is not a JSON object" % place, 'records look like {"text": "..."}')
    return record


def field(record: Dict[str, Any], name: str, place: str) -> str:
    """Return a text of a record.

    Raises:
        RefusedError: the record has no such field, or it is not a text.
    """
    if name not in record:
        raise RefusedError("%s has no field %r; it has %s" % (place, name, named(record)))
    value = record[name]
    if not isinstance(value, str):
        raise RefusedError("%s: the field %r is %s, not a text" % (place, name, kind(value)))
    return value


def named(record: Dict[str, Any]) -> str:
    """Return the names of a record's fields, for a message."""
    names = [repr(str(name)[:40]) for name in list(record)[:8]]
    return ", ".join(names) + (", ..." if len(record) > len(names) else "") if names else "none"


def kind(value: Any) -> str:
    """Return a value's type in the words of JSON."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def is_records(path: Path) -> bool:
    """Whether a file's name says that it has records, rather than plain text."""
    return suffix(path) in SUFFIXES


def suffix(path: Path) -> str:
    """Return the suffix of a file's name without that of its compression."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in PACKED else path.suffix.lower()


def unpacked(path: Path) -> IO[bytes]:
    """Open a file and unpack it.

    Raises:
        RefusedError: a package is missing.
        OSError: the file cannot be opened.
    """
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix.lower() == ".zst":
        try:
            import zstandard  # noqa: PLC0415 - only for .zst
        except ImportError as error:
            raise RefusedError("%s: the package zstandard is not installed" % path, "zstd -d %s" % path) from error
        return io.BufferedReader(zstandard.open(path, "rb"), 1 << 20)
    return path.open("rb")


def unpacking_errors() -> Tuple[Any, ...]:
    """Return the errors of damaged files, for an ``except``."""
    loaded: Any = sys.modules.get("zstandard")  # the package has its own
    return (EOFError, zlib.error, gzip.BadGzipFile, *([loaded.ZstdError] if loaded else []))


def groups(path: Path) -> Iterator[Group]:
    """Yield the records of a file in groups.

    Raises:
        RefusedError: the file cannot be read, is not UTF-8, or has a line without an end.
    """
    try:
        if suffix(path) == ".parquet":
            yield from _parquet(path)
        elif suffix(path) == ".json" and _starts_with_list(path):
            yield from _whole(path)
        else:
            yield from _lines(path)
    except unpacking_errors() as error:
        raise RefusedError("%s cannot be unpacked: %s" % (path, error), "copy the file again") from error
    except OSError as error:
        raise RefusedError("%s: %s" % (path, error.strerror or error), "check the path of the data") from error


def _lines(path: Path) -> Iterator[Group]:
    items: List[Union[str, Dict[str, Any]]] = []
    size, number = 0, 0
    with unpacked(path) as file:
        while True:
            line = file.readline(LINE + 1)
            if not line:
                break
            number += 1
            if len(line) > LINE:
                raise RefusedError("%s: line %d has more than %d MiB" % (path, number, LINE >> 20))
            items.append(decoded(line, "%s: line %d" % (path, number), path))
            size += len(line)
            if size >= GROUP:
                yield Group(path, "line", number - len(items) + 1, items, size)
                items, size = [], 0
    if items:
        yield Group(path, "line", number - len(items) + 1, items, size)


def decoded(data: bytes, place: str, path: Path) -> str:
    """Return the text of bytes.

    Raises:
        RefusedError: they are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig" if data.startswith(b"\xef\xbb\xbf") else "utf-8")
    except UnicodeDecodeError as error:
        what = "%s is not UTF-8 (byte %d)" % (place, error.start)
        raise RefusedError(what, "iconv -f latin1 -t utf-8 %s" % path) from error


def _starts_with_list(path: Path) -> bool:
    with unpacked(path) as file:
        start = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
    return start[:1] == b"["


def _whole(path: Path) -> Iterator[Group]:
    with unpacked(path) as file:
        data = file.read(WHOLE + 1)
    if len(data) > WHOLE:
        raise RefusedError("%s has more than %d GiB" % (path, WHOLE >> 30), "convert it to JSONL, one record per line")
    text = decoded(data, str(path), path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError("%s is not JSON: %s" % (path, error)) from error
    each = max(1, len(data) // max(1, len(found)))
    yield from _grouped(path, "record", found, each)


def _grouped(path: Path, unit: str, found: List[Any], each: int, first: int = 1) -> Iterator[Group]:
    count = max(1, GROUP // max(1, each))
    for start in range(0, len(found), count):
        items = found[start : start + count]
        for number, item in enumerate(items, first + start):
            parse(item if isinstance(item, dict) else json.dumps(item), "%s: %s %d" % (path, unit, number))
        yield Group(path, unit, first + start, items, each * len(items))


def _parquet(path: Path) -> Iterator[Group]:
    try:
        import pyarrow as pa  # noqa: PLC0415 - only for Parquet
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError as error:
        what = "%s: the package pyarrow is not installed" % path
        raise RefusedError(what, "install it, or convert the file to JSONL") from error
    number = 1
    try:
        with pq.ParquetFile(path) as file:
            each = sum(file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups))
            each = each // max(1, file.metadata.num_rows)
            for batch in file.iter_batches(max(1, min(ROWS, READ // max(1, each)))):
                rows = batch.to_pylist()
                yield from _grouped(path, "row", rows, batch.nbytes // max(1, len(rows)), number)
                number += len(rows)
    except pa.ArrowException as error:
        raise RefusedError("%s is not a Parquet file: %s" % (path, str(error).partition("\n")[0])) from error


def files_of(path: Path) -> List[Path]:
    """Return a file, or the files with records in a folder, in the order of their names.

    Raises:
        RefusedError: there is none.
    """
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if each.is_file() and is_records(each))
        if not found:
            raise RefusedError("%s has no %s file" % (path, ", ".join(SUFFIXES)))
        return found
    if not path.is_file():
        raise RefusedError("%s: no such file" % path, "check the path of the data")
    return [path]


def size_of(path: Path) -> Optional[int]:
    """Return the bytes of a file's content, or None where it is compressed."""
    return None if path.suffix.lower() in (*PACKED, ".parquet") else path.stat().st_size


def write(path: Path, data: bytes) -> None:
    """Write a file that has its name only when it is complete and on disk."""
    new = path.with_name("." + path.name.lstrip(".") + ".part")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
