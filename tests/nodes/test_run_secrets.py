"""While a run starts and trains on this machine, no process has a secret among its arguments."""

import contextlib
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import command
import pytest

pytestmark = pytest.mark.timeout(120)

SECRET = "s3cret-of-this-test-" + str(os.getpid())
# Replaces torchrun: one process that prints its input. `python -m` looks in the sent folder first.
TORCHRUN = """
import os, sys
print("length", len(os.environ["WANDB_API_KEY"]), len(os.environ["HF_TOKEN"]), flush=True)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "env/bin/python").chmod(0o755)
    package = tmp_path / "job/torch/distributed"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "__init__.py", tmp_path / "job/train.py"):
        path.touch()
    (package / "run.py").write_text(TORCHRUN)
    return tmp_path / "job"


def arguments():
    """The command lines of all processes."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has exited
            found.add(path.read_bytes())
    return found


def test_no_argument_and_no_readable_file_contains_a_secret(folder):
    seen, over = set(), threading.Event()

    def look():
        while not over.is_set():
            seen.update(arguments())

    looking = threading.Thread(target=look)
    looking.start()
    environ = {
        "CONDA_PREFIX": str(folder.parent / "env"),
        "XDG_DATA_HOME": str(folder.parent / "data"),
        "WANDB_API_KEY": SECRET,
        "HF_TOKEN": SECRET,
    }
    try:
        done = command.run(
            *("train", "--nodes", "1", "--env", "WANDB_API_KEY", "--env", "HF_TOKEN", "train.py"),
            cwd=folder,
            env=environ,
            fresh=True,
        )
    finally:
        over.set()
        looking.join()
    assert done.returncode == 0, done.stderr + done.stdout
    assert any(b"agent" in each for each in seen)
    assert any(b"torch.distributed.run" in each for each in seen)
    assert not [each for each in seen if SECRET.encode() in each]
    assert SECRET not in done.stdout + done.stderr
    (record,) = (folder / "runs").iterdir()
    assert f"length {len(SECRET)} {len(SECRET)}" in "".join(path.read_text() for path in record.rglob("*.log"))
    assert SECRET not in (record / "run.json").read_text()
    holding = subprocess.run(["grep", "-rl", SECRET, str(folder.parent)], check=False, capture_output=True, text=True)
    files = [Path(line) for line in holding.stdout.splitlines()]
    assert files  # the plan, which the agent reads
    assert not [path for path in files if stat.S_IMODE(path.stat().st_mode) & 0o077]
    shown = command.run("status", "--json", record.name, cwd=folder, env=environ)
    assert SECRET not in shown.stdout + shown.stderr
