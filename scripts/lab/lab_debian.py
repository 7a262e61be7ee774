"""Undoing Debian's patches in a copy of its Python.

Debian's own interpreter installs into `local/lib/pythonX.Y/dist-packages` and looks for packages in `dist-packages`,
unless it runs in a virtual environment. The copy is none and must behave like everybody else's Python.
"""

from pathlib import Path

from lab_run import LabError

# The marker that forbids pip, Debian's hooks into distutils, and a link to a file in /etc.
REMOVED = ("EXTERNALLY-MANAGED", "_distutils_system_mod.py", "sitecustomize.py")


def is_debian(stdlib: Path) -> bool:
    return "deb_system" in _module(stdlib, "sysconfig").read_text()


def undo(stdlib: Path, program: Path) -> None:
    """Changes the copied standard library and interpreter in place.

    Raises:
        LabError: A patch is not where it is known to be; nothing is guessed.
    """
    _replace(_module(stdlib, "sysconfig"), b"prefix_scheme = 'posix_local'", b"prefix_scheme = 'posix_prefix'")
    # One of the places that Debian's `site` looks into is lib/pythonX.Y/dist-packages. The interpreter has that module
    # compiled in, and by good luck the other name is as long.
    for path in (stdlib / "site.py", program):
        _replace(path, b"dist-packages", b"site-packages")
    for name in REMOVED:
        (stdlib / name).unlink(missing_ok=True)


def _replace(path: Path, debian: bytes, upstream: bytes) -> None:
    data = path.read_bytes()
    if debian not in data:
        raise LabError(
            f"Debian's patch of {path.name} looks different in this Python: cannot undo it. "
            "Give another one with --python (from pyenv, uv or a python container image)."
        )
    path.write_bytes(data.replace(debian, upstream))


def _module(stdlib: Path, name: str) -> Path:
    """A module is a file, or a package in later Pythons."""
    package = stdlib / name / "__init__.py"
    return package if package.is_file() else stdlib / f"{name}.py"
