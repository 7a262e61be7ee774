"""Ctrl-C at ``clusterctl train``, on a real terminal and without one; the monitor in tmux; a crash's message."""

import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import time

import command
import pytest

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

LONG = ("--output", "out", "steps.py", "--", "--steps", "100000", "--output", "out")


class Terminal:
    """``clusterctl train`` on a new terminal, as a user has it."""

    def __init__(self, folder, *argv):
        self.output = ""
        pid, self.fd = pty.fork()
        if pid == 0:
            os.chdir(folder)
            os.execv(command.CLUSTERCTL, ["clusterctl", *argv])
        self.pid = pid

    def until(self, pattern, seconds=90):
        """Read until the output matches."""
        end = time.monotonic() + seconds
        while not re.search(pattern, self.output):
            assert time.monotonic() < end, f"nothing like {pattern!r}:\n{self.output}"
            if select.select([self.fd], [], [], 0.5)[0]:
                self.output += self._read()

    def type(self, text):
        os.write(self.fd, text.encode())

    def finish(self, seconds=120):
        """The exit code."""
        end = time.monotonic() + seconds
        while piece := self._read():
            self.output += piece
            assert time.monotonic() < end, self.output
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self):
        try:
            return os.read(self.fd, 65536).decode(errors="replace")
        except OSError:  # EIO: the other side has closed the terminal
            return ""


class Tmux:
    """A command in tmux, in a window of 80 x 24."""

    def __init__(self, folder, name, *argv):
        self.name, self.activity = name, folder / f"{name}.activity"
        os.mkfifo(self.activity)
        self.fd = os.open(self.activity, os.O_RDWR)
        shell = f"cd {shlex.quote(str(folder))} && {shlex.join(map(str, argv))}; echo exit code $?; read -r _"
        self.tell("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", shell)
        self.tell("pipe-pane", f"cat >{shlex.quote(str(self.activity))}")

    def tell(self, *words):
        argv = ["tmux", "-u", "-L", self.name, *words]
        return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout

    def until(self, pattern, seconds=90):
        """The screen, once it matches."""
        end = time.monotonic() + seconds
        while not re.search(pattern, screen := self.tell("capture-pane", "-p")):
            assert time.monotonic() < end, f"nothing like {pattern!r}:\n{screen}"
            if select.select([self.fd], [], [], 1.0)[0]:
                os.read(self.fd, 65536)
        return screen

    def press(self, *keys):
        self.tell("send-keys", *keys)

    def close(self):
        subprocess.run(["tmux", "-L", self.name, "kill-server"], capture_output=True, check=False, timeout=20)
        os.close(self.fd)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is missing: scripts/setup installs it")
def test_the_monitor_in_tmux_shows_that_a_killed_rank_was_restarted(plain_nodes):
    run = plain_nodes.detached("--restarts", "1", *LONG, "--save-every", "10")
    screen = Tmux(plain_nodes.folder, f"monitor-{os.getpid()}", command.CLUSTERCTL, "monitor", run, "--every", "0.5")
    try:
        screen.until(r"step [0-9]{2,}/100000")
        screen.press("e")
        screen.until(r"attempt 1 from the start")
        plain_nodes.kill("node02", plain_nodes.rank("node02", run))
        screen.until(r"attempt 2 from \S*checkpoint-[0-9]+0")
        shown = screen.until(r"node02 +1 +running +training")
        assert f"{run}  running, training  2 nodes" in shown
        screen.press("q")
        screen.until(r"exit code 0")
    finally:
        screen.close()
        plain_nodes.run("stop", run)
    assert plain_nodes.marked(run=run) == []
    assert (
        plain_nodes.box.enter(
            "node02", ["sh", "-c", "grep -lz agent.__main_[_] /proc/[0-9]*/cmdline 2>/dev/null"]
        ).stdout
        == ""
    )


def test_ctrl_c_at_a_terminal_asks_and_detaches(plain_nodes):
    terminal = Terminal(plain_nodes.folder, "train", "--nodes", "2", *LONG)
    terminal.until(r"step 3 |\b3/100000")
    terminal.type("\x03")
    terminal.until(r"\[d\]etach")
    terminal.type("d\n")
    assert terminal.finish() == 0, terminal.output
    run = plain_nodes.last_run().name
    assert plain_nodes.marked(run=run)
    assert '"state": "running"' in plain_nodes.run("status", run, "--json").stdout
    nodes = json.loads(plain_nodes.run("top", "--once", "--json").stdout)["nodes"]
    assert sorted(nodes) == ["node01", "node02"]
    assert all(node["cores"] and node["memory"] and node["network"] for node in nodes.values())
    assert plain_nodes.run("stop", run).returncode == 0


def test_ctrl_c_at_a_terminal_asks_and_stops(plain_nodes):
    terminal = Terminal(plain_nodes.folder, "train", "--nodes", "2", *LONG)
    terminal.until(r"step 3 |\b3/100000")
    terminal.type("\x03")
    terminal.until(r"\[d\]etach")
    terminal.type("s\n")
    assert terminal.finish() == 130, terminal.output
    assert plain_nodes.marked(run=plain_nodes.last_run().name) == []
    assert plain_nodes.record()["state"] == "stopped"


def test_an_interrupt_without_a_terminal_stops_every_node(plain_nodes):
    following = plain_nodes.start("train", "--nodes", "2", *LONG, until=r"step 3 ")
    following.send(signal.SIGINT)
    assert following.finish(90) == 130, following.output
    assert "stopped on every node" in following.output
    assert plain_nodes.marked() == []


def test_a_crash_on_one_node_stops_the_other_and_gives_6_with_its_last_lines(plain_nodes):
    words = ("steps.py", "--", "--steps", "100000", "--fail-at", "3", "--fail-rank", "1", "--fail-with", "a bad sample")
    crashed = plain_nodes.start("train", "--nodes", "2", *words, until=r"Training \S+ \.\.\.")
    assert crashed.finish() == 6, crashed.output
    last = crashed.output.partition("every node was stopped")[2]
    assert "node02:" in last
    assert "RuntimeError: a bad sample" in last
    assert plain_nodes.marked() == []
    assert plain_nodes.record()["state"] == "failed"
