"""The files that a bundle lies in: one, or the slices of one that was split.

``NAME.ccb.000``, ``NAME.ccb.001`` and so on are plain slices, each but the last of one length, which the index in the
first slice tells. ``NAME.ccb.sha256`` lists them for ``sha256sum -c``; it is needed by nobody, but tells which slice
is the wrong one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from provision.errors import BundleError, UsageError

BLOCK = 1 << 20  # bytes read, and yielded, at once
LIST = ".sha256"  # follows the bundle's name

_LONGEST_LIST = 64 << 20  # bytes; 100,000 parts have a tenth of that
_SHOWN = 10  # names in a message

_SLICE = re.compile(r"(?P<name>.+)\.(?P<number>\d{3,})", re.DOTALL)
_LINE = re.compile(rb"(?P<escaped>\\?)(?P<digest>[0-9a-f]{64})  (?P<name>.+)")


@dataclass(frozen=True)
class Slices:
    """What lies in one file, or in several ones after each other.

    Attributes:
        path: the bundle, as people name it; no file of this name exists if it was split.
        files: the files, in order.
        sizes: their lengths.
        is_split: whether they are slices.
    """

    path: Path
    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    is_split: bool = False

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return sum(self.sizes)

    def read(self, offset: int, size: int) -> Iterator[bytes]:
        """``size`` bytes from ``offset``, in blocks.

        Raises:
            BundleError: a file ends before.
            UsageError: a file cannot be read.
        """
        for path, begin, length in self._where(offset, size):
            yield from _read(path, begin, length)

    def take(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset`` at once; errors as for ``read``."""
        return b"".join(self.read(offset, size))

    def damaged(self, member: str, offset: int, size: int) -> BundleError:
        """The error for a member, ``size`` bytes from ``offset``, that is not the manifest's: it names the slice."""
        if not self.is_split:
            return BundleError(
                f"{self.path}: {member} is damaged",
                hint="copy the bundle again and compare its sha256 with the original's",
            )
        touched = dict.fromkeys((self.files[0], *(path for path, _, _ in self._where(offset, size))))
        names = " or ".join(str(path) for path in touched)
        return self.unlisted(*touched) or BundleError(
            f"{self.path}: {member} is damaged; it lies in {names}",
            hint=f"copy them again, from the bundle that {self.files[0]} is of",
        )

    def unlisted(self, *files: Path) -> BundleError | None:
        """The error for those files that the list of check sums has otherwise; None if there are none."""
        listed = listed_digests(self.path)
        wrong = [path for path in files if path.name in listed and _digest(path) != listed[path.name]]
        if not wrong:
            return None
        names = " and ".join(str(path) for path in wrong)
        what = "is" if len(wrong) == 1 else "are"
        return BundleError(f"{names} {what} damaged, or of another bundle", hint=f"copy {names} again")

    def _where(self, offset: int, size: int) -> Iterator[tuple[Path, int, int]]:
        """Files, and which bytes of them make up ``size`` bytes from ``offset``."""
        last = len(self.files) - 1
        for number, (path, length) in enumerate(zip(self.files, self.sizes, strict=True)):
            if offset < length or number == last:
                here = min(size, length - offset) if number != last else size
                if here <= 0:
                    return
                yield path, offset, here
                size -= here
                offset = 0
            else:
                offset -= length


def find(path: Path) -> Slices:
    """The files of a bundle.

    Args:
        path: the bundle, or any of its slices, or the list of their check sums.

    Raises:
        UsageError: there is no such file, or it cannot be read.
        BundleError: slices are missing that lie between others.
    """
    try:
        return _find(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _find(path: Path) -> Slices:
    whole = name_of(path)
    if whole == path and path.is_file():
        return Slices(path, (path,), (path.stat().st_size,))
    found = slices_of(whole)
    if not found:
        raise UsageError(f"{path} is not a file", hint="to write a bundle: clusterctl pack-env")
    width = len(found[0].suffix) - 1
    wanted = sorted({f"{whole.name}.{number:0{width}}" for number in range(len(found))} | set(listed_digests(whole)))
    missing = [name for name in wanted if not (whole.parent / name).is_file()]
    if missing:
        raise lacking(whole, missing)
    return Slices(whole, tuple(found), tuple(one.stat().st_size for one in found), is_split=True)


def lacking(whole: Path, names: list[str]) -> BundleError:
    """The error for slices that are not there."""
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return BundleError(
        f"{whole} lacks {shown}",
        hint=f"all parts of the bundle must lie in {whole.parent}",
    )


def name_of(path: Path) -> Path:
    """The bundle that a path means: itself, or what it is a slice or the list of."""
    if path.name.endswith(LIST):
        return path.with_name(path.name.removesuffix(LIST))
    match = _SLICE.fullmatch(path.name)
    return path.with_name(match["name"]) if match else path


def slices_of(whole: Path) -> list[Path]:
    """The slices of a bundle that lie beside it, in order."""
    if not whole.parent.is_dir():
        return []
    found = []
    for path in whole.parent.iterdir():
        match = _SLICE.fullmatch(path.name)
        if match and match["name"] == whole.name and path.is_file():
            found.append((int(match["number"]), path))
    return [path for _, path in sorted(found)]


def list_of(whole: Path) -> Path:
    """The list of the check sums of a bundle's slices."""
    return whole.with_name(whole.name + LIST)


def listed_digests(whole: Path) -> dict[str, str]:
    """The slices and their sha256, as the list says; empty if there is none that can be read."""
    try:
        with list_of(whole).open("rb") as file:
            lines = file.read(_LONGEST_LIST).split(b"\n")
    except OSError:
        return {}
    found = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        if match:
            name = match["name"]
            if match["escaped"]:
                name = re.sub(rb"\\([\\nr])", lambda one: {b"n": b"\n", b"r": b"\r"}.get(one[1], b"\\"), name)
            found[name.decode("utf-8", "surrogateescape")] = match["digest"].decode()
    return {name: digest for name, digest in found.items() if name_of(whole.with_name(name)) == whole}


def list_line(name: str, digest: str) -> bytes:
    """A line of the list, as ``sha256sum`` writes it."""
    data = name.encode("utf-8", "surrogateescape")
    escaped = data.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")
    return b"%b%b  %b\n" % (b"\\" if escaped != data else b"", digest.encode(), escaped)


def _read(path: Path, offset: int, size: int) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            while size:
                block = file.read(min(BLOCK, size))
                if not block:
                    raise BundleError(f"{path} ends {size} bytes too early", hint="copy it again")
                size -= len(block)
                yield block
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    for block in _read(path, 0, path.stat().st_size):
        digest.update(block)
    return digest.hexdigest()
