"""The Python that runs this program, and where its parts lie."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from provision.errors import UsageError

LIBRARIES = "lib/clusterctl"
"""Where a carried tool keeps its shared libraries, below its folder."""


@dataclass(frozen=True)
class Interpreter:
    """A CPython. Its standard library is found relative to the program, as ``LIB/pythonX.Y``."""

    program: Path
    stdlib: Path
    extensions: tuple[Path, ...]  # lib-dynload; none where every module is linked into the program
    lib: str  # sys.platlibdir: "lib", on some distributions "lib64"
    version: str
    machine: str  # as uname -m says it
    libraries: tuple[Path, ...]  # folders that hold before the system's own: LD_LIBRARY_PATH, a carried tool's

    @property
    def home(self) -> str:
        """Where the standard library goes, below the tool's folder."""
        return f"{self.lib}/{self.stdlib.name}"

    @property
    def target(self) -> str:
        """Where the program goes, below the tool's folder."""
        return f"bin/{self.stdlib.name}"


def running() -> Interpreter:
    """The interpreter of this process, whoever built it: a distribution, conda, pyenv, uv, or ``pack-tool`` itself.

    Raises:
        UsageError: it is none that can be carried.
    """
    # sys.executable may be a link of a virtual environment, or a carried tool's script; the kernel knows the program.
    program = Path("/proc/self/exe").resolve()
    stdlib = Path(os.__file__).resolve().parent
    if sys.implementation.name != "cpython" or not (stdlib / "os.py").is_file():
        raise UsageError(
            f"{program} has no standard library in a folder, as CPython has it",
            hint="run clusterctl with CPython: python3 -m venv FOLDER && FOLDER/bin/pip install clusterctl",
        )
    folders = [Path(sys.base_prefix, LIBRARIES)]
    folders += [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return Interpreter(
        program=program,
        stdlib=stdlib,
        extensions=tuple(Path(folder) for folder in sys.path if Path(folder).name == "lib-dynload"),
        lib=sys.platlibdir,
        version=platform.python_version(),
        machine=platform.machine(),
        libraries=tuple(folders),
    )
