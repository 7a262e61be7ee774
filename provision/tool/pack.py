"""Write the tool: one file with a script and an archive.

The archive is a tar of plain files, compressed with gzip, which most machines have. Equal files give equal bytes:
times, owners and modes are fixed. The compressed stream is a sequence of gzip members (RFC 1952, 2.2), compressed on
all processors; ``gzip -d`` and busybox join them. ``strip_symbols`` removes symbols from ELF files where there is no
``strip``.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import struct
import subprocess
import tarfile
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import provision
from provision.env.packing import temporary
from provision.env.source import elf
from provision.errors import UsageError
from provision.model import Emit, Notice, Progress
from provision.render import render
from provision.stages import stage
from provision.tool.contents import COMPLETE, Item, contents, running

STAGE = "tool"

_MTIME = 315532800  # 1980-01-01
_MEMBER = 4 << 20  # bytes that become one gzip member
_LEVEL = 4  # 6 takes half as long again, for three percent; 9 four times as long, for one more


class _Compressor(io.RawIOBase):
    """Receives a tar and writes gzip members in order; ``digest`` is the sha256 of the tar."""

    def __init__(self, file: BinaryIO, pool: ThreadPoolExecutor, ahead: int) -> None:
        self._file = file
        self._pool = pool
        self._ahead = ahead
        self._block = bytearray()
        self._waiting: deque[Future[bytes]] = deque()
        self._hash = hashlib.sha256()
        self.size = 0

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override] # what tarfile hands over
        self._hash.update(data)
        self.size += len(data)
        self._block += data
        while len(self._block) >= _MEMBER:
            self._submit(bytes(self._block[:_MEMBER]))
            del self._block[:_MEMBER]
        return len(data)

    def finish(self) -> None:
        self._submit(bytes(self._block))
        while self._waiting:
            self._file.write(self._waiting.popleft().result())

    def _submit(self, block: bytes) -> None:
        while len(self._waiting) >= self._ahead:
            self._file.write(self._waiting.popleft().result())
        self._waiting.append(self._pool.submit(gzip.compress, block, _LEVEL, mtime=0))


def write_archive(items: Mapping[str, Item], file: BinaryIO, emit: Emit) -> tuple[str, int]:
    """Write the archive.

    Returns:
        The sha256 of the tar and its size in bytes, which is the size of the unpacked tool.

    Raises:
        UsageError: a file cannot be read.
        OSError: the archive cannot be written.
    """
    threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(threads) as pool:
        out = _Compressor(file, pool, 2 * threads)
        with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as tar:
            for number, (info, data) in enumerate(_members(items)):
                tar.addfile(info, io.BytesIO(data))
                if number % 64 == 0:
                    emit(Progress(STAGE, number, len(items)))
        out.finish()
    return out.digest, out.size


def _members(items: Mapping[str, Item]) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    for name, item in items.items():
        data = strip_symbols(item.read())
        yield _info(name, len(data), executable=item.executable), data
    yield _info(COMPLETE, 0), b""


def _info(name: str, size: int, *, executable: bool = False) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o755 if executable else 0o644, _MTIME
    return info


_ALLOCATED = 2  # SHF_ALLOC: the process sees it
_NO_BITS = 8  # SHT_NOBITS: no bytes in the file
_WIDE = 2  # EI_CLASS of a 64-bit file


def strip_symbols(data: bytes) -> bytes:
    """An ELF file up to the last byte that is loaded, with a table of the sections that are left.

    A file that is not 64-bit ELF, is damaged, or has an unusual layout is returned unchanged.
    """
    try:
        return _strip_elf(data)
    except (struct.error, IndexError, ValueError, OverflowError):
        return data


def _strip_elf(data: bytes) -> bytes:
    if data[:4] != elf.MAGIC or data[4] != _WIDE:
        return data
    order = "<" if data[5] == 1 else ">"
    (table,) = struct.unpack_from(order + "Q", data, 40)
    size, count, names = struct.unpack_from(order + "HHH", data, 58)
    section = struct.Struct(order + "IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, align, entry
    sections = [section.unpack_from(data, table + index * size) for index in range(count)]
    kept = 1 + max(index for index, each in enumerate(sections) if each[2] & _ALLOCATED)
    if not all(each[2] & _ALLOCATED for each in sections[1:kept]) or size != section.size:
        return data  # symbols refer to sections by number, which would change
    ends = [each[4] + each[5] for each in sections[1:kept] if each[1] != _NO_BITS]
    end = max(*ends, *(piece.stop for piece in elf.loaded_ranges(data)))
    _, _, _, _, offset, length, *_ = sections[names]
    text = data[offset : offset + length]
    place = -(-(end + length) // 8) * 8
    if place + (kept + 1) * size >= len(data):
        return data
    named = (*sections[names][:4], end, *sections[names][5:])
    rows = b"".join(section.pack(*each) for each in (*sections[:kept], named))
    head = bytearray(data[:end])
    struct.pack_into(order + "Q", head, 40, place)
    struct.pack_into(order + "HH", head, 60, kept + 1, kept)
    return bytes(head) + text.ljust(place - end, b"\0") + rows


# --- the tool -------------------------------------------------------------------------------------

_UNKNOWN = "0" * 64  # the checksum's placeholder
_MANY = 10**12  # bytes: the largest number in the script
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Tool:
    """The written tool. Sizes in bytes."""

    digest: str  # sha256 of its unpacked content
    python: str
    machine: str  # the output of uname -m
    glibc: tuple[int, int]  # the oldest version that it runs with
    size: int
    unpacked: int
    files: int
    notices: tuple[str, ...]


def pack(out: Path, *, emit: Emit) -> Tool:
    """Write clusterctl as one file that needs no Python.

    Args:
        out: the file; it gets this name when it is complete.
        emit: receives progress.

    Raises:
        UsageError: a requirement is not installed, or ``out`` cannot be written.
    """
    python = running()
    title = f"Packing clusterctl {provision.__version__} with Python {python.version}"
    with stage(emit, STAGE, title, unit="steps"):
        found = contents(python)
        for text in found.notices:
            emit(Notice(text, "warning"))
        digest, unpacked = write(out, found.items, emit=emit)
    return Tool(
        digest=digest,
        python=python.version,
        machine=python.machine,
        glibc=found.glibc,
        size=out.stat().st_size,
        unpacked=unpacked,
        files=len(found.items),
        notices=found.notices,
    )


def write(out: Path, items: Mapping[str, Item], *, emit: Emit) -> tuple[str, int]:
    """Write a file that unpacks the given files and starts the one named ``clusterctl``, and test it.

    Returns:
        The sha256 of the unpacked content, and its size in bytes.

    Raises:
        UsageError: a file cannot be read, ``out`` cannot be written, or the command does not start.
    """
    with temporary.create_file(out, mode=0o777) as file:
        place = len(_header(_MANY, _UNKNOWN, _MANY))
        file.seek(place)
        digest, unpacked = write_archive(items, file, emit)
        header = _header(place + 1, digest, unpacked).ljust(place, b"\n")
        checksum = hashlib.sha256(header[_checksum_start(header) :])
        file.seek(place)
        while block := file.read(_BLOCK):
            checksum.update(block)
        file.seek(0)
        file.write(header.replace(_UNKNOWN.encode(), checksum.hexdigest().encode()))
        file.flush()
        _try(Path(file.name), emit)
    return digest, unpacked


def _try(file: Path, emit: Emit) -> None:
    """Start the tool once, on the machine where missing parts can be installed."""
    with tempfile.TemporaryDirectory(prefix="clusterctl-") as folder:
        done = subprocess.run(
            ["sh", file, "--unpack", folder], capture_output=True, text=True, errors="replace", check=False
        )
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        if "Traceback" in done.stderr:
            raise UsageError(
                f"clusterctl does not start from its own file: {last}",
                hint="update its requirements: pip install --upgrade clusterctl, or pip install -e .",
            )
        emit(Notice(f"the file could not be tested here: {done.stderr.partition(chr(10))[0]}", "warning"))


def _header(begin: int, digest: str, unpacked: int) -> bytes:
    """The script without its checksum; the archive starts at byte ``begin`` of the file, counted from 1 as in tail."""
    values = {
        "checksum": _UNKNOWN,
        "name": f"tool-{digest[:12]}",
        "megabytes": -(-unpacked // 1_000_000),
        "begin": begin,
        "complete": COMPLETE,
    }
    covered = _checksum_start(render("tool/header.sh.j2", covered=0, **values).encode())
    return render("tool/header.sh.j2", covered=covered + 1, **values).encode()


def _checksum_start(header: bytes) -> int:
    """The number of bytes before the checksummed part: the lines up to the checksum."""
    return header.index(b"\n", header.index(b"\nsum=") + 1) + 1
