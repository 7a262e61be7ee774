"""The environments that are measured, and the same environments changed: patched, rebuilt, with a large file inside.

Those of the cache are never written to. What is changed is an overlay over the environment's own prefix, or a second
build in its place, inside a mount namespace: the prefix stays the same, which every relocated file depends on.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_measure import BenchError, run

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "lab" / "build.py"
SMALL = HERE / "bench_small.py"

# In a private namespace: no other process sees the mount, and it disappears with the command.
_ALONE = ("unshare", "--mount", "--propagation", "private", "sh", "-euc")
_OVERLAY = 'mount -t overlay overlay -o "lowerdir=$1,upperdir=$2,workdir=$3" "$1"; shift 3; exec "$@"'
_BIND = 'mount --bind "$2" "$1"; shift 2; exec "$@"'

_PATCH = """
import py_compile, sys
path = sys.argv[1]
with open(path, "a") as file:
    file.write("\\nBENCHMARK = 'changed'\\n")
py_compile.compile(path, doraise=True)
"""


@dataclass(frozen=True)
class Env:
    """An environment at ``prefix`` with the checkout that is installed editable into it.

    ``home`` is the folder in which ``build`` makes it again, at the same path. ``changed`` is a module of a small
    package, relative to the prefix.
    """

    name: str
    prefix: Path
    checkout: Path
    home: Path
    build: tuple[str, ...]
    changed: str

    def in_place_of(self, scratch: Path) -> list[str]:
        """The words before a command that finds the folder ``scratch`` at ``home``."""
        return [*_ALONE, _BIND, "sh", str(self.home), str(scratch)]

    def overlaid(self, layer: Path) -> list[str]:
        """The words before a command that sees, and may change, the environment; changes stay in ``layer``."""
        for name in ("upper", "work"):
            (layer / name).mkdir(parents=True, exist_ok=True)
        return [*_ALONE, _OVERLAY, "sh", str(self.prefix), str(layer / "upper"), str(layer / "work")]

    def rebuild(self, scratch: Path) -> list[str]:
        """Builds it again from the same packages; returns the words before a command that sees that build.

        Raises:
            BenchError: it cannot be built, for example without a package index.
        """
        scratch.mkdir()
        place = self.in_place_of(scratch)
        run([*place, *self.build])
        return place

    def patch(self, layer: Path) -> list[str]:
        """Changes one module of a small package and compiles it; returns the words before a command that sees it."""
        place = self.overlaid(layer)
        run([*place, self.prefix / "bin/python", "-I", "-c", _PATCH, self.prefix / self.changed])
        return place

    def with_large_file(self, layer: Path, size: int) -> list[str]:
        """Puts a file that does not compress into it; returns the words before a command that sees it."""
        place = self.overlaid(layer)
        folder = layer / "upper" / "share"
        folder.mkdir()
        with (folder / "model.safetensors").open("wb") as file:
            for _ in range(size >> 20):
                file.write(os.urandom(1 << 20))
        return place


def lab(variant: str) -> Env:
    """The rehearsal environment of scripts/lab, ``cpu`` or ``cuda``; built when it is not in the cache."""
    build = (sys.executable, str(BUILD), "--variant", variant, "--json")
    report = json.loads(run(build).out)
    prefix = Path(report["prefix"])
    site = next(prefix.glob("lib/python3*/site-packages/peft/import_utils.py"))
    versions = " ".join(f"{name} {report['versions'][name]}" for name in ("torch", "deepspeed", "llamafactory"))
    return Env(
        name=f"{variant}: {versions}",
        prefix=prefix,
        checkout=Path(report["checkout"]),
        home=prefix.parents[2],
        build=build,
        changed=str(site.relative_to(prefix)),
    )


def small(home: Path, *, data: int = 0, name: str = "small") -> Env:
    """A small environment in the new folder ``home``, with ``data`` bytes of a package that does not compress."""
    home.mkdir()
    build = (sys.executable, str(SMALL), str(home), "--data", str(data))
    report = json.loads(run(build).out)
    prefix, checkout = Path(report["prefix"]), Path(report["checkout"])
    return Env(name, prefix, checkout, home, build, report["changed"])


def describe(paths: Sequence[Path]) -> str:
    """Bytes and number of everything below ``paths``, for people."""
    total = count = 0
    for top in paths:
        for folder, folders, files in os.walk(top):
            count += len(folders) + len(files)
            total += sum(Path(folder, name).lstat().st_size for name in files)
    if not count:
        raise BenchError(f"nothing in {', '.join(map(str, paths))}")
    return f"{total / 1e9:.2f} GB in {count:,} files, folders and links"
