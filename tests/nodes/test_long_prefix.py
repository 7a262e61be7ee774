"""A release with a path of 200 characters runs, and its files equal the packed ones.

The environment is small and real: its programs have the packer's prefix in their first lines, in other text and in
compiled files.
"""

import hashlib
import os
from pathlib import Path

import pytest
from command import run
from tiny_env import inventory, on, pack

from provision import sandbox as sandboxes
from provision.env.bundle.reader import open_bundle

pytestmark = [pytest.mark.root, pytest.mark.lab]

NODE = "node01"
RELEASE = 200  # characters
ROOT = "/home/trainer/" + "/".join(["a-folder-of-a-long-name"] * 6)
ROOT += "-" * (RELEASE - len("/releases/") - 12 - len(ROOT))
PREFIX = f"{ROOT}/current"

# Root may write into a release, and what it compiled would be found.
CLEAN = ("env", "-i", "HOME=/home/trainer", "PYTHONDONTWRITEBYTECODE=1")


@pytest.fixture(scope="module")
def box(tmp_path_factory, require_sandbox):
    folder = tmp_path_factory.mktemp("long")
    with sandboxes.up(
        sandboxes.Options(nodes=1, name=f"long-test-{os.getpid()}", directory=folder, user="trainer", prefix=PREFIX)
    ) as box:
        yield box


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, small_env):
    return pack(small_env, tmp_path_factory.mktemp("bundle") / "small.ccb")


@pytest.fixture(scope="module")
def release(box, bundle, tmp_path_factory):
    result = run("deploy", bundle, cwd=inventory(box, tmp_path_factory.mktemp("user"), prefix=PREFIX), timeout=280)
    assert result.returncode == 0, result.stderr
    assert "/bin/sh" in result.stderr  # the warning: Linux reads no first line that is so long
    path = on(box, NODE, "readlink", "-f", PREFIX).strip()
    assert len(path) == RELEASE
    return path


def test_the_files_on_the_node_are_the_packed_ones(box, release, bundle):
    here = Path(box.node_root(NODE)) / release.lstrip("/")
    compared = 0
    for entry in open_bundle(bundle).manifest.files:
        path = here / entry.path
        if entry.type == "file" and not entry.marks and not entry.path.endswith(".pyc"):
            status = path.lstat()
            assert (status.st_mode & 0o555, int(status.st_mtime)) == (entry.mode & 0o555, entry.mtime), entry.path
            assert hashlib.sha256(path.read_bytes()).hexdigest() == entry.sha256, entry.path
            compared += 1
        elif entry.type == "link" and not entry.marks:
            assert str(path.readlink()) == entry.target
    assert compared > 1500


def test_no_file_names_the_packers_prefix(box, release, small_env):
    script = 'grep -rlF -e "$1" "$2" | grep -v -e "\\.pyc$" -e "/\\.clusterctl/" || true'
    assert on(box, NODE, "sh", "-c", script, "sh", str(small_env), release) == ""


def test_every_console_script_starts_and_has_a_first_line_that_linux_reads(box, release):
    script = f"for f in {release}/bin/*; do head -c 200 \"$f\" | head -n 1 | grep -a '^#!' | cut -c 1-200; done"
    lines = on(box, NODE, "sh", "-c", script).splitlines()
    assert "#!/bin/sh" in lines
    assert not [line for line in lines if len(line) > 127]
    assert f"from {release}/lib/python" in on(box, NODE, *CLEAN, f"{release}/bin/pip", "--version")
    assert "usage: hatchling" in on(box, NODE, *CLEAN, f"{release}/bin/hatchling", "--help")


def test_python_uses_the_new_prefix_and_recompiles_nothing(box, release):
    program = "import sys, sysconfig, pip._internal.cli.main, hatchling.build; print(sys.prefix)"
    program += "; print(sysconfig.get_config_var('LIBDIR'))"
    message = box.enter(NODE, [*CLEAN, f"{release}/bin/python", "-I", "-v", "-c", program])
    assert message.returncode == 0, message.stderr
    assert message.stdout.split() == [release, f"{release}/lib"]
    loaded = [line for line in message.stderr.splitlines() if line.startswith("# code object from")]
    assert len(loaded) > 30
    assert [line for line in loaded if line.rstrip("'").endswith(".py")] == []
