"""LLaMA-Factory trains from a release whose own path has 200 characters; and what lies there is what was packed."""

import functools
import hashlib
import json
import os
import shutil
from pathlib import Path

import command
import pytest

from provision import sandbox as sandboxes
from provision.env.bundle.reader import open_bundle

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(900)]

RELEASE = 200  # characters
ROOT = "/home/trainer/" + "/".join(["a folder of a long name".replace(" ", "-")] * 6)
ROOT += "-" * (RELEASE - len("/releases/") - 12 - len(ROOT))
PREFIX = f"{ROOT}/current"

# Root may write into a release, and what it compiled would be found.
CLEAN = ("env", "-i", "HOME=/home/trainer", "PYTHONDONTWRITEBYTECODE=1")

run = functools.partial(command.run, timeout=600)  # a real environment takes its time


@pytest.fixture(scope="module")
def folder(tmp_path_factory, require_sandbox, lab_project):
    folder = tmp_path_factory.mktemp("long")
    with sandboxes.up(nodes=1, name=f"long-test-{os.getpid()}", directory=folder, user="trainer", prefix=PREFIX):
        shutil.copytree(lab_project, folder, dirs_exist_ok=True)
        yield folder


@pytest.fixture(scope="module")
def box(folder):
    return next(box for box in sandboxes.list_all() if box.directory == folder)


@pytest.fixture(scope="module")
def deployed(folder, lab_bundle):
    (folder / lab_bundle.name).hardlink_to(lab_bundle)
    result = run("deploy", "--inventory", "inventory.yaml", cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def release(box, deployed):
    path = on(box, "readlink", "-f", PREFIX).strip()
    assert len(path) == RELEASE
    return path


@pytest.fixture(scope="module")
def manifest(deployed):
    return open_bundle(next(deployed.glob("*.ccb"))).manifest


def on(box, *argv):
    result = box.enter("node01", argv)
    assert result.returncode == 0, result.stderr
    return result.stdout


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_lies_on_the_node_is_what_was_packed(box, release, manifest):
    here = Path(box.node_root("node01")) / release.lstrip("/")
    compared = 0
    for entry in manifest.files:
        path = here / entry.path
        if entry.type == "file" and not entry.marks and not entry.path.endswith(".pyc"):
            status = path.lstat()
            assert (status.st_mode & 0o555, int(status.st_mtime)) == (entry.mode & 0o555, entry.mtime), entry.path
            assert digest(path) == entry.sha256, entry.path
            compared += 1
        elif entry.type == "link" and not entry.marks:
            assert str(path.readlink()) == entry.target
    assert compared > 30000


def test_every_console_script_has_a_first_line_that_linux_reads(box, release):
    script = f"for f in {release}/bin/*; do head -c 200 \"$f\" | head -n 1 | grep -a '^#!' | cut -c 1-200; done"
    lines = on(box, "sh", "-c", script).splitlines()
    assert len(lines) > 40
    assert not [line for line in lines if len(line) > 127]
    assert on(box, *CLEAN, f"{release}/bin/torchrun", "--help")
    assert on(box, *CLEAN, f"{release}/bin/llamafactory-cli", "version")


def test_nothing_is_compiled_anew_when_llamafactory_starts(box, release):
    program = "import llamafactory.train.tuner, torch, deepspeed, transformers"
    argv = [*CLEAN, f"{release}/bin/python", "-v", "-c", program]
    said = box.enter("node01", argv)
    assert said.returncode == 0, said.stderr
    loaded = [line for line in said.stderr.splitlines() if line.startswith("# code object from")]
    assert len(loaded) > 500
    assert [line for line in loaded if line.rstrip("'").endswith(".py")] == []


def test_llamafactory_trains(deployed, release):
    result = command.train("--nodes", "1", cwd=deployed, timeout=600)
    assert result.returncode == 0, result.stderr + result.stdout
    record = max((deployed / "runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    said = json.loads((record / "run.json").read_text())
    assert said["state"] == "finished"
    assert said["losses"][-1] < said["losses"][0]
