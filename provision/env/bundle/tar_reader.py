"""Read an untrusted tar, member by member, in bounded memory.

It takes what GNU tar, bsdtar, Python and busybox write: old, ustar, GNU and pax headers. A name, a header and their
number have limits, and are refused before they are read. Sparse files are refused: their size is that of no data.

It stands in place of ``tarfile``, which reads long names and pax headers of any size into memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

BLOCK = 512
HEADER = 1 << 20  # bytes of the headers before one member: long names, pax records such as extended attributes
PATH = 4095  # bytes of a name or target; Linux opens no longer one
MEMBERS = 5_000_000
NAMES = 1 << 30  # bytes of all names and targets

Kind = Literal["file", "dir", "link", "hard", "other"]

_KINDS: dict[bytes, Kind] = {b"0": "file", b"\0": "file", b"7": "file", b"1": "hard", b"2": "link", b"5": "dir"}
_PIECE = 1 << 20
_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*\Z")
_RECORD = re.compile(rb"([1-9][0-9]{0,9}) ([^=\n\0]{1,256})=")
_SECONDS = re.compile(r"-?[0-9]{1,20}(?:\.[0-9]*)?\Z")
_SIZE = re.compile(r"[0-9]{1,19}\Z")


class TarError(ValueError):
    """What is read is no tar, or damaged. The text says why."""


class TarLimitError(TarError):
    """A tar that may be whole, and is not read: it goes beyond a limit, or holds what no environment's archive has."""


@dataclass(frozen=True)
class Member:
    """One member.

    Attributes:
        name: its path, as the tar has it; without the slash at a folder's end.
        kind: ``other`` is a device, a pipe or anything unknown.
        mode: permissions, with the set-uid, set-gid and sticky bits.
        mtime: seconds.
        size: bytes of data that follow.
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
    """What headers say of the member that follows them."""

    size: int = 0  # bytes of these headers
    values: dict[str, str] = field(default_factory=dict)


class TarReader:
    """The members of a stream, in their order: iterate, and take the content of each before the next.

    Args:
        read: gives up to so many bytes, fewer only at the end.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._left = 0  # bytes of the member's data
        self._padding = 0
        self._global: dict[str, str] = {}
        self._members = 0
        self._names = 0
        self.position = 0  # bytes that were read

    def __iter__(self) -> Iterator[Member]:
        """Every member up to the end of the tar, which is checked to the end of the stream.

        Raises:
            TarError: it is damaged, or goes beyond a limit.
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
        """What is left of the member's data, in pieces.

        Raises:
            EOFError: it is truncated.
        """
        while self._left:
            piece = self._exactly(min(self._left, _PIECE))
            self._left -= len(piece)
            yield piece

    def _next(self, pending: _Pending) -> Member | None:
        """The member behind its headers; None at the end of the tar."""
        begin = self.position
        while True:
            at = self.position
            block = self._exactly(BLOCK)
            if not any(block):
                if at != begin:
                    raise TarError(f"no member follows the headers before byte {at}")
                return None
            if not _is_whole(block):
                raise TarError(f"no member begins at byte {at} of its tar stream, and it goes on")
            kind = block[156:157]
            if kind not in (b"L", b"K", b"x", b"X", b"g"):
                return self._member(block, kind, pending.values)
            self._header(kind, _number(block[124:136], "size"), pending)

    def _header(self, kind: bytes, size: int, pending: _Pending) -> None:
        """A long name, a long target, or pax records: of the next member, or of all that follow."""
        pending.size += size
        if pending.size > HEADER:
            what = {b"L": "a long name", b"K": "a long link target"}.get(kind, "a pax header")
            raise TarLimitError(f"{what} of {size} bytes: the headers of a member have at most {HEADER}")
        data = self._exactly(size)
        self._skip(-size % BLOCK)
        if kind in (b"L", b"K"):
            text = data.partition(b"\0")[0].decode("utf-8", "surrogateescape")
            pending.values.setdefault("path" if kind == b"L" else "linkpath", text)  # pax records win
            return
        records = dict(_records(data))
        if sparse := next((key for key in records if key.startswith("GNU.sparse.")), None):
            raise TarLimitError(f"it holds a sparse file ({sparse}); make the archive again without --sparse")
        if kind == b"g":
            if odd := next((key for key in ("path", "linkpath", "size") if key in records), None):
                raise TarLimitError(f"a global pax header gives all members one {odd}")
            self._global |= records
            if sum(len(key) + len(value) for key, value in self._global.items()) > HEADER:
                raise TarLimitError(f"its global pax headers have more than {HEADER} bytes")
        pending.values |= records

    def _member(self, block: bytes, kind: bytes, values: dict[str, str]) -> Member:
        if kind == b"S":
            raise TarLimitError("it holds a sparse file; make the archive again without --sparse")
        name = values.get("path", "")
        if not name:
            text = _text(block[:100])
            prefix = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""
            name = f"{prefix}/{text}" if prefix else text
        target = values.get("linkpath") or _text(block[157:257])
        for path in (name, target):
            if len(path) > PATH or len(path.encode("utf-8", "surrogateescape")) > PATH:
                raise TarLimitError(f"the name {path[:80]!r}... is longer than the {PATH} bytes that Linux opens")
        size = _number(block[124:136], "size")
        if "size" in values:
            if not _SIZE.match(values["size"]):
                raise TarError(f"{name!r} has the size {values['size'][:40]!r}")
            size = int(values["size"])
        mtime = (
            _time(values["mtime"], name) if "mtime" in values else float(_number(block[136:148], "mtime", signed=True))
        )
        what = _KINDS.get(kind, "other")
        if kind in (b"0", b"\0") and name.endswith("/"):
            what = "dir"  # as tar before POSIX wrote folders
        self._left = size if what in ("file", "other") else 0
        self._padding = -self._left % BLOCK
        return Member(
            name=name.rstrip("/") if what == "dir" else name,
            kind=what,
            mode=_number(block[100:108], "mode") & 0o7777,
            mtime=mtime,
            size=self._left,
            target=target if what in ("link", "hard") else "",
        )

    def _check_end(self) -> None:
        """Nothing but zeros may follow the first zero block: a reader that stops there would not see the rest."""
        at = self.position
        while block := self._read(_PIECE):
            if any(block):
                raise TarError(f"no member begins at byte {at} of its tar stream, and it goes on")

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
    """Whether a header's check sum is right; old tars counted bytes as signed."""
    found = _OCTAL.match(block[148:156])
    if found is None or not found[1]:
        return False
    wanted = int(found[1], 8)
    rest = block[:148] + b" " * 8 + block[156:]
    total = sum(rest)
    return wanted in (total, total - 256 * sum(byte > 127 for byte in rest))


def _number(data: bytes, what: str, *, signed: bool = False) -> int:
    """Octal digits, or GNU's base 256."""
    if data[0] in (0x80, 0xFF):
        value = int.from_bytes(data[1:], "big") - ((1 << 8 * len(data) - 8) if data[0] == 0xFF else 0)
    elif found := _OCTAL.match(data):
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
    """Pax records: the length of all of a record in decimal digits, a space, key=value, a line end."""
    at = 0
    while at < len(data) and data[at]:
        found = _RECORD.match(data, at)
        end = at + int(found[1]) if found else 0
        if not found or not found.end() < end <= len(data) or data[end - 1] != 0x0A:
            raise TarError(f"a pax header is damaged at its byte {at}")
        key, value = found[2].decode("utf-8", "surrogateescape"), data[found.end() : end - 1]
        yield key, value.decode("utf-8", "surrogateescape")
        at = end
