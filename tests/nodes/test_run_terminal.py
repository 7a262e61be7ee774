"""Ctrl-C at ``clusterctl train``, on a real terminal and without one; and the message about a crash."""

import json
import os
import pty
import re
import select
import signal
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
