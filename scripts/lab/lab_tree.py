"""A CPython that is installed here, copied to a folder in the layout of conda's `python` package.

Kept: the interpreter, the standard library with its extension modules, the headers, and every shared library they need
but glibc's own (a minimal node has few). Omitted: tests, Tk, IDLE, installed packages and .pyc files, which would hold
the build prefix where no program can rewrite it.
"""

import fnmatch
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import lab_debian
from lab_recipe import MINIMUM_PYTHON
from lab_run import LabError, Log

# The placeholder of the prefix in text files, 255 bytes as conda-build makes it.
PLACEHOLDER = ("/opt/conda_build_" + "placehold_" * 24)[:255]

LEFT_OUT = (
    "__pycache__", "*.pyc", "*.a", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "site-packages",
    "dist-packages", "libpython*", "_tkinter.*", "nis.*", "_test*.so", "_ctypes_test.*", "_xxtestfuzz.*", "xxlimited*",
)  # fmt: skip
HOLDS_PREFIX = ("bin/*", "lib/pkgconfig/*.pc", "*/_sysconfigdata*.py", "*/config-*/Makefile", "*/config-*/*.py")
GLIBC = re.compile(
    r"(ld-linux.*|lib(c|m|dl|rt|pthread|util|resolv|anl|mvec|thread_db|BrokenLocale|nss_\w+)\.so.*|libnsl\.so\.1)$"
)

_FACTS = """
import json, platform, sys, sysconfig
print(json.dumps({
    "prefix": sys.base_prefix, "version": platform.python_version(), "short": "%d.%d" % sys.version_info[:2],
    "machine": platform.machine(), "libc": " ".join(platform.libc_ver()),
    "stdlib": sysconfig.get_path("stdlib", "posix_prefix", {"installed_base": sys.base_prefix}),
}))
"""


@dataclass(frozen=True)
class Python:
    """The facts about the interpreter that is copied; they are part of the recipe's digest."""

    prefix: str
    version: str
    short: str
    machine: str
    libc: str
    stdlib: str

    @property
    def base(self) -> Path:
        return Path(self.prefix)

    @property
    def subdir(self) -> str:
        """Conda's name for the platform."""
        return {"x86_64": "linux-64"}.get(self.machine, f"linux-{self.machine}")

    def facts(self) -> dict[str, object]:
        return asdict(self)


def inspect(executable: Path) -> Python:
    """What `executable`, or the interpreter its virtual environment was made from, is.

    Raises:
        LabError: It is too old, or its layout is none that can be copied.
    """
    python = Python(**Log().ask(executable, _FACTS))
    wanted = "{}.{}".format(*MINIMUM_PYTHON)
    if tuple(map(int, python.short.split("."))) < MINIMUM_PYTHON:
        raise LabError(
            f"LLaMA-Factory needs Python >= {wanted}, but {executable} is {python.version}. "
            f"Give another one: scripts/lab/build.py --python /path/to/python{wanted}"
        )
    stdlib = python.base / "lib" / f"python{python.short}"
    if Path(python.stdlib) != stdlib or not (python.base / "bin" / f"python{python.short}").exists():
        raise LabError(
            f"{python.prefix} does not have its Python in bin/ and lib/, as upstream does. Give another with --python"
        )
    return python


def stage(python: Python, into: Path, patchelf: Path, log: Log) -> None:
    """Copies the tree of `python` to the new folder `into`."""
    short, base = python.short, python.base
    stdlib = into / "lib" / f"python{short}"
    shutil.copytree(python.stdlib, stdlib, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    (stdlib / "site-packages").mkdir()
    (stdlib / "site-packages" / "README.txt").write_text("Packages are installed here.\n")
    for headers in base.glob(f"include/**/python{short}"):
        shutil.copytree(headers, into / headers.relative_to(base), symlinks=True)
    programs = into / "bin"
    programs.mkdir()
    for name, links in (
        (f"python{short}", ("python3", "python")),
        (f"python{short}-config", ("python3-config", "python-config")),
        (f"pydoc{short}", ("pydoc3", "pydoc")),
    ):
        if (base / "bin" / name).is_file():
            shutil.copy2(base / "bin" / name, programs / name)
            for link in links:
                (programs / link).symlink_to(name)
    if lab_debian.is_debian(stdlib):
        lab_debian.undo(stdlib, programs / f"python{short}")
    for description in base.glob(f"lib/pkgconfig/python-{short}*.pc"):
        (into / "lib/pkgconfig").mkdir(exist_ok=True)
        shutil.copy2(description, into / "lib/pkgconfig")
    put_placeholders(into, python.prefix)
    carry_libraries(python, into, patchelf, log)


def put_placeholders(tree: Path, prefix: str) -> list[Path]:
    """Replaces the prefix that `tree` was built for in the text files known to hold it; returns those changed."""
    # With the prefix /usr, `#!/usr/bin/env` and /foo/usr must stay.
    pattern = re.compile(
        rf"(?:(?<=-[IL])|(?<![\w./-])){re.escape(prefix)}(?=/(?:lib|include|share|bin/python)|/bin\b(?!/)|[^\w./-]|$)",
        re.MULTILINE,
    )
    changed = []
    for path in sorted(tree.rglob("*")):
        name = path.relative_to(tree).as_posix()
        if path.is_symlink() or not path.is_file() or not any(fnmatch.fnmatch(name, glob) for glob in HOLDS_PREFIX):
            continue
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:
            continue  # a program; its prefixes stay, Python finds its own at run time
        replaced = pattern.sub(PLACEHOLDER, text)
        if replaced != text:
            path.write_bytes(replaced.encode())
            changed.append(path)
    return changed


def carry_libraries(python: Python, tree: Path, patchelf: Path, log: Log) -> None:
    """Copies the shared libraries into lib/ and makes every ELF file find them there."""
    program = tree / "bin" / f"python{python.short}"
    modules = sorted((tree / "lib" / f"python{python.short}" / "lib-dynload").glob("*.so"))
    originals = [python.base / path.relative_to(tree) for path in [program, *modules]]
    libraries = needed_libraries(log.run(["ldd", *originals]))
    for name, path in libraries.items():
        shutil.copyfile(path, tree / "lib" / name)
        (tree / "lib" / name).chmod(0o755)

    def set_rpath(rpath: str, files: Iterable[Path]) -> None:
        # DT_RPATH rather than DT_RUNPATH, as conda's Python has it: it holds for what the libraries need as well.
        if paths := list(files):
            log.run([patchelf, "--force-rpath", "--set-rpath", rpath, *paths])

    set_rpath("$ORIGIN/../lib", [program])
    set_rpath("$ORIGIN/../..", modules)
    set_rpath("$ORIGIN", [tree / "lib" / name for name in libraries])


def needed_libraries(ldd: str) -> dict[str, Path]:
    """Library name -> file, from the output of ldd, without glibc's own.

    Raises:
        LabError: Some are not installed here.
    """
    found, missing = {}, set()
    for line in ldd.splitlines():
        name, arrow, rest = line.strip().partition(" => ")
        if not arrow or GLIBC.match(name):
            continue
        if rest.startswith("not found"):
            missing.add(name)
        else:
            found[name] = Path(rest.rsplit(" (", 1)[0])
    if missing:
        raise LabError(f"This Python needs shared libraries that are not installed: {', '.join(sorted(missing))}")
    return dict(sorted(found.items()))
