"""Describe a bundle: packages, sizes, what contains the prefix. As ``--json`` and as text of 80 columns."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from provision.env.bundle.manifest import FOLDERS, Entry, Manifest, Package
from provision.env.release.examine import space
from provision.env.source.survey import DATA
from provision.env.text import columns, line, number, size, some

# Packages that training needs, the most important first. CUDA and NCCL belong to torch.
STACK = ("torch", "deepspeed", "llamafactory", "transformers", "accelerate", "peft", "trl", "datasets")

LARGEST = 10  # packages that are shown without --packages
FEW = 10  # of everything else

_KINDS = {
    "file": ("file", "files"),
    "link": ("symlink", "symlinks"),
    "hard": ("hard link", "hard links"),
    "dir": ("folder", "folders"),
}
_MARKS = {
    "shebang": ("script by its first line", "scripts by their first lines"),
    "text": ("text file", "text files"),
    "binary": ("binary", "binaries"),
    "link": ("symlink", "symlinks"),
    "record": ("list of hashes", "lists of hashes"),
}


def is_data(package: str) -> bool:
    """Whether a chunk's package is data: ``data/NAME/``."""
    return package.startswith(f"{DATA}/") and package.count("/") == 2


@dataclass(frozen=True)
class Weight:
    """The files in chunks of a package, or of a folder without a package. Sizes in bytes."""

    name: str
    files: int
    size: int
    compressed: int


@dataclass(frozen=True)
class Overview:
    """A bundle as described by its manifest.

    Attributes:
        manifest: the manifest.
        stored: bytes of the bundle on disk.
    """

    manifest: Manifest
    stored: int

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Packages and folders, the largest first. Files that contain the prefix are in none: see ``prefix_size``."""
        chunks = self.manifest.chunks
        files: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for entry in self.manifest.files:
            if entry.type == "file" and entry.chunks:
                files[chunks[entry.chunks[0]].package] += 1
                sizes[chunks[entry.chunks[0]].package] += entry.size
        compressed: Counter[str] = Counter()
        for chunk in chunks:
            compressed[chunk.package] += chunk.compressed
        found = (Weight(name, files[name], sizes[name], compressed[name]) for name in files if name != FOLDERS)
        return tuple(sorted(found, key=lambda weight: (-weight.size, weight.name)))

    def weight(self, package: Package) -> Weight | None:
        """The files of a package; None if all of them contain the prefix or belong to another package."""
        return self._by_name.get(package.name)

    @cached_property
    def _by_name(self) -> dict[str, Weight]:
        return {weight.name: weight for weight in self.weights}

    @property
    def data(self) -> tuple[Weight, ...]:
        """Data packed with the environment, the largest first."""
        return tuple(weight for weight in self.weights if is_data(weight.name))

    @property
    def unowned(self) -> tuple[Weight, ...]:
        """Folders of files without a package, the largest first."""
        return tuple(weight for weight in self.weights if weight.name.endswith("/") and not is_data(weight.name))

    @property
    def stack(self) -> dict[str, str]:
        """Versions of the packages that training needs."""
        versions = {package.name: package.version for package in self.manifest.packages}
        versions |= {name: version for name, version in self.manifest.versions.items() if version}
        return {name: versions[name] for name in (*STACK, "cuda", "nccl") if name in versions}

    @property
    def checkouts(self) -> tuple[tuple[str, str], ...]:
        """Editable installs: the source path of each checkout, and its path in the prefix."""
        return tuple((source, target) for source, target in self.manifest.relocations if target)

    @property
    def kinds(self) -> dict[str, int]:
        """The number of files, links, hard links and folders."""
        counted = Counter(entry.type for entry in self.manifest.files)
        return {kind: counted[kind] for kind in ("file", "link", "hard", "dir")}

    @property
    def unpacked(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.manifest.files)

    @property
    def needed(self) -> int:
        """Bytes on a node's file system, where every file and folder takes whole blocks."""
        return space({entry.path: entry.size for entry in self.manifest.files if entry.type in ("file", "dir")})

    @property
    def prefix_size(self) -> int:
        """Bytes of the files that contain the prefix."""
        return sum(entry.size for entry in self.manifest.rewritable)

    @cached_property
    def by_mark(self) -> dict[str, tuple[Entry, ...]]:
        """Entries that contain the prefix, by kind. An entry with several kinds is listed for each."""
        found: defaultdict[str, list[Entry]] = defaultdict(list)
        for entry in self.manifest.marked:
            for kind in sorted({mark.kind for mark in entry.marks}):
                found[kind].append(entry)
        return {kind: tuple(found[kind]) for kind in ("shebang", "text", "binary", "link", "record") if kind in found}

    def room(self, entry: Entry) -> int:
        """The longest prefix in bytes that fits into a binary."""
        reserved = max(mark.room for mark in entry.marks)
        return reserved or len(self.manifest.source_prefix.encode("utf-8", "surrogateescape"))


def overview_data(overview: Overview) -> dict[str, Any]:
    """The overview for ``--json``. Sizes in bytes."""
    manifest = overview.manifest
    return {
        "name": manifest.name,
        "release": manifest.release_id,
        "digest": manifest.digest,
        "format": manifest.format,
        "created": manifest.created,
        "tool": manifest.tool,
        "platform": manifest.platform,
        "glibc": manifest.glibc,
        "python": manifest.python,
        "versions": {**dict(manifest.versions), **overview.stack},
        "gpu_architectures": {
            one: cards(one) for one in sorted(manifest.gpu_architectures or (), key=architecture_order)
        },
        "bytes": overview.stored,
        "unpacked_bytes": overview.unpacked,
        "needed_bytes": overview.needed,
        "needed_inodes": len(manifest.files),
        "entries": overview.kinds,
        "chunks": len(manifest.chunks),
        "packages": [{**package.to_json(), **_weight_data(overview.weight(package))} for package in manifest.packages],
        "unowned": [{"folder": weight.name, **_weight_data(weight)} for weight in overview.unowned],
        "data": [{"folder": weight.name, **_weight_data(weight)} for weight in overview.data],
        "checkouts": [{"source": source, "path": path} for source, path in overview.checkouts],
        "source_prefix": manifest.source_prefix,
        "relocations": [list(pair) for pair in manifest.relocations],
        "prefix_counts": {kind: len(entries) for kind, entries in overview.by_mark.items()},
        "prefix": [_marked_data(overview, entry) for entry in manifest.marked],
        "files": [entry.to_json(chunk=False) for entry in manifest.files],
        "notices": list(manifest.notices),
    }


def overview_text(
    overview: Overview, *, packages: bool = False, files: bool = False, prefix: bool = False, verified: bool = False
) -> str:
    """The text for users; the flags list all packages, all files, and all files that contain the prefix."""
    manifest = overview.manifest
    lines = [f"{manifest.name}: release {manifest.release_id}"]
    lines += line("digest", manifest.digest)
    lines += line("packed", f"{manifest.created} by clusterctl {manifest.tool}, format {manifest.format}")
    lines += line("verified", "every byte matches the manifest") if verified else []
    lines += line("runs on", _platform(overview))
    stack = ", ".join(f"{name} {version}" for name, version in overview.stack.items())
    lines += line("versions", stack or "no torch and no training library")
    lines += line("GPUs", *_cards(overview))
    lines += line("size", *_sizes(overview))
    lines += line("packages", *_packages(overview, LARGEST if not packages else len(manifest.packages)))
    folders = _rows(overview.unowned)
    lines += line("no package", *(folders if packages else some(folders, FEW, "--packages")))
    lines += line("data", *_rows(overview.data))
    lines += line("editable", *_editable(overview))
    lines += line("prefix", *_prefix(overview))
    lines += line("binaries", *_binaries(overview, None if prefix else FEW))
    lines += line("also as", *(old for old, new in manifest.relocations[:-1] if not new))
    lines += line("notices", *manifest.notices)
    if prefix:
        lines += [
            "",
            "files that contain the prefix",
            *columns((" ".join(sorted({mark.kind for mark in entry.marks})), entry.path) for entry in manifest.marked),
        ]
    if files:
        lines += ["", "files", *_all_files(manifest.files)]
    return "\n".join(lines)


def _all_files(entries: Sequence[Entry]) -> list[str]:
    words = ((size(entry.size) if entry.type == "file" else entry.type) for entry in entries)
    return columns((f"{entry.mode:03o}", word, _entry_text(entry)) for entry, word in zip(entries, words, strict=True))


def _platform(overview: Overview) -> str:
    manifest = overview.manifest
    glibc = f", glibc {manifest.glibc} or later" if manifest.glibc else ""
    return f"{manifest.platform}{glibc}; Python {manifest.python or 'of an unknown version'}"


def _cards(overview: Overview) -> list[str]:
    found = sorted(overview.manifest.gpu_architectures or (), key=architecture_order)
    if not found:
        cpu_only = "torch" in overview.stack and not overview.manifest.versions.get("cuda")
        return ["torch is built without CUDA"] if cpu_only else []
    return columns([(one, cards(one) or "not in this version's table") for one in found])


def _sizes(overview: Overview) -> list[str]:
    counted = [number(count, *_KINDS[kind]) for kind, count in overview.kinds.items() if count]
    inodes = len(overview.manifest.files)
    chunks = number(len(overview.manifest.chunks), "chunk")
    return [
        f"{size(overview.stored)} packed in {chunks}, {size(overview.unpacked)} unpacked",
        ", ".join(counted),
        f"a node needs {size(overview.needed)} and {inodes:,} inodes for it, in addition to its current release",
    ]


def _packages(overview: Overview, limit: int) -> list[str]:
    found = overview.manifest.packages
    kinds = {kind: sum(package.kind == kind for package in found) for kind in ("conda", "pypi", "editable")}
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    weighed = sorted(found, key=lambda package: (-_size(overview, package), package.name))
    rows = [(package.name, package.version, size(_size(overview, package))) for package in weighed[:limit]]
    more = len(found) - len(rows)
    return [
        f"{len(found)} ({counted})" if counted else "none",
        *(columns(rows) if rows else []),
        *([f"and {more:,} more (--packages)"] if more else []),
    ]


def _rows(weights: Sequence[Weight]) -> list[str]:
    return columns([(weight.name if weight.name != "/" else "(at the top)", size(weight.size)) for weight in weights])


def _editable(overview: Overview) -> list[str]:
    names = [
        f"{package.name} {package.version}" for package in overview.manifest.packages if package.kind == "editable"
    ]
    return [", ".join(names)] * bool(names) + [f"{source} is packed as {path}" for source, path in overview.checkouts]


def _prefix(overview: Overview) -> list[str]:
    counted = [number(len(entries), *_MARKS[kind]) for kind, entries in overview.by_mark.items()]
    held = f"{number(len(overview.manifest.marked), 'file')} with {size(overview.prefix_size)}"
    return [overview.manifest.source_prefix, f"{held}: {', '.join(counted)}" if counted else "no file contains it"]


def _binaries(overview: Overview, limit: int | None) -> list[str]:
    found = [
        f"{entry.path}: a prefix of up to {overview.room(entry)} bytes fits"
        for entry in sorted(overview.by_mark.get("binary", ()), key=lambda entry: (overview.room(entry), entry.path))
    ]
    return found if limit is None else some(found, limit, "--prefix")


def _size(overview: Overview, package: Package) -> int:
    weight = overview.weight(package)
    return weight.size if weight else 0


def _entry_text(entry: Entry) -> str:
    if entry.type == "dir":
        return f"{entry.path}/"
    return f"{entry.path} -> {entry.target}" if entry.target else entry.path


def _weight_data(weight: Weight | None) -> dict[str, int]:
    return {
        "files": weight.files if weight else 0,
        "bytes": weight.size if weight else 0,
        "compressed_bytes": weight.compressed if weight else 0,
    }


def _marked_data(overview: Overview, entry: Entry) -> dict[str, Any]:
    kinds = sorted({mark.kind for mark in entry.marks})
    room = {"room": overview.room(entry)} if "binary" in kinds else {}
    return {"path": entry.path, "kinds": kinds, **room}


CARDS: Mapping[str, str] = {
    "sm_50": "GTX 750",
    "sm_52": "M40, M60",
    "sm_60": "P100",
    "sm_61": "P40, P4, GTX 10",
    "sm_70": "V100",
    "sm_75": "T4, RTX 20",
    "sm_80": "A100, A800, A30",
    "sm_86": "A40, A10, A16, RTX 30",
    "sm_87": "Jetson Orin",
    "sm_89": "L40S, L40, L4, RTX 40",
    "sm_90": "H100, H800, H200, H20, GH200",
    "sm_100": "B200, GB200",
    "sm_103": "B300, GB300",
    "sm_110": "Jetson Thor",
    "sm_120": "RTX PRO 6000, RTX 50",
    "sm_121": "GB10",
}

_ARCHITECTURE = re.compile(r"sm_(\d+)[af]?\Z")


def cards(architecture: str) -> str:
    """The cards of ``sm_90`` or ``sm_90a``; empty for an architecture that is not in the table."""
    match = _ARCHITECTURE.match(architecture)
    return CARDS.get(f"sm_{match[1]}", "") if match else ""


def architecture_order(architecture: str) -> tuple[int, str]:
    """A key that sorts architectures by number."""
    match = _ARCHITECTURE.match(architecture)
    return (int(match[1]) if match else 0, architecture)
