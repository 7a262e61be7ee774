"""The scripts of a deploy, run for real under three shells; and what shellcheck says of the golden ones."""

import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath

import pytest

from provision.env import release
from provision.env.manifest import Entry, Manifest, PrefixFiles
from provision.model import Inventory, Node
from provision.script import compile_steps, parse

SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "busybox": ["busybox", "sh"]}
GOLDEN = sorted((Path(__file__).parents[1] / "golden/scripts").glob("*.sh"))
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


@pytest.fixture(params=SHELLS)
def shell(request):
    if shutil.which(SHELLS[request.param][0]) is None:
        pytest.fail(f"{request.param} is missing: apt-get install dash bash busybox-static")
    return SHELLS[request.param]


@pytest.fixture
def case(tmp_path):
    """An inventory and a manifest whose prefix lies in a folder with a name that tempts every shell."""
    root = tmp_path / 'it\'s $(touch owned) "x"'
    inventory = Inventory(Path("i.yaml"), PurePosixPath(root / "current"), (Node("node01", "10.0.0.1"),))
    manifest = Manifest(
        name="tiny",
        tool="0.1.0",
        created="",
        platform="linux-64",
        python="3.11.7",
        source_prefix="/envs/tiny",
        chunks=(),
        prefix_files=PrefixFiles("", 0, 0, 0, ""),
        files=(Entry("bin/torchrun", "file", 0o755, 0, 1, "a" * 64),),
        relocations=(("/envs/tiny", ""),),
    )
    return root, inventory, manifest


def stream(*, complete=True):
    """A release as a tar: a Python that says yes, and a launcher."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, text in (("bin/python", "#!/bin/sh\n"), ("bin/torchrun", "#!/bin/sh\necho usage\n")):
            info = tarfile.TarInfo(name)
            info.mode, info.size = 0o755, len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
        if complete:
            tar.addfile(tarfile.TarInfo(".clusterctl/complete"))
    return out.getvalue()


def run(shell, script, folder, stdin=b""):
    return subprocess.run([*shell, "-c", script], check=False, input=stdin, capture_output=True, cwd=folder, timeout=60)


def results(token, done):
    return {step.name: step.state for step in parse(token, done.stdout.decode())}


def facts(shell, case, folder):
    _, inventory, manifest = case
    return release.read_facts(run(shell, release.examine(inventory, manifest), folder).stdout.decode())


def test_a_whole_deploy(shell, case, tmp_path):
    root, inventory, manifest = case
    before = facts(shell, case, tmp_path)
    assert (before.release, before.writable, before.prefix_link) == ("absent", True, None)
    assert before.free_bytes
    assert release.judge(before, inventory, manifest) is None or "linux-" in release.judge(before, inventory, manifest)
    send, activate = release.steps(inventory, manifest)
    sent = run(shell, compile_steps(send, token="t1"), tmp_path, stream())
    assert results("t1", sent) == {"prepare": "changed", "receive": "changed", "seal": "changed"}, sent
    assert facts(shell, case, tmp_path).release == "unpacked"
    active = run(shell, compile_steps(activate, token="t2"), tmp_path)
    assert results("t2", active) == {"smoke test": "changed", "switch": "changed"}, active
    after = facts(shell, case, tmp_path)
    assert release.is_current(after, inventory, manifest)
    assert str((root / "current").readlink()) == f"releases/{manifest.release_id}"
    again = run(shell, compile_steps([*send, *activate], token="t3"), tmp_path)
    assert set(results("t3", again).values()) == {"ok"}
    assert not list(tmp_path.rglob("owned"))


def test_a_stream_that_breaks_off_between_two_members_is_noticed(shell, case, tmp_path):
    root, inventory, manifest = case
    send, _ = release.steps(inventory, manifest)
    done = run(shell, compile_steps(send, token="t"), tmp_path, stream(complete=False))
    assert results("t", done) == {"prepare": "changed", "receive": "failed"}
    assert b"broke off" in done.stdout
    assert not (root / "releases" / manifest.release_id).exists()


def test_a_stream_that_breaks_off_within_a_member_is_noticed(shell, case, tmp_path):
    root, inventory, manifest = case
    send, _ = release.steps(inventory, manifest)
    done = run(shell, compile_steps(send, token="t"), tmp_path, stream()[:1000])
    assert results("t", done)["receive"] == "failed"
    assert not (root / "releases" / manifest.release_id).exists()


def test_a_dry_run_writes_nothing(shell, case, tmp_path):
    root, inventory, manifest = case
    send, activate = release.steps(inventory, manifest)
    done = run(shell, compile_steps([*send, *activate], token="t", dry_run=True), tmp_path)
    assert set(results("t", done).values()) == {"would change"}
    assert not root.exists()


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path):
    # SC2016: a dollar in single quotes is what the nasty case is about.
    done = subprocess.run(
        [SHELLCHECK, "-s", "sh", "-e", "SC2016", path], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_there_are_golden_scripts():
    assert len(GOLDEN) >= 8
