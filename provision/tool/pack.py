"""Write the tool: one file with a script and an archive."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import provision
from provision.env.packing import temporary
from provision.errors import UsageError
from provision.model import Emit, Notice
from provision.render import render
from provision.stages import stage
from provision.tool import archive
from provision.tool.contents import COMPLETE, Item, contents, running

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
    with stage(emit, archive.STAGE, title, unit="steps"):
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
        digest, unpacked = archive.write(items, file, emit)
        header = _header(place + 1, digest, unpacked).ljust(place, b"\n")
        checksum = hashlib.sha256(header[_covered(header) :])
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
    covered = _covered(render("tool/header.sh.j2", covered=0, **values).encode())
    return render("tool/header.sh.j2", covered=covered + 1, **values).encode()


def _covered(header: bytes) -> int:
    """The number of bytes before the checksummed part: the lines up to the checksum."""
    return header.index(b"\n", header.index(b"\nsum=") + 1) + 1
