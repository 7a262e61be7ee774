"""This machine as a node, with real processes: what holds over ssh holds here."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path, PurePosixPath

import pytest

from provision.cli import main
from provision.errors import UsageError
from provision.inventory import local_inventory
from provision.model import LOCAL, Inventory, Node
from provision.ssh.local import LocalRemote
from provision.ssh.remote import Connections, DeadlineExceeded, NodeUnreachable, RootRefused

NODE = Node("here", LOCAL)


@pytest.fixture
def remote():
    found = LocalRemote(NODE)
    yield found
    found.close()


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in b"ZX"
    return False


def eventually(test, seconds=60.0):
    limit = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < limit, "did not happen"
        time.sleep(0.01)


def test_a_script_runs_with_its_input_its_outputs_and_its_exit_code(remote):
    result = remote.run("cat; echo it\\'s >&2; exit 7", stdin=[b"one\n", b"\xfftwo"])
    assert (result.rc, result.out, result.err) == (7, "one\n\udcfftwo", "it's\n")


def test_script_starts_in_the_home_folder_without_a_terminal(remote):
    assert remote.run("pwd; tty").out.splitlines() == [str(Path.home()), "not a tty"]


def test_lines_arrive_as_they_are_written(remote):
    came = threading.Event()
    lines = []

    def hold():
        came.wait(60)
        yield b"go\n"

    def hear(line):
        lines.append(line)
        came.set()

    result = remote.run("echo first; read -r word; echo $word", stdin=hold(), on_line=hear)
    assert (lines, result.out) == (["first", "go"], "")


def test_deadline_stops_every_process_of_the_script(remote, tmp_path):
    pids = tmp_path / "pids"
    script = f"trap 'echo cleaned >{tmp_path}/cleaned; exit 1' TERM; sleep 600 & echo $$ $! >{pids}; wait"
    with pytest.raises(DeadlineExceeded) as failed:
        remote.run(script, deadline=2)
    assert failed.value.reason == "not finished within 2 s"
    for pid in pids.read_text().split():
        eventually(lambda pid=pid: not alive(pid))
    assert (tmp_path / "cleaned").exists()  # it got SIGTERM before it was killed


def test_script_that_ignores_sigterm_is_killed(remote, tmp_path):
    with pytest.raises(DeadlineExceeded):
        remote.run(f"trap '' TERM; echo $$ >{tmp_path}/pid; sleep 600 & wait; sleep 600", deadline=2)
    eventually(lambda: not alive((tmp_path / "pid").read_text().strip()))


def test_background_process_does_not_delay_the_answer_and_continues(remote, tmp_path):
    result = remote.run(f"setsid sleep 600 & echo $! >{tmp_path}/pid; echo done")
    pid = int((tmp_path / "pid").read_text())
    try:
        assert result.out == "done\n"
        assert alive(pid)  # it is still running, so the answer did not wait for it
    finally:
        os.kill(pid, 9)


def test_close_stops_running_scripts_and_refuses_new_ones(remote, tmp_path):
    def close_it():
        eventually((tmp_path / "pid").exists)
        remote.close()

    threading.Thread(target=close_it).start()
    with pytest.raises(NodeUnreachable):
        remote.run(f"echo $$ >{tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; sleep 600")
    eventually(lambda: not alive((tmp_path / "pid").read_text().strip()))
    assert not remote.alive
    with pytest.raises(NodeUnreachable):
        remote.run("true")


def test_error_of_the_input_is_raised_and_stops_the_script(remote):
    def broken():
        yield b"x"
        raise UsageError("a file was changed")

    with pytest.raises(UsageError, match="a file was changed"):
        remote.run("cat >/dev/null; sleep 60", stdin=broken())


def test_root_runs_directly_and_others_use_sudo(remote):
    if os.geteuid() == 0:
        assert remote.run("id -u", root=True).out == "0\n"
    else:
        with contextlib.suppress(RootRefused):
            assert remote.run("id -u", root=True).out == "0\n"


def test_connections_reach_a_local_node_without_ssh(tmp_path):
    inventory = Inventory(tmp_path / "inventory.yaml", PurePosixPath("/nowhere/env"), (NODE,))
    with Connections(inventory) as connections:
        assert isinstance(connections[NODE], LocalRemote)
        assert connections[NODE] is connections[NODE]
        assert connections[NODE].run("echo hello").out == "hello\n"
        other = connections.open_separate(NODE)
        assert other is not connections[NODE]
    with pytest.raises(NodeUnreachable):
        other.run("true")


@pytest.mark.parametrize(
    ("node", "address"),
    [(NODE, "127.0.0.1"), (Node("here", LOCAL, "10.0.0.7"), "10.0.0.7"), (Node("far", "10.0.0.8"), "10.0.0.8")],
)
def test_the_train_address_of_a_local_node(node, address):
    assert node.train_address == address


@pytest.fixture
def environment(tmp_path):
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/python").touch()
    return tmp_path / "env"


def test_without_an_inventory_the_active_environment_trains(environment, tmp_path):
    for name in ("CONDA_PREFIX", "VIRTUAL_ENV"):
        inventory = local_inventory(environ={name: str(environment), "XDG_DATA_HOME": str(tmp_path / "data")})
        assert str(inventory.prefix) == str(environment)
        assert str(inventory.root) == str(tmp_path / "data/clusterctl")
        assert [node.is_local for node in inventory.nodes] == [True]


def test_conda_comes_before_a_venv_and_a_relative_data_folder_is_ignored(environment):
    inventory = local_inventory(
        environ={"CONDA_PREFIX": str(environment), "VIRTUAL_ENV": "/nowhere", "XDG_DATA_HOME": "data"}
    )
    assert str(inventory.prefix) == str(environment)
    assert str(inventory.root) == str(Path.home() / ".local/share/clusterctl")


def test_folder_that_is_not_an_environment_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not an environment") as failed:
        local_inventory(tmp_path)
    assert "conda activate" in failed.value.hint


# --- commands where there is no inventory --------------------------------------------------------


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder, as a user who has no runs yet: its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("CONDA_PREFIX", sys.prefix)
    before = signal.getsignal(signal.SIGTERM)

    def run(*argv):
        with pytest.raises(SystemExit) as end:
            main(argv)
        message = capsys.readouterr()
        return end.value.code, message.out + message.err

    yield run
    signal.signal(signal.SIGTERM, before)


def test_train_uses_this_machine(command, tmp_path):
    (tmp_path / "sft.yaml").write_text("stage: sft\nmodel_name_or_path: /nowhere/llama\ndo_train: true\n")
    for number in ([], ["--nodes", "1"]):
        code, message = command("train", *number, "sft.yaml")
        assert code == 4, message
        assert "this machine alone" in message
        assert sys.prefix in message
        assert "model_name_or_path /nowhere/llama is missing" in " ".join(message.split())
        assert not any((tmp_path / "data/clusterctl/runs").glob("[!.]*"))


@pytest.mark.parametrize("argv", [("train", "--nodes", "2", "x.yaml"), ("train", "-i", "inventory.yaml", "x.yaml")])
def test_more_than_this_machine_needs_an_inventory(command, argv):
    code, message = command(*argv)
    assert code == 2
    assert "no inventory.yaml" in message or "inventory.yaml does not exist" in message
    assert "clusterctl init" in message


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (("check", "--only", "cpu.count"), 0, "1 check in"),
        (("status",), 0, "no release"),
        (("run", "echo", "hi"), 0, "hi"),
        (("logs",), 2, "the nodes have no runs"),
        (("stop",), 2, "the nodes have no runs"),
        (("resume",), 2, "the nodes have no runs"),
        (("collect",), 2, "the nodes have no runs"),
        (("diagnose",), 2, "the nodes have no runs"),
        (("metrics",), 2, "the nodes have no runs"),
        (("train",), 2, "there is no train.yaml in this folder"),
        (("bench", "nccl", "--write"), 2, "--write goes with --tune"),
        (("status", "--limit", "gpu01"), 2, "no node is called gpu01"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_one_rule_for_every_command_that_can_run_here(command, tmp_path, argv, code, says):
    """Where no inventory is named and this folder has none, it is this machine alone, with or without runs."""
    for _ in range(2):
        done, message = command(*argv)
        assert (done, says in message) == (code, True), message
        assert "inventory.yaml" not in message
        assert ("this machine alone" in message) == (argv[0] != "bench")
        (tmp_path / "data/clusterctl/runs").mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize(
    "argv",
    [("deploy",), ("releases",), ("rollback",), ("prune",), ("verify",), ("push", "a", "/b"), ("services", "status")],
    ids=" ".join,
)
def test_commands_about_nodes_need_an_inventory(command, argv):
    code, message = command(*argv)
    assert code == 2
    assert "inventory.yaml does not exist" in message
    assert "clusterctl init" in message


def test_several_nodes_of_a_typed_command_need_an_inventory(command, tmp_path):
    (tmp_path / "x.py").touch()
    code, message = command("train", "--", "torchrun", "--nnodes", "2", "x.py")
    assert (code, "--nodes 2: no inventory.yaml" in message) == (2, True), message


def test_only_commands_that_start_programs_need_an_environment(command, tmp_path, monkeypatch):
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "nowhere"))
    assert command("status")[0] == 0
    (tmp_path / "x.py").touch()
    code, message = command("train", "x.py")
    assert (code, "is not an environment" in message) == (2, True)
