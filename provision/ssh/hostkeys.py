"""Host keys in OpenSSH's ``known_hosts`` files: looks up known keys and pins confirmed ones.

Only reads and appends, and opens no connection. The format is in sshd(8), "SSH_KNOWN_HOSTS FILE FORMAT": plain,
``[host]:port``, hashed and wildcard names, ``!`` and ``@revoked``; not ``@cert-authority``.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import hmac
import os
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SYSTEM_FILE = Path("/etc/ssh/ssh_known_hosts")
_PATTERN = frozenset("*?!,")  # what makes a name more than a name


@dataclass(frozen=True)
class KnownKey:
    """A host key that a file trusts or revokes."""

    kind: str  # ssh-ed25519, ssh-rsa, ecdsa-sha2-nistp256, ...
    blob: bytes  # the key as it goes over the wire
    file: Path
    revoked: bool = False

    @property
    def fingerprint(self) -> str:
        """The fingerprint in the format of ``ssh-keygen -l``."""
        return fingerprint(self.blob)


def fingerprint(blob: bytes) -> str:
    """The ``SHA256:…`` fingerprint of a public key, in OpenSSH's format."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def host_name(address: str, port: int) -> str:
    """A host's name in ``known_hosts``, with its port unless that is 22."""
    return address.lower() if port == 22 else f"[{address.lower()}]:{port}"


def files(pinned: Path) -> tuple[Path, ...]:
    """The trusted files, in order; only ``pinned`` is ever written."""
    return (pinned, Path.home() / ".ssh" / "known_hosts", SYSTEM_FILE)


def look_up(name: str, paths: Sequence[Path]) -> list[KnownKey]:
    """The keys of ``name`` from the first file that has any, and every revoked key."""
    trusted: list[KnownKey] = []
    revoked: list[KnownKey] = []
    for file in paths:
        keys = list(_read(file, name))
        revoked += [key for key in keys if key.revoked]
        trusted = trusted or [key for key in keys if not key.revoked]
    return trusted + revoked


def pin(name: str, kind: str, blob: bytes, pinned: Path) -> None:
    """Add a host key to ``pinned`` and change nothing else in it. Safe for concurrent threads and programs."""
    pinned = pinned.resolve()
    pinned.parent.mkdir(parents=True, exist_ok=True)
    with _locked(pinned.parent):
        try:
            before = pinned.read_bytes()
            mode = pinned.stat().st_mode & 0o777
        except FileNotFoundError:
            before, mode = b"", 0o644
        if any(key.blob == blob for key in _read(pinned, name) if not key.revoked):
            return
        if before and not before.endswith(b"\n"):
            before += b"\n"
        line = f"{name} {kind} {base64.b64encode(blob).decode()}\n".encode()
        handle, temporary = tempfile.mkstemp(prefix=f".{pinned.name}.", dir=pinned.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(before + line)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            Path(temporary).replace(pinned)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder itself, so that no lock file stays next to the inventory."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks: the user must not start two programs at once
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _read(file: Path, name: str) -> Iterator[KnownKey]:
    try:
        found = file.stat()
        lines = _lines(file, found.st_mtime_ns, found.st_size)
    except OSError:
        return
    matching = [line for line in lines.patterns if _matches(line.names, name)]
    for line in sorted([*lines.plain.get(name, ()), *matching], key=lambda line: line.number):
        with suppress(binascii.Error, ValueError):
            yield KnownKey(line.kind, base64.b64decode(line.blob, validate=True), file, revoked=bool(line.marker))


class _Line(NamedTuple):
    """A line of a file: its number, marker, names, type and key."""

    number: int
    marker: str
    names: str
    kind: str
    blob: str


class _Lines(NamedTuple):
    """A file's lines. Only ``patterns`` need a look at every line: a thousand nodes would take a million looks."""

    plain: dict[str, list[_Line]]  # by the one name of each
    patterns: tuple[_Line, ...]  # hashed names, wildcards, and several names


@lru_cache(maxsize=16)  # a command looks up every node in the same files
def _lines(file: Path, _changed: int, _size: int) -> _Lines:
    """The lines of a file with this time and size."""
    plain: dict[str, list[_Line]] = {}
    patterns = []
    for number, text in enumerate(file.read_text("utf-8", "surrogateescape").splitlines()):
        fields = text.split()
        if len(fields) < 3 or text.startswith("#"):
            continue
        marker = fields.pop(0) if fields[0].startswith("@") else ""
        if marker not in {"", "@revoked"} or len(fields) < 3:
            continue
        line = _Line(number, marker, *fields[:3])
        if line.names.startswith("|1|") or not _PATTERN.isdisjoint(line.names):
            patterns.append(line)
        else:
            plain.setdefault(line.names.lower(), []).append(line)
    return _Lines(plain, tuple(patterns))


def _matches(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):  # HMAC-SHA1 of the name, keyed with the salt
        try:
            salt, digest = (base64.b64decode(part) for part in patterns.split("|")[2:4])
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)
    found = False
    for pattern in patterns.lower().split(","):
        wanted = pattern.removeprefix("!").replace("[", "[[]")  # '[' is no wildcard here
        if fnmatchcase(name, wanted):
            if pattern.startswith("!"):
                return False
            found = True
    return found
