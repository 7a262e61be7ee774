"""Tar in the GNU format, written to the byte, and a reader of untrusted tars.

The bytes of a member in a bundle depend only on its entry, and GNU tar, busybox and bsdtar can read them. The reader of
a bundle needs no parser: it builds the expected header and compares. Long names and link targets have a
``././@LongLink`` member before their own; sizes from 8 GiB on are in base 256. Owner and group are 0 and have no names.

``TarReader`` reads tars of GNU tar, bsdtar, Python and busybox (old, ustar, GNU and pax headers) in bounded memory.
The size and number of names and headers are checked before they are read; ``tarfile`` reads headers of any size into
memory. Sparse files are refused: their size is not that of their data.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from provision.env.bundle.manifest import Entry

BLOCK = 512
END = bytes(2 * BLOCK)  # closes a stream

_NAME = 100  # bytes of the header's name and link fields
_OCTAL = 8**11  # numbers from here on need more than the eleven digits that there are
_OWNER = b"0000000\0" * 2
_MAGIC = b"ustar  \0"
_REST = _MAGIC.ljust(BLOCK - 257, b"\0")
_CONSTANT = sum(_MAGIC) + sum(b" " * 8)  # in every checksum, which counts its own field as spaces

TYPES = {"file": b"0", "hard": b"1", "link": b"2", "dir": b"5"}

HEADER = 1 << 20  # bytes of the headers before one member: long names, pax records such as extended attributes
PATH = 4095  # bytes of a name or target; Linux opens no longer one
MEMBERS = 5_000_000
NAMES = 1 << 30  # bytes of all names and targets

Kind = Literal["file", "dir", "link", "hard", "other"]

_KINDS: dict[bytes, Kind] = {b"0": "file", b"\0": "file", b"7": "file", b"1": "hard", b"2": "link", b"5": "dir"}
_READ = 1 << 20
_OCTAL_FIELD = re.compile(rb"[ \0]*([0-7]*)[ \0]*\Z")
_PAX_RECORD = re.compile(rb"([1-9][0-9]{0,9}) ([^=\n\0]{1,256})=")
_SECONDS = re.compile(r"-?[0-9]{1,20}(?:\.[0-9]*)?\Z")
_SIZE = re.compile(r"[0-9]{1,19}\Z")


def padding(size: int) -> int:
    """Zero bytes after ``size`` bytes of data."""
    return -size % BLOCK


def header(
    name: bytes, *, size: int = 0, mode: int = 0o644, mtime: int = 0, kind: bytes = b"0", target: bytes = b""
) -> bytes:
    """The header of one member, with the long-name members that it needs."""
    long_target = _long(b"K", target) if len(target) > _NAME else b""
    long_name = _long(b"L", name) if len(name) > _NAME else b""
    return long_target + long_name + _block(name, size=size, mode=mode, mtime=mtime, kind=kind, target=target)


def entry_header(entry: Entry) -> bytes:
    """The header of an entry."""
    return header(
        _name(entry),
        size=entry.size,
        mode=entry.mode,
        mtime=entry.mtime,
        kind=TYPES[entry.type],
        target=os.fsencode(entry.target),
    )


def header_size(entry: Entry) -> int:
    """The length of ``entry_header(entry)``."""
    return link_span(entry.path + ("/" if entry.type == "dir" else ""), entry.target)


def span(entry: Entry) -> int:
    """The bytes that an entry takes in a stream: header, data and padding."""
    if entry.type == "file":
        return file_span(entry.path, entry.size)
    return header_size(entry) + entry.size + padding(entry.size)


def file_span(path: str, size: int) -> int:
    """The ``span`` of a file."""
    return BLOCK + _long_size(path) + size + -size % BLOCK


def link_span(name: str, target: str) -> int:
    """The ``span`` of a link of either kind, or of a folder, whose ``name`` then ends in a slash."""
    return BLOCK + _long_size(name) + (_long_size(target) if target else 0)


def _name(entry: Entry) -> bytes:
    return os.fsencode(entry.path) + (b"/" if entry.type == "dir" else b"")


def _long_size(name: str) -> int:
    """The bytes of the long-name member that a name or target needs."""
    length = len(name) if name.isascii() else len(os.fsencode(name))
    if length <= _NAME:
        return 0
    return BLOCK + length + 1 + padding(length + 1)


def _long(kind: bytes, value: bytes) -> bytes:
    data = value + b"\0"
    block = _block(b"././@LongLink", size=len(data), mode=0o644, mtime=0, kind=kind, target=b"")
    return block + data + bytes(padding(len(data)))


def _number(value: int) -> bytes:
    return b"%011o\0" % value if value < _OCTAL else b"\x80" + value.to_bytes(11, "big")


def _block(name: bytes, *, size: int, mode: int, mtime: int, kind: bytes, target: bytes) -> bytes:
    name, target = name[:_NAME], target[:_NAME]
    if size < _OCTAL and mtime < _OCTAL:
        numbers = b"%07o\0%b%011o\0%011o\0" % (mode, _OWNER, size, mtime)
    else:
        numbers = b"%07o\0%b%b%b" % (mode, _OWNER, _number(size), _number(mtime))
    total = sum(name) + sum(numbers) + sum(kind) + sum(target) + _CONSTANT
    return b"%b%b%06o\0 %b%b%b" % (name.ljust(_NAME, b"\0"), numbers, total, kind, target.ljust(_NAME, b"\0"), _REST)


class TarError(ValueError):
    """The stream is damaged or not a tar. The message says why."""


class TarLimitError(TarError):
    """A tar that may be intact but is refused: it exceeds a limit or has a member that no environment needs."""


@dataclass(frozen=True)
class Member:
    """One member.

    Attributes:
        name: its path in the tar, without the slash at the end of a folder.
        kind: ``other`` is a device, a pipe or unknown.
        mode: permissions, with the set-uid, set-gid and sticky bits.
        mtime: seconds.
        size: bytes of its data.
        target: of a link of either kind.
    """

    name: str
    kind: Kind
    mode: int = 0o644
    mtime: float = 0.0
    size: int = 0
    target: str = ""


@dataclass
class _Pending:
    """Values in headers for the next member."""

    size: int = 0  # bytes of these headers
    values: dict[str, str] = field(default_factory=dict)


class TarReader:
    """Iterates over the members of a stream. Read the content of a member before the next one.

    Args:
        read: returns up to that many bytes, fewer only at the end.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._left = 0  # bytes of the member's data
        self._padding = 0
        self._global: dict[str, str] = {}
        self._members = 0
        self._names = 0
        self.position = 0  # bytes read

    def __iter__(self) -> Iterator[Member]:
        """All members. At the end of the tar, check that only zeros follow.

        Raises:
            TarError: it is damaged, or exceeds a limit.
            EOFError: it is truncated.
        """
        while True:
            for _ in self.content():
                pass
            self._skip(self._padding)
            pending = _Pending(values=dict(self._global))
            member = self._next(pending)
            if member is None:
                self._check_end()
                return
            self._members += 1
            self._names += len(member.name) + len(member.target)
            if self._members > MEMBERS or self._names > NAMES:
                raise TarLimitError(f"it has more than {MEMBERS} members, or more than {NAMES} bytes of names")
            yield member

    def content(self) -> Iterator[bytes]:
        """The rest of the member's data, in pieces.

        Raises:
            EOFError: it is truncated.
        """
        while self._left:
            piece = self._exactly(min(self._left, _READ))
            self._left -= len(piece)
            yield piece

    def _next(self, pending: _Pending) -> Member | None:
        """The next member with its headers; None at the end of the tar."""
        begin = self.position
        while True:
            at = self.position
            block = self._exactly(BLOCK)
            if not any(block):
                if at != begin:
                    raise TarError(f"no member follows the headers before byte {at}")
                return None
            if not _is_whole(block):
                raise TarError(f"there is data but no member at byte {at} of its tar stream")
            kind = block[156:157]
            if kind not in (b"L", b"K", b"x", b"X", b"g"):
                return self._member(block, kind, pending.values)
            self._header(kind, _read_number(block[124:136], "size"), pending)

    def _header(self, kind: bytes, size: int, pending: _Pending) -> None:
        """Read a long name, a long target, or pax records for the next member or for all later ones."""
        pending.size += size
        if pending.size > HEADER:
            what = {b"L": "a long name", b"K": "a long link target"}.get(kind, "a pax header")
            raise TarLimitError(f"{what} of {size} bytes: the limit for the headers of a member is {HEADER}")
        data = self._exactly(size)
        self._skip(-size % BLOCK)
        if kind in (b"L", b"K"):
            text = data.partition(b"\0")[0].decode("utf-8", "surrogateescape")
            pending.values.setdefault("path" if kind == b"L" else "linkpath", text)  # pax records win
            return
        records = dict(_records(data))
        if sparse := next((key for key in records if key.startswith("GNU.sparse.")), None):
            raise TarLimitError(f"it contains a sparse file ({sparse}); create the archive again without --sparse")
        if kind == b"g":
            if odd := next((key for key in ("path", "linkpath", "size") if key in records), None):
                raise TarLimitError(f"a global pax header gives all members one {odd}")
            self._global |= records
            if sum(len(key) + len(value) for key, value in self._global.items()) > HEADER:
                raise TarLimitError(f"its global pax headers have more than {HEADER} bytes")
        pending.values |= records

    def _member(self, block: bytes, kind: bytes, values: dict[str, str]) -> Member:
        if kind == b"S":
            raise TarLimitError("it contains a sparse file; create the archive again without --sparse")
        name = values.get("path", "")
        if not name:
            text = _text(block[:100])
            prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
            name = f"{prefix}/{text}" if prefix else text
        target = values.get("linkpath") or _text(block[157:257])
        for path in (name, target):
            if len(path) > PATH or len(path.encode("utf-8", "surrogateescape")) > PATH:
                raise TarLimitError(f"the name {path[:80]!r}... is longer than the {PATH} bytes that Linux opens")
        size = _read_number(block[124:136], "size")
        if "size" in values:
            if not _SIZE.match(values["size"]):
                raise TarError(f"{name!r} has the size {values['size'][:40]!r}")
            size = int(values["size"])
        if "mtime" in values:
            mtime = _time(values["mtime"], name)
        else:
            mtime = float(_read_number(block[136:148], "mtime", signed=True))
        what = _KINDS.get(kind, "other")
        if kind in (b"0", b"\0") and name.endswith("/"):
            what = "dir"  # folders before POSIX
        self._left = size if what in ("file", "other") else 0
        self._padding = -self._left % BLOCK
        return Member(
            name=name.rstrip("/") if what == "dir" else name,
            kind=what,
            mode=_read_number(block[100:108], "mode") & 0o7777,
            mtime=mtime,
            size=self._left,
            target=target if what in ("link", "hard") else "",
        )

    def _check_end(self) -> None:
        """Check that only zeros follow the first zero block: a reader that stops there would miss the rest."""
        at = self.position
        while block := self._read(_READ):
            if any(block):
                raise TarError(f"there is data but no member at byte {at} of its tar stream")

    def _skip(self, size: int) -> None:
        if size:
            self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        pieces = []
        left = size
        while left:
            piece = self._read(left)
            if not piece:
                raise EOFError(f"its tar stream ends at byte {self.position}, in the middle")
            self.position += len(piece)
            left -= len(piece)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _is_whole(block: bytes) -> bool:
    """Whether a header's checksum is correct; old tars counted bytes as signed."""
    found = _OCTAL_FIELD.match(block[148:156])
    if found is None or not found[1]:
        return False
    wanted = int(found[1], 8)
    rest = block[:148] + b" " * 8 + block[156:]
    total = sum(rest)
    return wanted in (total, total - 256 * sum(byte > 127 for byte in rest))


def _read_number(data: bytes, what: str, *, signed: bool = False) -> int:
    """A number in octal digits or GNU's base 256."""
    if data[0] in (0x80, 0xFF):
        value = int.from_bytes(data[1:], "big") - ((1 << 8 * len(data) - 8) if data[0] == 0xFF else 0)
    elif found := _OCTAL_FIELD.match(data):
        value = int(found[1] or b"0", 8)
    else:
        raise TarError(f"a header has the {what} {data!r}")
    if (value < 0 and not signed) or abs(value) >= 1 << 63:
        raise TarError(f"a header has the {what} {value}")
    return value


def _time(text: str, name: str) -> float:
    if not _SECONDS.match(text):
        raise TarError(f"{name!r} has the time {text[:40]!r}")
    return float(text)


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _records(data: bytes) -> Iterator[tuple[str, str]]:
    """Pax records: the length of the record in decimal digits, a space, key=value, a newline."""
    at = 0
    while at < len(data) and data[at]:
        found = _PAX_RECORD.match(data, at)
        end = at + int(found[1]) if found else 0
        if not found or not found.end() < end <= len(data) or data[end - 1] != 0x0A:
            raise TarError(f"a pax header is damaged at its byte {at}")
        key, value = found[2].decode("utf-8", "surrogateescape"), data[found.end() : end - 1]
        yield key, value.decode("utf-8", "surrogateescape")
        at = end
