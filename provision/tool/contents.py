"""The files of the tool: the interpreter, the standard library, the packages and the shared libraries.

::

    clusterctl               the command: checks the machine, starts ./python
    python                   Python with its libraries; what sys.executable names
    bin/pythonX.Y            the interpreter
    lib/pythonX.Y/           its standard library (lib64 on some distributions), and our sitecustomize.py
    lib/clusterctl/          shared libraries that are not glibc's own
    packages/                provision, trainer and the distributions they need
"""

from __future__ import annotations

import marshal
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import cache_from_source, find_spec
from pathlib import Path, PurePosixPath

import provision
from provision.env.source import elf
from provision.errors import UsageError
from provision.render import render
from provision.tool import compiler, distributions, libraries
from provision.tool.libraries import dynamic

PACKAGES = "packages"
COMPLETE = ".complete"  # the archive's last member

_NAME = "clusterctl"

# Parts of the standard library that are omitted: tests, windows, installers, and additions of distributions.
_OMITTED = frozenset({
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtle.py", "turtledemo",
    "ensurepip", "distutils", "lib2to3", "pydoc_data", "EXTERNALLY-MANAGED", "sitecustomize.py", "usercustomize.py",
    "_distutils_system_mod.py",
})  # fmt: skip
_OMITTED_STARTS = ("config-", "_test", "_ctypes_test", "_xx", "xxlimited", "libpython")
_OMITTED_ENDS = (".pyc", ".a", ".exe")
# Extension modules that clusterctl does not import. Including them would require their libraries.
_OMITTED_MODULES = frozenset({
    "_crypt", "_curses", "_curses_panel", "_dbm", "_gdbm", "_sqlite3", "_tkinter", "_uuid", "nis", "ossaudiodev",
    "readline",
})  # fmt: skip


@dataclass(frozen=True)
class Item:
    """A file of the tool: its path, or its bytes."""

    source: Path | bytes
    executable: bool = False

    def read(self) -> bytes:
        """The bytes.

        Raises:
            UsageError: the file cannot be read.
        """
        if isinstance(self.source, bytes):
            return self.source
        try:
            return self.source.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {self.source}: {error.strerror}") from error


@dataclass(frozen=True)
class Contents:
    """All files by their names, sorted, and the glibc that they need."""

    items: dict[str, Item]
    glibc: tuple[int, int]  # the oldest that every program and library will do with
    notices: tuple[str, ...] = ()


def contents(python: Interpreter) -> Contents:
    """Collect the tool that ``python`` runs.

    Raises:
        UsageError: a requirement is not installed, or the interpreter would not start elsewhere.
    """
    loader = _loader(python)
    items = {
        python.target: Item(python.program, executable=True),
        **{f"{python.home}/{name}": Item(path, os.access(path, os.X_OK)) for name, path in _stdlib(python)},
        **{f"{PACKAGES}/{name}": Item(path) for name, path in _packages()},
        f"{PACKAGES}/{_NAME}-{provision.__version__}.dist-info/METADATA": Item(
            (distributions.find_distribution(_NAME).read_text("METADATA") or "").encode()
        ),
        f"{python.home}/sitecustomize.py": Item(_templates() / "tool/sitecustomize.py"),
    }
    modules = {item.source for item in items.values() if isinstance(item.source, Path) and ".so" in item.source.name}
    machine = libraries.Machine(python.machine, python.libraries)
    stay = {path.resolve() for path in modules}
    found = libraries.find_needed(python.program, modules, machine, stay=stay)
    items |= {f"{LIBRARIES}/{name}": Item(path, executable=True) for name, path in found.libraries.items()}
    floors = [elf.glibc(libraries.reader(path)) for path in (python.program, *modules, *found.libraries.values())]
    glibc = max(floor for floor in floors if floor)
    start = {"machine": python.machine, "minor": glibc[1], "loader": loader, "program": python.target}
    items["clusterctl"] = Item(render("tool/clusterctl.sh.j2", **start).encode(), executable=True)
    items["python"] = Item(
        render("tool/python.sh.j2", program=python.target, libraries=LIBRARIES).encode(), executable=True
    )
    # Read only once: Python does not compare a compiled file with its source, so both must come from the same bytes.
    items |= {name: Item(item.read(), item.executable) for name, item in items.items() if name.endswith(".py")}
    items |= _compile_items(items)
    notices = [f"{name}, which {path} needs, is not installed and is omitted" for name, path in found.missing.items()]
    return Contents({name: items[name] for name in sorted(items)}, glibc, tuple(notices))


def _loader(python: Interpreter) -> str:
    """The dynamic loader: the path in the program's ELF header."""
    found = dynamic(libraries.reader(python.program))
    loader = found.loader if found else ""
    folder, name = os.path.split(loader)
    if not name.startswith("ld") or "musl" in name or folder not in {"/lib", "/lib64"}:
        raise UsageError(
            f"{python.program} is started by {loader or 'no dynamic loader'}, which the target will not have",
            hint="run clusterctl with a Python for glibc, such as the one of a distribution, conda, pyenv or uv",
        )
    return loader


def _stdlib(python: Interpreter) -> Iterator[tuple[str, Path]]:
    yield from _walk(python.stdlib)
    for folder in python.extensions:
        if not folder.is_relative_to(python.stdlib):
            yield from ((f"lib-dynload/{name}", path) for name, path in _walk(folder))


def _walk(top: Path) -> Iterator[tuple[str, Path]]:
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if not _is_omitted(name)]
        for name in files:
            path = Path(folder, name)
            if not _is_omitted(name) and path.is_file():
                yield path.relative_to(top).as_posix(), path


def _is_omitted(name: str) -> bool:
    is_module = name.endswith(".so") and name.partition(".")[0] in _OMITTED_MODULES
    return name in _OMITTED or name.startswith(_OMITTED_STARTS) or name.endswith(_OMITTED_ENDS) or is_module


def _packages() -> Iterator[tuple[str, Path]]:
    """The packages' files, named as a wheel installs them, even if this program runs from a checkout."""
    for package in distributions.required(_NAME):
        yield from distributions.files(package)
    ours = Path(provision.__file__).parent
    spec = find_spec("trainer")
    assert spec is not None
    assert spec.origin is not None
    folders = {"provision": ours, "trainer": Path(spec.origin).parent}
    folders["provision/templates"] = _templates()
    for to, top in folders.items():
        for path in sorted(top.rglob("*")):
            name = path.relative_to(top).as_posix()
            if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in Path(name).parts):
                yield f"{to}/{name}", path


def _templates() -> Path:
    """The folder of templates: inside the package in a wheel, next to it in a checkout."""
    ours = Path(provision.__file__).parent
    inside = ours / "templates"
    return inside if inside.is_dir() else ours.parent / "templates"


def _compile_items(items: dict[str, Item]) -> dict[str, Item]:
    files = compile_sources({name: item.read() for name, item in items.items() if name.endswith(".py")})
    return {str(PurePosixPath(cache_from_source(name, optimization=""))): Item(data) for name, data in files.items()}


LIBRARIES = "lib/clusterctl"
"""The folder of shared libraries in an unpacked tool."""


@dataclass(frozen=True)
class Interpreter:
    """A CPython. Its standard library is found relative to the program, as ``LIB/pythonX.Y``."""

    program: Path
    stdlib: Path
    extensions: tuple[Path, ...]  # lib-dynload; none where every module is linked into the program
    lib: str  # sys.platlibdir: "lib", on some distributions "lib64"
    version: str
    machine: str  # the output of uname -m
    libraries: tuple[Path, ...]  # folders searched before the system's: LD_LIBRARY_PATH, and an unpacked tool's

    @property
    def home(self) -> str:
        """The folder of the standard library in the tool."""
        return f"{self.lib}/{self.stdlib.name}"

    @property
    def target(self) -> str:
        """The path of the program in the tool."""
        return f"bin/{self.stdlib.name}"


def running() -> Interpreter:
    """The interpreter of this process: of a distribution, conda, pyenv, uv, or ``pack-tool``.

    Raises:
        UsageError: it cannot be packed.
    """
    # sys.executable may be a link of a virtual environment or a tool's script; the kernel knows the program.
    program = Path("/proc/self/exe").resolve()
    stdlib = Path(os.__file__).resolve().parent
    if sys.implementation.name != "cpython" or not (stdlib / "os.py").is_file():
        raise UsageError(
            f"{program} is not a CPython with a standard library in a folder",
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


_TOGETHER = 256  # sources per process: fixed, because earlier sources influence the bytes of later ones


def compile_sources(sources: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """The compiled files of sources, by the same names; sources that do not compile are omitted.

    Args:
        sources: the files' contents, by their names in the tool.

    Raises:
        UsageError: the compiler was killed.
    """
    names = sorted(sources)
    groups = [names[at : at + _TOGETHER] for at in range(0, len(names), _TOGETHER)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        answers = pool.map(lambda group: _run_compiler([(name, sources[name]) for name in group]), groups)
        return {
            name: data
            for group, answer in zip(groups, answers, strict=True)
            for name, data in zip(group, answer, strict=True)
            if data
        }


def _run_compiler(questions: list[tuple[str, bytes]]) -> list[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-s", "-S", compiler.__file__],
        input=marshal.dumps(questions),
        capture_output=True,
        env={**environment, "PYTHONHASHSEED": "0"},  # before Python 3.11 the bytes contain the order of sets
        check=False,
    )
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise UsageError(f"the sources of clusterctl could not be compiled: {why}", hint="is there enough free memory?")
    answers: list[bytes] = marshal.loads(done.stdout)  # noqa: S302 - from our own process
    return answers
