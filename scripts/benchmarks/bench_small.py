#!/usr/bin/env python3
"""Makes FOLDER/env: a small real conda environment with compiled files, an editable project and, if asked, much data.

    bench_small.py FOLDER [--data BYTES]

The data do not compress: a package `weights` of 8 MiB files, the same bytes every time. Prints what was made as JSON.
"""

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "lab"))

from lab_run import Log
from small_env import build_small

FILE = 8 << 20
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "project"
version = "0.1"
"""


def make(folder: Path, data: int) -> dict[str, str]:
    small = build_small()
    prefix, checkout = folder / "env", folder / "src" / "project"
    small.make(prefix)
    site = prefix / small.site
    small.install(prefix, "hatchling", "editables")
    _project(checkout)
    small.install(prefix, "--no-deps", "-e", checkout)
    if data:
        _weights(site, data)
    Log(folder / "build.log").run([prefix / "bin/python", "-m", "compileall", "-q", prefix / "lib"])
    return {
        "prefix": str(prefix),
        "checkout": str(checkout),
        "changed": f"{small.site}/hatchling/__about__.py",
    }


def _project(checkout: Path) -> None:
    package = checkout / "project"
    package.mkdir(parents=True)
    (checkout / "pyproject.toml").write_text(PROJECT)
    (package / "__init__.py").write_text("NAME = 'project'\n")


def _weights(site: Path, size: int) -> None:
    info = site / "weights-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weights\nVersion: 1.0\n")
    (site / "weights").mkdir()
    names = []
    for number, begin in enumerate(range(0, size, FILE)):
        names.append(f"weights/{number:03}.bin")
        (site / names[-1]).write_bytes(random.Random(number).randbytes(min(FILE, size - begin)))
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in (*names, f"{info.name}/METADATA")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=int, default=0, metavar="BYTES")
    arguments = parser.parse_args()
    print(json.dumps(make(arguments.folder.absolute(), arguments.data)))


if __name__ == "__main__":
    main()
