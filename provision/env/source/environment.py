"""Find a conda environment; its packages and the package of each file; its platform and versions for the manifest."""

from __future__ import annotations

import csv
import os
import platform as host
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from provision.env.bundle.manifest import PACKAGE_FILE, Package
from provision.env.source import elf
from provision.errors import UsageError
from trainer.agent.contract.untrusted import parse_object


def find_env(spec: str | None, environ: Mapping[str, str]) -> Path:
    """The prefix of an environment.

    Args:
        spec: a path (with a slash, or an existing folder), the name of a conda environment, or None for the active one.
        environ: environment variables.

    Returns:
        An absolute path. Symlinks in it stay, since the environment's files may contain it that way.

    Raises:
        UsageError: there is no such environment, or it cannot be packed.
    """
    if spec is None:
        active = environ.get("CONDA_PREFIX")
        if not active:
            raise UsageError(
                "no environment is active (CONDA_PREFIX is not set)",
                hint="activate one (conda activate NAME) or pass it: clusterctl pack-env NAME_OR_PATH",
            )
        return check_environment(Path(active))
    if "/" in spec or _is_folder(spec):
        return check_environment(Path(os.path.abspath(_expand_user(spec))))  # noqa: PTH100 - resolve() would follow links
    known = list(known_envs(environ))
    for prefix in known:
        if prefix.name == spec:
            return check_environment(prefix)
    if spec == "base":
        for root in _roots(environ):
            if _is_folder(root / "conda-meta"):
                return check_environment(root)
    names = ", ".join(sorted({prefix.name for prefix in known})) or "none"
    raise UsageError(
        f"there is no conda environment named {spec!r}; known: {names}",
        hint="or pass its path: clusterctl pack-env /path/to/env",
    )


def known_envs(environ: Mapping[str, str]) -> Iterator[Path]:
    """Every environment that conda or mamba finds, in their search order."""
    seen: set[Path] = set()
    for prefix in _candidates(environ):
        if prefix not in seen and _is_folder(prefix / "conda-meta"):
            seen.add(prefix)
            yield prefix


def check_environment(prefix: Path) -> Path:
    """Check that ``prefix`` is an environment with an executable Python, and return it.

    Raises:
        UsageError: it is not, or it cannot be read.
    """
    try:
        return _check(prefix)
    except OSError as error:
        raise UsageError(
            f"cannot read {prefix}: {(error.strerror or str(error)).lower()}",
            hint="ask its owner for permission, or pack as a user who has it",
        ) from error


def _check(prefix: Path) -> Path:
    if not prefix.is_dir():
        raise UsageError(f"{prefix} is not a folder", hint="conda env list shows the environments")
    if not (prefix / "conda-meta").is_dir():
        raise UsageError(
            f"{prefix} is not a conda environment: it has no conda-meta folder",
            hint="conda env list shows the environments; build a venv again with conda",
        )
    python = prefix / "bin" / "python"
    if not python.exists():
        raise UsageError(f"{prefix} has no bin/python", hint=f"install it: conda install -p {prefix} python")
    if not os.access(python, os.X_OK):
        raise UsageError(f"{python} is not executable", hint=f"chmod +x {python}")
    return prefix


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    folders = [
        Path(_expand_user(folder))
        for variable in ("CONDA_ENVS_PATH", "CONDA_ENVS_DIRS")
        for folder in environ.get(variable, "").split(os.pathsep)
        if folder
    ]
    folders += [root / "envs" for root in _roots(environ)]
    home = environ.get("HOME")
    if home:
        folders.append(Path(home) / ".conda" / "envs")
    for folder in folders:
        with suppress(OSError):  # missing, or not readable by this user
            yield from sorted(path for path in folder.iterdir() if _is_folder(path))
    if home:
        yield from _registered_environments(Path(home) / ".conda" / "environments.txt")


def _registered_environments(path: Path) -> Iterator[Path]:
    try:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    yield from (Path(line.strip()) for line in lines if line.strip().startswith("/"))


def _roots(environ: Mapping[str, str]) -> Iterator[Path]:
    """The installations of conda and mamba: the folders that hold ``envs``."""
    if root := environ.get("MAMBA_ROOT_PREFIX"):
        yield Path(root)
    if program := environ.get("CONDA_EXE"):
        yield Path(program).parent.parent
    if active := environ.get("CONDA_PREFIX"):
        prefix = Path(active)
        yield prefix.parent.parent if prefix.parent.name == "envs" else prefix


def _is_folder(path: str | Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - False without permission


def _expand_user(path: str) -> str:
    return os.path.expanduser(path)  # noqa: PTH111 - Path.expanduser raises for an unknown user


# --- packages, and the package of each file -------------------------------------------------------

_METADATA = re.compile(r"(?P<name>.+)-(?P<version>[^-]+)\.(?:dist-info|egg-info)\Z")
_SITE = re.compile(r"(lib/python[^/]+/site-packages)(?:/|\Z)")

# PEP 3147 and PEP 488: name.cpython-311.pyc, name.cpython-311.opt-1.pyc; a module's own name may hold dots.
_COMPILED = re.compile(
    r"(?P<folder>(?:.*/)?)__pycache__/(?P<name>[^/]+?)\.[A-Za-z]+-?\d+(?:\.opt-\w+)?\.pyc\Z", re.DOTALL
)


@dataclass(frozen=True)
class Owners:
    """Packages, the owner of each path that a package lists, and the placeholder lengths of binaries from conda."""

    packages: tuple[Package, ...] = ()
    by_path: Mapping[str, str] = field(default_factory=dict)
    rooms: Mapping[str, int] = field(default_factory=dict)

    def owner(self, path: str) -> str:
        """The package that ``path`` belongs to, or a folder (ending in a slash) for a file without a package."""
        if known := self.by_path.get(path):
            return known
        source = source_of(path)
        return self.by_path.get(source) or _folder_of(source)


def find_owners(prefix: Path, paths: Iterable[str], *, editable: Iterable[str] = ()) -> Owners:
    """Read ``conda-meta`` and every ``RECORD``.

    Args:
        prefix: the environment.
        paths: every path in it.
        editable: the dist-info folders of editable installs.
    """
    by_path: dict[str, str] = {}
    rooms: dict[str, int] = {}
    packages: dict[tuple[str, str], Package] = {}
    editables = set(editable)
    records = []
    for path in paths:
        if path.startswith("conda-meta/") and path.endswith(".json"):
            for package, files, found in read_conda_package(prefix / path):
                packages[package.name, "conda"] = package
                by_path |= dict.fromkeys([path, *files], package.name)
                rooms |= found
        elif path.endswith((".dist-info/METADATA", ".egg-info/PKG-INFO")):
            records.append(posixpath.dirname(path))
    for folder in records:
        match = _METADATA.match(posixpath.basename(folder))
        owned_by_conda = folder + "/METADATA" in by_path or folder + "/PKG-INFO" in by_path
        if match is None or owned_by_conda or not _SITE.match(folder):
            continue
        name = normalized(match["name"])
        kind = "editable" if folder in editables else "pypi"
        packages[name, "pypi"] = Package(name, match["version"], kind)  # type: ignore[arg-type] # one of two literals
        for path in _record(prefix, folder):
            by_path.setdefault(path, name)
    return Owners(tuple(packages[key] for key in sorted(packages)), by_path, rooms)


def normalized(name: str) -> str:
    """A distribution's name as PyPI compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def site_packages(paths: Iterable[str]) -> tuple[str, ...]:
    """The ``site-packages`` folders of an environment."""
    return tuple(sorted({match[1] for path in paths if (match := _SITE.match(path))}))


def read_conda_package(path: Path) -> Iterator[tuple[Package, list[str], dict[str, int]]]:
    """The package of a ``conda-meta`` file, its files, and the placeholder lengths of its binaries."""
    try:
        data = parse_object(path.read_bytes(), limit=PACKAGE_FILE)
        package = Package(str(data["name"]), str(data["version"]), "conda")
        listed = [str(file) for file in data.get("files", [])]
        rooms = {
            str(one["_path"]): len(os.fsencode(str(one["prefix_placeholder"])))
            for one in (data.get("paths_data") or {}).get("paths", [])
            if one.get("file_mode") == "binary" and one.get("prefix_placeholder")
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # not a package, or one that conda cannot read either: its files are grouped by folder
    yield package, listed, rooms


def _record(prefix: Path, folder: str) -> Iterator[str]:
    """The paths that a dist-info folder's RECORD lists, and those of the folder itself."""
    site = posixpath.dirname(folder)
    for name in ("RECORD", "METADATA", "direct_url.json", "INSTALLER", "PKG-INFO"):
        yield f"{folder}/{name}"
    try:
        text = (prefix / folder / "RECORD").read_text(encoding="utf-8", errors="surrogateescape")
        if '"' in text:
            names = [row[0] for row in csv.reader(text.splitlines()) if row]
        else:  # nearly always, and several times faster
            names = [line.partition(",")[0] for line in text.splitlines()]
    except (OSError, csv.Error):
        return
    yield from (record_path(name, site, str(prefix)) for name in names if name)


def record_path(name: str, site: str, prefix: str) -> str:
    """A name in a RECORD, as a path relative to the prefix."""
    if name and not name.startswith((".", "/")) and not name.endswith("/") and "/." not in name and "//" not in name:
        return f"{site}/{name}"  # nearly always
    path = posixpath.normpath(posixpath.join(prefix, site, name))
    return path[len(prefix) + 1 :] if path.startswith(prefix + "/") else path


def is_record(path: str) -> bool:
    """Whether a file lists hashes of others: a RECORD, or a package's file in ``conda-meta``."""
    if not path.endswith(("/RECORD", ".json")):
        return False
    folder, name = posixpath.split(path)
    return (name == "RECORD" and folder.endswith(".dist-info")) or (folder == "conda-meta" and name.endswith(".json"))


def source_of(path: str) -> str:
    """The .py file that a .pyc file was compiled from; the path itself for any other file."""
    if not path.endswith(".pyc"):
        return path
    match = _COMPILED.match(path)
    return f"{match[1]}{match[2]}.py" if match else path[:-1]


def _folder_of(path: str) -> str:
    """The folder of a file without a package: a package folder, checkout, top folder, or ``/`` at the top."""
    parts = path.split("/")
    depth = 4 if _SITE.match(path) else 2 if parts[0] in ("src", "lib") else 1
    return "/".join(parts[:-1][:depth]) + "/"


# --- facts for the manifest -----------------------------------------------------------------------

_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", re.MULTILINE)
_PYTHON = re.compile(r"lib/python(\d+\.\d+)/")
_NCCL = re.compile(r"nvidia-nccl(?:-cu\d+)?\Z|nccl\Z")
_ARCHITECTURE = re.compile(rb"sm_\d{2,3}[af]?(?=[ ,;\0\]])")

_BEFORE = (b"", b" ", b"=", b"\0")  # a separate word, or nvcc's ``code=sm_90``
_TORCH_LIBRARIES = ("libtorch_cuda", "libtorch_python")


def find_platform(prefix: Path) -> str:
    """Conda's name for the platform of the environment's Python, such as ``linux-64``.

    Raises:
        UsageError: the Python cannot be read.
    """
    python_version = prefix / "bin" / "python"
    try:
        with python_version.open("rb") as file:
            found = elf.platform(file.read(64))
    except OSError as error:
        raise UsageError(f"cannot read {python_version}: {(error.strerror or str(error)).lower()}") from error
    machine = host.machine()
    return found or f"linux-{'64' if machine == 'x86_64' else machine}"


def python_version(packages: Iterable[Package], paths: Iterable[str]) -> str:
    """The version of Python: from conda, else major and minor version from the folder's name."""
    for package in packages:
        if package.name == "python" and package.kind == "conda":
            return package.version
    return next((match[1] for path in paths if (match := _PYTHON.match(path))), "")


def stack_versions(prefix: Path, packages: Iterable[Package], sites: Iterable[str]) -> dict[str, str | None]:
    """Versions of the packages that training needs; None for missing ones."""
    found = {package.name: package.version for package in packages}
    torch = found.get("torch") or found.get("pytorch")
    nccl = next((version for name, version in found.items() if _NCCL.match(name)), None)
    return {
        "torch": torch,
        "deepspeed": found.get("deepspeed"),
        "llamafactory": found.get("llamafactory"),
        "cuda": next((cuda for site in sites if (cuda := _cuda_version(prefix / site / "torch" / "version.py"))), None),
        "nccl": nccl,
    }


def has_architectures(path: str) -> bool:
    """Whether a path is a library of torch that names the GPU architectures it was compiled for."""
    if "/torch/lib/" not in path:
        return False
    folder, _, name = path.rpartition("/")
    return folder.endswith("/torch/lib") and name.startswith(_TORCH_LIBRARIES)


def find_architectures(data: bytes | memoryview) -> frozenset[str]:
    """The GPU architectures that a library's build flags name, such as ``sm_90``."""
    return frozenset(
        match[0].decode()
        for match in _ARCHITECTURE.finditer(data)
        if data[max(0, match.start() - 1) : match.start()] in _BEFORE
    )


def missing_facts(found: Mapping[str, str | None], compiled: Iterable[str] | None) -> tuple[str, ...]:
    """A notice for each fact that is missing."""
    if found.get("cuda") and compiled is None:
        return ("the GPU architectures that torch was compiled for are not in its libraries",)
    return ()


def _cuda_version(path: Path) -> str | None:
    try:
        match = _CUDA.search(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return match[1] if match else None
