"""What a person wants to know of a bundle before carrying it over."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property

from provision.env.bundle.manifest import FOLDERS, Entry, Manifest, Package
from provision.env.release.examine import space
from provision.env.source.data import FOLDER

# What a training run rests on, in the order in which people ask. CUDA and NCCL are named with torch.
STACK = ("torch", "deepspeed", "llamafactory", "transformers", "accelerate", "peft", "trl", "datasets")


def is_data(package: str) -> bool:
    """Whether what a chunk belongs to is data that travel with the environment: ``data/NAME/``."""
    return package.startswith(f"{FOLDER}/") and package.count("/") == 2


@dataclass(frozen=True)
class Weight:
    """A package, or a folder of files that no package owns: what it has in chunks. Sizes in bytes."""

    name: str
    files: int
    size: int
    compressed: int


@dataclass(frozen=True)
class Overview:
    """A bundle, as its manifest describes it.

    Attributes:
        manifest: the manifest.
        stored: bytes of the bundle on disk.
    """

    manifest: Manifest
    stored: int

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Packages and folders, the largest first. Files that hold the prefix are in none: see ``prefix_size``."""
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
        """What a package weighs; None if all of its files hold the prefix or are another's."""
        return self._by_name.get(package.name)

    @cached_property
    def _by_name(self) -> dict[str, Weight]:
        return {weight.name: weight for weight in self.weights}

    @property
    def data(self) -> tuple[Weight, ...]:
        """Data that travel with the environment, the largest first."""
        return tuple(weight for weight in self.weights if is_data(weight.name))

    @property
    def unowned(self) -> tuple[Weight, ...]:
        """Folders of files that no package owns, the largest first."""
        return tuple(weight for weight in self.weights if weight.name.endswith("/") and not is_data(weight.name))

    @property
    def stack(self) -> dict[str, str]:
        """Versions of what a training run rests on, as far as the environment has it."""
        versions = {package.name: package.version for package in self.manifest.packages}
        versions |= {name: version for name, version in self.manifest.versions.items() if version}
        return {name: versions[name] for name in (*STACK, "cuda", "nccl") if name in versions}

    @property
    def checkouts(self) -> tuple[tuple[str, str], ...]:
        """Editable installs: where each checkout was, and where it goes."""
        return tuple((source, target) for source, target in self.manifest.relocations if target)

    @property
    def kinds(self) -> dict[str, int]:
        """How many files, links, hard links and folders there are."""
        counted = Counter(entry.type for entry in self.manifest.files)
        return {kind: counted[kind] for kind in ("file", "link", "hard", "dir")}

    @property
    def unpacked(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.manifest.files)

    @property
    def needed(self) -> int:
        """Bytes that a node's file system needs: every file and folder takes whole blocks."""
        return space({entry.path: entry.size for entry in self.manifest.files if entry.type in ("file", "dir")})

    @property
    def prefix_size(self) -> int:
        """Bytes of the files that hold the prefix and are in no package's chunk."""
        return sum(entry.size for entry in self.manifest.rewritable)

    @cached_property
    def by_mark(self) -> dict[str, tuple[Entry, ...]]:
        """What holds the prefix, by how: an entry that holds it in several ways is in several."""
        found: defaultdict[str, list[Entry]] = defaultdict(list)
        for entry in self.manifest.marked:
            for kind in sorted({mark.kind for mark in entry.marks}):
                found[kind].append(entry)
        return {kind: tuple(found[kind]) for kind in ("shebang", "text", "binary", "link", "record") if kind in found}

    def room(self, entry: Entry) -> int:
        """The longest prefix in bytes that fits into a binary that holds it."""
        reserved = max(mark.room for mark in entry.marks)
        return reserved or len(self.manifest.source_prefix.encode("utf-8", "surrogateescape"))
