"""Find a conda environment by path or name, or the active one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from provision.errors import UsageError


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
        return check_environment(Path(os.path.abspath(_expanded(spec))))  # noqa: PTH100 - resolve() would follow links
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
        Path(_expanded(folder))
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
        yield from _listed(Path(home) / ".conda" / "environments.txt")


def _listed(path: Path) -> Iterator[Path]:
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


def _expanded(path: str) -> str:
    return os.path.expanduser(path)  # noqa: PTH111 - Path.expanduser raises for an unknown user
