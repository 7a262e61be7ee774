"""The agent's answers for the gate: the files at paths, and the runs with processes here. With real ones."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from provision.run.readiness import Content
from provision.run.readiness import parse_content as parse

AGENT = Path(__file__).parents[2] / "trainer" / "agent"
PYTHON = os.environ.get("AGENT_PYTHON", sys.executable)  # to try the agent under an older Python
MIB = 1 << 20


def digest(*paths, patience=5):
    argv = [PYTHON, "-IB", AGENT, "digest", "--patience", str(patience), "--", *map(str, paths)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return parse(done.stdout)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub/it's a file").write_bytes(b"x" * 100)
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(40 * MIB)
    return folder


def test_equal_folders_at_different_paths_are_equal(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "elsewhere/copy", copy_function=shutil.copyfile)
    found = digest(model, copy)
    one, other = found.values()
    assert (one.state, one.files, one.bytes) == ("folder", 3, 2 + 100 + 40 * MIB)
    assert one == other
    assert one.unlike(other) is None
    assert set(one.entries) == {"config.json", "sub/it's a file", "weights.bin"}


def change(folder, name, at):
    with (folder / name).open("r+b") as file:
        file.seek(at)
        file.write(b"!")


@pytest.mark.parametrize(
    ("do", "word"),
    [
        (lambda folder: change(folder, "config.json", 1), "has different content in config.json"),
        (lambda folder: change(folder, "weights.bin", 5), "has different content in weights.bin"),
        (lambda folder: change(folder, "weights.bin", 40 * MIB - 3), "has different content in weights.bin"),
        (lambda folder: os.truncate(folder / "weights.bin", 30 * MIB), "bytes, not"),
        (lambda folder: (folder / "config.json").unlink(), "lacks config.json"),
        (lambda folder: (folder / "more").touch(), "has the extra file more"),
        (lambda folder: (folder / "config.json").rename(folder / "other.json"), "lacks config.json"),
    ],
)
def test_difference_between_folders_is_named(model, tmp_path, do, word):
    copy = shutil.copytree(model, tmp_path / "copy")
    do(copy)
    found = digest(model, copy)
    assert word in found[str(copy)].unlike(found[str(model)])


def test_download_metadata_and_links_are_ignored(model, tmp_path):
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in model.iterdir():
        (linked / path.name).symlink_to(path)
    (linked / ".cache").mkdir()
    (linked / ".cache/when").write_text("now")
    (linked / "sub").unlink()
    (linked / "sub").symlink_to(model / "sub")
    found = digest(model, linked)
    assert found[str(linked)].unlike(found[str(model)]) is None


def test_folder_with_a_link_loop_and_a_dangling_link(model):
    (model / "loop").symlink_to(model)
    (model / "dead").symlink_to("/nowhere/at/all")
    found = digest(model)[str(model)]
    assert found.entries["dead"] == "-1 !"
    assert not any(name.startswith("loop/") for name in found.entries)


def test_state_of_a_file_a_missing_path_and_a_pipe(model, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    found = digest(model / "config.json", tmp_path / "nothing", tmp_path / "pipe")
    states = [each.state for each in found.values()]
    assert states == ["file", "missing", "unread"]
    assert found[str(tmp_path / "pipe")].error == "it is neither a file nor a folder"


def test_files_not_read_in_time_are_compared_by_name_and_size(model):
    found = digest(model, patience=0)[str(model)]
    assert found.partial
    assert found.names == ""  # not even the names were seen
    assert found.unlike(Content("folder", names="other", content="other")) is None


def test_a_path_that_hangs_does_not_hold_up_the_others(model, tmp_path, monkeypatch):
    """A child that is stopped answers as little as one on a dead file system."""
    code = (
        "import os, signal, sys, json; sys.path.insert(0, sys.argv[1]); from trainer.agent import talk\n"
        "look = talk.look\n"
        "talk.look = lambda path, patience: os.kill(os.getpid(), signal.SIGSTOP) if 'dead' in path"
        " else look(path, patience)\n"
        "print(json.dumps(talk.digests(sys.argv[2:], 0.3)))"
    )
    argv = [PYTHON, "-IBc", code, AGENT.parents[1], str(tmp_path / "dead"), str(model / "config.json")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=100)  # the other never answers
    dead, fine = parse(done.stdout).values()
    assert (dead.state, dead.error) == ("hung", "no answer within 1.3 s")
    assert fine.state == "file"


# --- runs ----------------------------------------------------------------------------------------


def probe():
    argv = [PYTHON, "-IB", AGENT, "probe", "--master", "127.0.0.1", "--rank", "0", "--folder", "/"]
    return json.loads(subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout)


def about(run):
    return next((each for each in probe()["runs"] if each["run"] == run), None)


@pytest.fixture
def start():
    """Starts processes and ends them."""
    started = []

    def begin(argv, **env):
        process = subprocess.Popen(
            argv, env={"PATH": os.environ["PATH"], **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        process.stdout.readline()  # it reports its start
        return process

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
def name():
    return f"20261122-test-{uuid.uuid4().hex[:6]}"


WAITS = "echo there; read -r word"


def test_a_run_without_an_agent(start, name):
    worker = start(["sh", "-c", WAITS], CLUSTERCTL_RUN=name, CLUSTERCTL_NODE="n", CUDA_VISIBLE_DEVICES="0,1")
    found = about(name)
    assert found["agent"] is False
    assert found["pids"] == [worker.pid]
    assert found["visible"] == "0,1"
    assert found["user"] == subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()


def agent_of(name, tmp_path, code):
    """A program with the command line of an agent."""
    folder = tmp_path / "runs" / name / "agent"
    folder.mkdir(parents=True)
    (folder / "__main__.py").write_text(code)
    return [sys.executable, "-I", str(folder)]


CHILD = "import subprocess; subprocess.run(['sh', '-c', 'echo there; read -r word'], env={}, check=False)"


@pytest.mark.parametrize(("command", "counts"), [("run", True), ("start", True), ("follow", False), ("probe", False)])
def test_a_run_with_an_agent_whose_processes_cannot_be_read(start, name, tmp_path, command, counts):
    """As root's are for another user: the child below the agent carries no mark that could be seen."""
    agent = start([*agent_of(name, tmp_path, CHILD), command, "plan-0.json"])
    found = about(name)
    assert (found is not None) == counts
    if counts:
        assert found["agent"] is True
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        assert found["pids"] == [int(pid) for pid in children]


def test_missing_run_is_not_reported(name):
    assert about(name) is None
