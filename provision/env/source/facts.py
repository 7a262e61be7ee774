"""Facts about an environment for its manifest: platform, versions, GPU architectures."""

from __future__ import annotations

import platform as host
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from provision.env.bundle.manifest import Package
from provision.env.source import elf
from provision.errors import UsageError

_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", re.MULTILINE)
_PYTHON = re.compile(r"lib/python(\d+\.\d+)/")
_NCCL = re.compile(r"nvidia-nccl(?:-cu\d+)?\Z|nccl\Z")
_ARCHITECTURE = re.compile(rb"sm_\d{2,3}[af]?(?=[ ,;\0\]])")

_BEFORE = (b"", b" ", b"=", b"\0")  # a separate word, or nvcc's ``code=sm_90``
_TORCH_LIBRARIES = ("libtorch_cuda", "libtorch_python")


def platform(prefix: Path) -> str:
    """Conda's name for the platform of the environment's Python, such as ``linux-64``.

    Raises:
        UsageError: the Python cannot be read.
    """
    python = prefix / "bin" / "python"
    try:
        with python.open("rb") as file:
            found = elf.platform(file.read(64))
    except OSError as error:
        raise UsageError(f"cannot read {python}: {(error.strerror or str(error)).lower()}") from error
    machine = host.machine()
    return found or f"linux-{'64' if machine == 'x86_64' else machine}"


def python(packages: Iterable[Package], paths: Iterable[str]) -> str:
    """The version of Python: from conda, else major and minor version from the folder's name."""
    for package in packages:
        if package.name == "python" and package.kind == "conda":
            return package.version
    return next((match[1] for path in paths if (match := _PYTHON.match(path))), "")


def versions(prefix: Path, packages: Iterable[Package], sites: Iterable[str]) -> dict[str, str | None]:
    """Versions of the packages that training needs; None for missing ones."""
    found = {package.name: package.version for package in packages}
    torch = found.get("torch") or found.get("pytorch")
    nccl = next((version for name, version in found.items() if _NCCL.match(name)), None)
    return {
        "torch": torch,
        "deepspeed": found.get("deepspeed"),
        "llamafactory": found.get("llamafactory"),
        "cuda": next((cuda for site in sites if (cuda := _cuda(prefix / site / "torch" / "version.py"))), None),
        "nccl": nccl,
    }


def has_architectures(path: str) -> bool:
    """Whether a path is a library of torch that names the GPU architectures it was compiled for."""
    if "/torch/lib/" not in path:
        return False
    folder, _, name = path.rpartition("/")
    return folder.endswith("/torch/lib") and name.startswith(_TORCH_LIBRARIES)


def architectures(data: bytes | memoryview) -> frozenset[str]:
    """The GPU architectures that a library's build flags name, such as ``sm_90``."""
    return frozenset(
        match[0].decode()
        for match in _ARCHITECTURE.finditer(data)
        if data[max(0, match.start() - 1) : match.start()] in _BEFORE
    )


def notices(found: Mapping[str, str | None], compiled: Iterable[str] | None) -> tuple[str, ...]:
    """A notice for each fact that is missing."""
    if found.get("cuda") and compiled is None:
        return ("the GPU architectures that torch was compiled for are not in its libraries",)
    return ()


def _cuda(path: Path) -> str | None:
    try:
        match = _CUDA.search(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return match[1] if match else None
