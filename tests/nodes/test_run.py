"""``clusterctl run`` and ``--retry-failed``, as a user types them."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import time

import pytest
from command import CLUSTERCTL, run
from sudo_nodes import ASKING, FREE, allow, install
from tiny_env import inventory, make_env, pack

from provision import inventory as inventory_file

PASSWORD = "correct horse"


@pytest.fixture
def folder(sandbox, tmp_path):
    """A folder with an inventory of the shared nodes."""
    for file in (sandbox.inventory, sandbox.known_hosts, sandbox.key):
        shutil.copy(file, tmp_path)
    return tmp_path


def test_equal_outputs_are_grouped_and_exit_statuses_reported(folder):
    odd = "cat /proc/sys/kernel/ostype; [ $(hostname) != node02 ] || { echo odd; echo err >&2; exit 3; }"
    done = run("run", "--quiet", odd, cwd=folder)
    rule = "-" * 15
    assert done.stdout.splitlines() == [
        *[rule, "node[01,03] (2)", rule, "Linux"],
        *[rule, "node02", rule, "Linux", "odd", "err"],
    ]
    assert "node02: exit status 3" in done.stderr
    assert done.returncode == 5
    words = ["--retry-failed", "--json", "--", "printf", "%s|", "a b", "$HOME", "--limit"]
    again = json.loads(run("run", *words, cwd=folder).stdout)
    assert {name: node["out"] for name, node in again["nodes"].items()} == {"node02": "a b|$HOME|--limit|"}
    none = run("run", "--retry-failed", "true", cwd=folder)
    assert (none.returncode, none.stdout) == (0, "nothing to retry: the last run failed on none of the nodes\n")
    assert not (folder / ".clusterctl-failed.json").exists()


def test_dead_and_slow_nodes_do_not_delay_the_others(folder):
    file = folder / "inventory.yaml"
    address = inventory_file.load(file).nodes[0].address
    file.write_text(file.read_text() + f"  dead: {address.rpartition('.')[0]}.251\n")
    done = run("run", "--deadline", "8", "--json", "[ $(hostname) != node01 ] || sleep 100; echo hi", cwd=folder)
    data = json.loads(done.stdout)
    assert done.returncode == 5
    assert {name for name, node in data["nodes"].items() if node["out"] == "hi\n"} == {"node02", "node03"}
    assert data["error"]["reasons"]["node01"] == "not finished within 8 s"
    assert "no " in data["error"]["reasons"]["dead"]
    assert json.loads((folder / ".clusterctl-failed.json").read_text()) == {
        "inventory.yaml": {"run": ["dead", "node01"]}
    }


def test_ctrl_c_ends_the_command_on_every_node(folder, sandbox):
    process = subprocess.Popen(
        [CLUSTERCTL, "run", "mkfifo /tmp/never; echo $$ >/tmp/pid; read x </tmp/never"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    files = [sandbox.node_root(node.name) / "tmp/pid" for node in sandbox.nodes]
    wait(lambda: all(file.exists() and file.read_text().strip() for file in files))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "interrupted" in err
    for node, file in zip(sandbox.nodes, files, strict=True):
        number = file.read_text().strip()
        wait(lambda node=node, number=number: not (sandbox.node_root(node.name) / "proc" / number).exists())
        file.unlink()
        (sandbox.node_root(node.name) / "tmp/never").unlink()


@pytest.fixture
def terminal():
    """Runs a command on a new terminal and types; returns its exit code and its output."""

    def run(argv, cwd, typed):
        pid, screen = pty.fork()
        if pid == 0:
            os.chdir(cwd)
            os.execv(argv[0], [str(word) for word in argv])
        shown = b""
        try:
            while True:
                part = os.read(screen, 4096)
                shown += part
                if typed and typed[0][0] in shown:
                    os.write(screen, typed.pop(0)[1])
        except OSError:  # the other side has closed it
            pass
        os.close(screen)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()

    return run


def test_root_needs_the_password_once(make_sandbox, tmp_path, terminal):
    box = make_sandbox(nodes=2, user="trainer", password=PASSWORD)
    install(box)
    allow(box, "Defaults use_pty\n" + ASKING)
    folder = box.inventory.parent
    asked = [(b"sudo password of trainer", PASSWORD.encode() + b"\n")]
    code, shown = terminal([CLUSTERCTL, "run", "--root", "id", "-un"], folder, asked)
    assert (code, asked) == (0, [])
    assert "node[01-02] (2)" in shown
    assert "\r\nroot" in shown
    assert PASSWORD not in shown
    code, shown = terminal([CLUSTERCTL, "run", "--root", "id", "-un"], folder, [(b"sudo password of", b"\x03")])
    assert code == 130  # Ctrl-C ends the question
    assert "interrupted" in shown
    refused = run("run", "--root", "id", "-un", cwd=folder)
    assert refused.returncode == 5
    assert "there is no terminal to ask on" in refused.stderr
    allow(box, FREE)
    again = json.loads(run("run", "--root", "--retry-failed", "--json", "id", "-un", cwd=folder).stdout)
    assert {name: node["out"] for name, node in again["nodes"].items()} == {"node01": "root\n", "node02": "root\n"}


def test_a_deploy_that_was_refused_is_retried_everywhere(make_sandbox, tmp_path):
    """One node is down, so nothing is done on the others either: they are among those to retry."""
    box = make_sandbox(nodes=2)
    dead = f"  dead: {box.nodes[0].address.rpartition('.')[0]}.251\n"
    folder = inventory(box, tmp_path / "work", extra=dead)
    bundle = pack(make_env(tmp_path / "env"), tmp_path / "tiny.ccb")
    refused = run("deploy", bundle, cwd=folder)
    assert refused.returncode == 5
    assert "nothing was changed" in refused.stderr
    file = folder / "inventory.yaml"
    file.write_text(file.read_text().replace(dead, ""))
    assert "node[01-02]: deployed" in run("deploy", "--retry-failed", bundle, cwd=folder).stdout
    assert "nothing to retry" in run("deploy", "--retry-failed", bundle, cwd=folder).stdout
    assert not (folder / ".clusterctl-failed.json").exists()


def wait(true, seconds=60):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)
