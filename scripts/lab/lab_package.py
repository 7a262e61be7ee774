"""Conda packages made from folders and wheels, a channel of them, and an environment installed from it by rattler.

Formats: https://docs.conda.io/projects/conda-build/en/stable/resources/package-spec.html
"""

import asyncio
import configparser
import contextlib
import csv
import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import zstandard

NOARCH_PYTHON = {"noarch": "python"}


@dataclass(frozen=True)
class Package:
    """What info/index.json says."""

    name: str
    version: str
    subdir: str
    depends: tuple[str, ...] = ()
    extra: dict[str, object] = field(default_factory=dict)
    build: str = "0"

    @property
    def file_name(self) -> str:
        return f"{self.name}-{self.version}-{self.build}.conda"

    def index(self) -> dict[str, object]:
        facts = {"name": self.name, "version": self.version, "build": self.build, "build_number": 0}
        return {**facts, "depends": list(self.depends), "subdir": self.subdir, "timestamp": 0, **self.extra}


def paths_json(tree: Path, placeholder: str) -> dict[str, object]:
    """What info/paths.json says of the files in `tree`.

    Text files that hold `placeholder` are declared; binary ones never are: a linker shares the tails of strings, so
    that a rewritten prefix can destroy an unrelated one.
    """
    entries = []
    for path in sorted(tree.rglob("*")):
        entry: dict[str, object] = {"_path": path.relative_to(tree).as_posix()}
        if path.is_symlink():
            entry["path_type"] = "softlink"
        elif path.is_file():
            data = path.read_bytes()
            entry |= {"path_type": "hardlink", "sha256": hashlib.sha256(data).hexdigest(), "size_in_bytes": len(data)}
            if placeholder.encode() in data and _is_text(data):
                entry |= {"file_mode": "text", "prefix_placeholder": placeholder}
        else:
            continue
        entries.append(entry)
    return {"paths": entries, "paths_version": 1}


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def write(
    package: Package, tree: Path, channel: Path, *, placeholder: str, info: dict[str, object] | None = None
) -> Path:
    """Writes `tree` as a package into the channel; `info` has more members of info/, by name."""
    paths = paths_json(tree, placeholder)
    names = [entry["_path"] for entry in paths["paths"]]
    members = {"index.json": package.index(), "paths.json": paths, **(info or {})}
    about = {f"info/{name}": json.dumps(value, indent=1).encode() for name, value in members.items()}
    about["info/files"] = "".join(f"{name}\n" for name in names).encode()

    stem = package.file_name.removesuffix(".conda")
    target = channel / package.subdir / package.file_name
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("metadata.json", json.dumps({"conda_pkg_format_version": 2}))
        with archive.open(f"info-{stem}.tar.zst", "w") as member, _tar(member) as tar:
            for name, data in about.items():
                header = tarfile.TarInfo(name)
                header.size = len(data)
                tar.addfile(header, io.BytesIO(data))
        with archive.open(f"pkg-{stem}.tar.zst", "w", force_zip64=True) as member, _tar(member) as tar:
            for name in names:
                tar.add(tree / name, name, recursive=False, filter=_owned_by_root)
    return target


@contextlib.contextmanager
def _tar(raw: IO[bytes]) -> Iterator[tarfile.TarFile]:
    """A tar stream through zstd into `raw`."""
    with (
        zstandard.ZstdCompressor(level=1).stream_writer(raw, closefd=False) as compressed,
        tarfile.open(fileobj=compressed, mode="w|") as tar,
    ):
        yield tar


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def from_wheel(wheel: Path, scratch: Path, channel: Path, *, placeholder: str) -> Path:
    """A `noarch: python` package of a pure Python wheel; rattler makes its programs."""
    name, version = wheel.name.split("-")[:2]
    tree = scratch / name
    packages = tree / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    about = next(packages.glob("*.dist-info"))
    (about / "INSTALLER").write_text("conda\n")
    with (about / "RECORD").open("a", newline="") as record:
        csv.writer(record, lineterminator="\n").writerow([f"{about.name}/INSTALLER", "", ""])
    points = configparser.ConfigParser(delimiters=("=",))
    points.optionxform = str
    if (about / "entry_points.txt").exists():
        points.read(about / "entry_points.txt")
    scripts = dict(points["console_scripts"]) if points.has_section("console_scripts") else {}
    link = {
        "noarch": {"type": "python", "entry_points": [f"{script} = {what}" for script, what in scripts.items()]},
        "package_metadata_version": 1,
    }
    package = Package(name.lower(), version, "noarch", ("python",), NOARCH_PYTHON)
    return write(package, tree, channel, placeholder=placeholder, info={"link.json": link})


def create(channel: Path, specs: list[str], prefix: Path, cache: Path, subdir: str) -> list[str]:
    """Indexes the channel, solves `specs` and installs them at `prefix`; returns `name=version`s."""
    return asyncio.run(_create(channel.absolute(), specs, prefix, cache, subdir))


async def _create(channel: Path, specs: list[str], prefix: Path, cache: Path, subdir: str) -> list[str]:
    # here, so that tests of the rest need no rattler
    from rattler import Channel, Gateway, Subdir, install, solve  # noqa: PLC0415
    from rattler.index import index_fs  # noqa: PLC0415

    await index_fs(channel)
    # Nothing of it is kept beyond the environment's own folder: a gateway's default cache is the user's.
    records = await solve(
        [Channel(channel.as_uri())],
        specs,
        gateway=Gateway(cache_dir=cache / "repodata"),
        platforms=[subdir, "noarch"],
    )
    await install(records, prefix, cache_dir=cache, show_progress=False, platform=Subdir(subdir))
    return [f"{record.name.normalized}={record.version}" for record in records]


def stand_in_wheel(name: str, version: str, folder: Path, *, module: bool) -> Path:
    """A wheel that replaces `name`: an empty module of that name, or metadata alone."""
    about = f"{name}-{version}.dist-info"
    summary = f"Stand-in: the real {name} has no build for this torch without CUDA. Rehearsals only."
    members = {f"{name}/__init__.py": f'"""{summary}"""\n\n__version__ = "{version}"\n'} if module else {}
    members[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n"
    members[f"{about}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: clusterctl\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    members[f"{about}/RECORD"] = "".join(f"{member},,\n" for member in [*members, f"{about}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    return wheel
