"""An overview of a bundle, as one mapping for ``--json`` and as text of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from provision.env.bundle.manifest import Entry, Package
from provision.env.report.gpus import cards, order
from provision.env.report.overview import Overview, Weight
from provision.env.report.words import columns, line, number, size, some

LARGEST = 10  # packages that are named without --packages
FEW = 10  # of anything else

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


def overview_data(overview: Overview) -> dict[str, Any]:
    """Everything, for programs. Sizes in bytes."""
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
        "gpu_architectures": {one: cards(one) for one in sorted(manifest.gpu_architectures or (), key=order)},
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
    """What a person reads; the flags list all packages, all files, and all that holds the prefix."""
    manifest = overview.manifest
    lines = [f"{manifest.name}: release {manifest.release_id}"]
    lines += line("digest", manifest.digest)
    lines += line("packed", f"{manifest.created} by clusterctl {manifest.tool}, format {manifest.format}")
    lines += line("verified", "every byte is what the manifest says") if verified else []
    lines += line("runs on", _platform(overview))
    stack = ", ".join(f"{name} {version}" for name, version in overview.stack.items())
    lines += line("versions", stack or "neither torch nor anything that trains")
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
        lines += ["", "what holds the prefix", *_all_marked(manifest.marked)]
    if files:
        lines += ["", "files", *_all_files(manifest.files)]
    return "\n".join(lines)


def _all_marked(entries: Sequence[Entry]) -> list[str]:
    return columns((" ".join(sorted({mark.kind for mark in entry.marks})), entry.path) for entry in entries)


def _all_files(entries: Sequence[Entry]) -> list[str]:
    words = ((size(entry.size) if entry.type == "file" else entry.type) for entry in entries)
    return columns((f"{entry.mode:03o}", word, _named(entry)) for entry, word in zip(entries, words, strict=True))


def _platform(overview: Overview) -> str:
    manifest = overview.manifest
    glibc = f", glibc {manifest.glibc} or later" if manifest.glibc else ""
    return f"{manifest.platform}{glibc}; Python {manifest.python or 'of an unknown version'}"


def _cards(overview: Overview) -> list[str]:
    found = sorted(overview.manifest.gpu_architectures or (), key=order)
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
        f"a node needs {size(overview.needed)} and {inodes:,} inodes for it, beside the release it has",
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
    return [", ".join(names)] * bool(names) + [f"{source} travels as {path}" for source, path in overview.checkouts]


def _prefix(overview: Overview) -> list[str]:
    counted = [number(len(entries), *_MARKS[kind]) for kind, entries in overview.by_mark.items()]
    held = f"{number(len(overview.manifest.marked), 'file')} with {size(overview.prefix_size)}"
    return [overview.manifest.source_prefix, f"{held}: {', '.join(counted)}" if counted else "no file holds it"]


def _binaries(overview: Overview, limit: int | None) -> list[str]:
    found = [
        f"{entry.path}: a prefix of up to {overview.room(entry)} bytes fits"
        for entry in sorted(overview.by_mark.get("binary", ()), key=lambda entry: (overview.room(entry), entry.path))
    ]
    return found if limit is None else some(found, limit, "--prefix")


def _size(overview: Overview, package: Package) -> int:
    weight = overview.weight(package)
    return weight.size if weight else 0


def _named(entry: Entry) -> str:
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
