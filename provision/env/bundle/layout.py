"""The layout of a bundle: its files, the headers of its members, and the index.

A bundle is one file, or parts of one that was split. ``NAME.ccb.000``, ``NAME.ccb.001`` and so on have equal sizes,
except the last; the size is in the index in the first part. ``NAME.ccb.sha256`` lists them for ``sha256sum -c``.
Reading does not need the list, but it shows which part is damaged.

The index is the first member. It contains the offset of the manifest, which is the last member.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from provision.env.bundle import tar
from provision.env.bundle.manifest import FORMAT
from provision.errors import BundleError, UsageError

SUFFIX = ".ccb"
BLOCK = 1 << 20  # bytes read at once
LIST = ".sha256"  # added to the bundle's name

_LONGEST_LIST = 64 << 20  # bytes; 100,000 parts have a tenth of that
_SHOWN = 10  # names in a message

_PART = re.compile(r"(?P<name>.+)\.(?P<number>\d{3,})", re.DOTALL)
_LINE = re.compile(rb"(?P<escaped>\\?)(?P<digest>[0-9a-f]{64})  (?P<name>.+)")


@dataclass(frozen=True)
class BundleFiles:
    """The bytes of one file, or of several files in a row.

    Attributes:
        path: the bundle's name. No file has this name if the bundle was split.
        files: the files, in order.
        sizes: their sizes.
        is_split: whether they are parts.
    """

    path: Path
    files: tuple[Path, ...]
    sizes: tuple[int, ...]
    is_split: bool = False

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes)

    def read(self, offset: int, size: int) -> Iterator[bytes]:
        """``size`` bytes from ``offset``, in blocks.

        Raises:
            BundleError: a file is too short.
            UsageError: a file cannot be read.
        """
        for path, begin, length in self._locate(offset, size):
            yield from _read(path, begin, length)

    def take(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset``; errors as for ``read``."""
        return b"".join(self.read(offset, size))

    def damaged(self, member: str, offset: int, size: int) -> BundleError:
        """The error for a damaged member of ``size`` bytes at ``offset``; it names the part."""
        if not self.is_split:
            return BundleError(
                f"{self.path}: {member} is damaged",
                hint="copy the bundle again, and compare its sha256 with the original's",
            )
        touched = dict.fromkeys((self.files[0], *(path for path, _, _ in self._locate(offset, size))))
        names = " or ".join(str(path) for path in touched)
        return self.unlisted(*touched) or BundleError(
            f"{self.path}: {member} in {names} is damaged",
            hint=f"copy them again, from the same bundle as {self.files[0]}",
        )

    def unlisted(self, *files: Path) -> BundleError | None:
        """The error for files with another sha256 than in the list of checksums; None if there are none."""
        listed = listed_digests(self.path)
        wrong = [path for path in files if path.name in listed and file_digest(path) != listed[path.name]]
        if not wrong:
            return None
        names = " and ".join(str(path) for path in wrong)
        what = "is damaged or belongs" if len(wrong) == 1 else "are damaged or belong"
        return BundleError(f"{names} {what} to another bundle", hint=f"copy {names} again")

    def _locate(self, offset: int, size: int) -> Iterator[tuple[Path, int, int]]:
        """The file, offset and size of each piece of ``size`` bytes from ``offset``."""
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


def find_bundle(folder: Path) -> Path:
    """The only bundle in a folder, whole or in parts.

    Raises:
        UsageError: there is none, or more than one.
    """
    paths = [path for path in folder.glob(f"*{SUFFIX}*") if path.is_file()]
    found = sorted({bundle_name(path) for path in paths if not path.name.startswith(".")})  # hidden: not complete
    if not found:
        raise UsageError(f"no bundle (*{SUFFIX}) in {folder}", hint="clusterctl pack-env")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise UsageError(f"several bundles in {folder}: {names}", hint=f"clusterctl deploy {found[0].name}")
    return found[0]


def find_files(path: Path) -> BundleFiles:
    """The files of a bundle.

    Args:
        path: the bundle, any of its parts, or the list of their checksums.

    Raises:
        UsageError: there is no such file, or it cannot be read.
        BundleError: a part is missing.
    """
    try:
        return _find_files(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _find_files(path: Path) -> BundleFiles:
    whole = bundle_name(path)
    if whole == path and path.is_file():
        return BundleFiles(path, (path,), (path.stat().st_size,))
    found = find_parts(whole)
    if not found:
        raise UsageError(f"{path} is not a file", hint="to create a bundle: clusterctl pack-env")
    width = len(found[0].suffix) - 1
    wanted = sorted({f"{whole.name}.{number:0{width}}" for number in range(len(found))} | set(listed_digests(whole)))
    missing = [name for name in wanted if not (whole.parent / name).is_file()]
    if missing:
        raise parts_missing(whole, missing)
    return BundleFiles(whole, tuple(found), tuple(one.stat().st_size for one in found), is_split=True)


def parts_missing(whole: Path, names: list[str]) -> BundleError:
    """The error for missing parts."""
    names_text = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return BundleError(
        f"{whole}: missing {names_text}",
        hint=f"copy all parts of the bundle to {whole.parent}",
    )


def bundle_name(path: Path) -> Path:
    """The bundle of a path, which is the bundle itself, a part, or the list of checksums."""
    if path.name.endswith(LIST):
        return path.with_name(path.name.removesuffix(LIST))
    match = _PART.fullmatch(path.name)
    return path.with_name(match["name"]) if match else path


def find_parts(whole: Path) -> list[Path]:
    """The parts of a bundle in its folder, in order."""
    if not whole.parent.is_dir():
        return []
    found = []
    for path in whole.parent.iterdir():
        match = _PART.fullmatch(path.name)
        if match and match["name"] == whole.name and path.is_file():
            found.append((int(match["number"]), path))
    return [path for _, path in sorted(found)]


def list_path(whole: Path) -> Path:
    """The list of the checksums of a bundle's parts."""
    return whole.with_name(whole.name + LIST)


def listed_digests(whole: Path) -> dict[str, str]:
    """The sha256 of each part from the list; empty without a readable list."""
    try:
        with list_path(whole).open("rb") as file:
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
    return {name: digest for name, digest in found.items() if bundle_name(whole.with_name(name)) == whole}


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
                    raise BundleError(f"{path} is {size} bytes too short", hint="copy it again")
                size -= len(block)
                yield block
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def file_digest(path: Path) -> str:
    """The sha256 of a file.

    Raises:
        UsageError: it cannot be read.
        BundleError: it became shorter.
    """
    digest = hashlib.sha256()
    for block in _read(path, 0, path.stat().st_size):
        digest.update(block)
    return digest.hexdigest()


INDEX = "clusterctl-bundle"
INDEX_SIZE = 512
MANIFEST = "manifest.json"
MTIME = 315532800  # 1980-01-01: equal environments give equal bundles, except for the time of packing


def member_header(name: str, size: int) -> bytes:
    """The tar header of a member."""
    return tar.header(name.encode(), size=size, mtime=MTIME)


def index_member(offset: int, size: int, sha256: str, split: int = 0) -> bytes:
    """The first member, header and data.

    Args:
        offset: of the manifest's data.
        size: of the manifest.
        sha256: of the manifest.
        split: bytes of a part; 0 for a bundle in one file.
    """
    index = {
        "magic": INDEX,
        "format": FORMAT,
        "manifest_offset": offset,
        "manifest_size": size,
        "manifest_sha256": sha256,
        "split": split,
    }
    return member_header(INDEX, INDEX_SIZE) + json.dumps(index).encode("ascii").ljust(INDEX_SIZE)
