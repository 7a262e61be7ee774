"""The shared libraries that ELF files need, found as the dynamic loader does (ld.so(8)).

The offsets in ``dynamic`` are from the System V ABI, chapters 4 and 5. Only 64-bit files are read, the only ones on a
platform of ``provision.env.source.elf``.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path

from provision.env.source import elf
from provision.env.source.elf import Read
from provision.errors import UsageError

# glibc's libraries depend on the kernel and the machine's configuration (nsswitch, locales), and are never included.
GLIBC = re.compile(
    r"(ld-linux.*|ld64|lib(c|m|dl|rt|pthread|util|resolv|anl|mvec|thread_db|BrokenLocale|nss_\w+)"
    r"|linux-vdso)\.so(\.\d+)*|libnsl\.so\.1"
)
SYSTEM = ("/lib/{machine}-linux-gnu", "/usr/lib/{machine}-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
_LDCONFIG = ("ldconfig", "/sbin/ldconfig", "/usr/sbin/ldconfig")
_ORIGIN = re.compile(r"\$(ORIGIN\b|\{ORIGIN\})")


@dataclass(frozen=True)
class Needed:
    """The libraries that some files need, without glibc's.

    ``libraries`` maps a needed name to its file; ``missing`` maps a name to a file that needs it.
    """

    libraries: Mapping[str, Path]
    missing: Mapping[str, Path]


@dataclass(frozen=True)
class Machine:
    """The folders of this machine's libraries."""

    machine: str  # the output of uname -m
    first: tuple[Path, ...] = ()  # folders that come before the system's: LD_LIBRARY_PATH

    @cached_property
    def cache(self) -> Mapping[str, Sequence[Path]]:
        """The list of ``ldconfig -p``, without variants for newer processors: the target may have an older one."""
        found: dict[str, list[Path]] = {}
        for line in run_ldconfig().splitlines():
            name, arrow, path = line.strip().partition(" => ")
            if arrow and "hwcap" not in name:
                found.setdefault(name.partition(" ")[0], []).append(Path(path))
        return found

    def candidates(self, name: str, runpath: Iterable[Path]) -> Iterator[Path]:
        """The paths where the loader looks for a library that no DT_RPATH finds, in order."""
        yield from (folder / name for folder in self.first)
        yield from (folder / name for folder in runpath)
        yield from self.cache.get(name, ())
        yield from (Path(folder.format(machine=self.machine), name) for folder in SYSTEM)


def find_needed(program: Path, modules: Iterable[Path], machine: Machine, *, stay: Collection[Path]) -> Needed:
    """The libraries of a program and of the modules that it loads.

    Args:
        program: an ELF program; its DT_RPATH holds for every module too.
        modules: ELF files that it loads.
        machine: the folders of libraries.
        stay: real paths of files that keep their relative paths in the tool: ``$ORIGIN`` will find them there.
    """
    libraries: dict[str, Path] = {}
    missing: dict[str, Path] = {}
    seen: set[Path] = set()
    main = _look(program)
    outer = _folders(program, main.rpath) if main else ()
    platform = elf.platform(_head(program))
    queue = deque([(program, ()), *((path, outer) for path in sorted(modules))])
    while queue:
        path, inherited = queue.popleft()
        found = _look(path)
        if path in seen or found is None:
            continue
        seen.add(path)
        # ld.so(8): DT_RPATH also applies to the file's libraries, and is ignored if there is a DT_RUNPATH.
        rpath = () if found.runpath else (*_folders(path, found.rpath), *inherited)
        for name in found.needed:
            if GLIBC.fullmatch(name) or name in libraries:
                continue
            near = (*rpath, *_folders(path, found.runpath))
            places = [*(folder / name for folder in rpath), *machine.candidates(name, _folders(path, found.runpath))]
            library = next((place for place in places if elf.platform(_head(place)) == platform), None)
            if library is None:
                missing.setdefault(name, path)
                continue
            queue.append((library, rpath))
            if not (library.parent in near and library.resolve() in stay):
                libraries[name] = library
    return Needed(dict(sorted(libraries.items())), missing)


def reader(path: Path) -> elf.Read:
    """A function that reads bytes of a file, for the ELF parsers; it raises UsageError if the file cannot be read."""

    def read(offset: int, size: int) -> bytes:
        try:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(size)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error

    return read


def _look(path: Path) -> Dynamic | None:
    return dynamic(reader(path))


def _head(path: Path) -> bytes:
    with suppress(OSError), path.open("rb") as file:
        return file.read(64)
    return b""


def _folders(path: Path, written: Iterable[str]) -> tuple[Path, ...]:
    """Folders of a DT_RPATH or DT_RUNPATH; those with another variable than $ORIGIN are omitted."""
    origin = str(path.parent)
    filled = (_ORIGIN.sub(lambda _: origin, folder) for folder in written)
    return tuple(Path(os.path.normpath(folder)) for folder in filled if "$" not in folder)


def run_ldconfig() -> str:
    """The output of ``ldconfig -p``; empty without the program."""
    for program in _LDCONFIG:
        with suppress(OSError, subprocess.CalledProcessError):
            argv = [program, "-p"]
            return subprocess.run(argv, check=True, capture_output=True, text=True, errors="surrogateescape").stdout
    return ""


_LOAD, _DYNAMIC, _INTERPRETER = 1, 2, 3  # p_type
_NULL, _NEEDED, _STRINGS, _STRINGS_SIZE, _RPATH, _RUNPATH = 0, 1, 5, 10, 15, 29  # d_tag
_WIDE = 2  # EI_CLASS of a 64-bit file


@dataclass(frozen=True)
class Dynamic:
    """The data for the dynamic loader. The folders may contain ``$ORIGIN``."""

    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    loader: str = ""  # of a program: the loader that the kernel starts


def dynamic(read: Read) -> Dynamic | None:
    """A file's data for the loader; None if it is not a 64-bit ELF file, or is damaged."""
    try:
        return _dynamic(read)
    except (struct.error, IndexError, ValueError, OverflowError):
        return None


def _dynamic(read: Read) -> Dynamic | None:
    head = read(0, 64)
    if head[:4] != elf.MAGIC or head[4] != _WIDE:
        return None
    order = "<" if head[5] == 1 else ">"
    segments = elf.segments(read, order, wide=True)
    loader = "".join(_text(read(at, length), 0) for kind, at, _, length in segments if kind == _INTERPRETER)
    table = b"".join(read(at, length // 16 * 16) for kind, at, _, length in segments if kind == _DYNAMIC)
    entries = list(takewhile(lambda entry: entry[0] != _NULL, struct.iter_unpack(order + "QQ", table)))
    values = dict(entries)
    if _STRINGS not in values:
        return Dynamic(loader=loader)
    address = values[_STRINGS]  # as the process sees it
    (place,) = [
        at + address - start
        for kind, at, start, length in segments
        if kind == _LOAD and start <= address < start + length
    ]
    strings = read(place, values[_STRINGS_SIZE])

    def texts(wanted: int) -> list[str]:
        return [_text(strings, value) for tag, value in entries if tag == wanted]

    def folders(wanted: int) -> tuple[str, ...]:
        return tuple(folder for text in texts(wanted) for folder in text.split(":") if folder)

    return Dynamic(tuple(texts(_NEEDED)), folders(_RPATH), folders(_RUNPATH), loader)


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode(errors="surrogateescape")
