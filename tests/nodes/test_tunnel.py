"""A port of a node on this machine: real sshd, real programs, and every way in which the tunnel ends."""

import hashlib
import re
import signal
import socket
import urllib.request
from contextlib import ExitStack

import pytest
from training import Attached, wait_until

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(300)]

# Answers a whole request with its length and digest, after the client has ended its direction.
DIGEST = """\
import hashlib, socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    while True:
        near, _ = server.accept()
        with near:
            digest, size = hashlib.sha256(), 0
            while data := near.recv(1 << 16):
                digest.update(data)
                size += len(data)
            near.sendall(b"%d %s" % (size, digest.hexdigest().encode()))
"""
# A web server with a child that has left its session.
STRAY = "setsid sleep 3600 & exec python -m http.server --bind 127.0.0.1 {port}"


@pytest.fixture
def tunnel(plain_nodes):
    """Starts a tunnel: the running command, and its port on this machine."""
    with ExitStack() as stack:
        yield lambda *argv: opened(plain_nodes, stack, argv)


def opened(nodes, stack, argv):
    attached = Attached(nodes, ["tunnel", *argv], r"; to end it: Ctrl-C")
    stack.callback(attached.end)
    return attached, int(re.search(r"^http://127\.0\.0\.1:([0-9]+)/", attached.output, re.MULTILINE)[1])


def left(nodes, pattern):
    return nodes.on("node01", "sh", "-c", f"pgrep -f '{pattern}' || true").split()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_program_and_its_children_end_with_the_tunnel(plain_nodes, tunnel, number):
    attached, port = tunnel("node01", "--", "sh", "-c", STRAY)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
        assert b"Directory listing" in answer.read()
    assert left(plain_nodes, "[h]ttp.server")
    assert left(plain_nodes, "[s]leep 3600")
    attached.send(number)
    code = attached.finish()
    wait_until(lambda: not left(plain_nodes, "[h]ttp.server|[s]leep 3600"), "the program has exited", 30)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 0), attached.output


def test_a_half_closed_connection_of_many_bytes_is_complete(tunnel):
    attached, port = tunnel("node01", "--", "python", "-c", DIGEST, "{port}")
    data = bytes(range(256)) * 4096 * 16
    with socket.create_connection(("127.0.0.1", port), timeout=60) as near:
        near.sendall(data)
        near.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: near.recv(4096), b"")).decode()
    assert answer == f"{len(data)} {hashlib.sha256(data).hexdigest()}"
    attached.send(signal.SIGINT)
    assert attached.finish() == 0


def test_the_end_of_the_program_ends_the_tunnel_with_its_output(plain_nodes):
    result = plain_nodes.run("tunnel", "node01", "--", "sh", "-c", "echo no model {port}; exit 7")
    assert result.returncode == 5
    assert re.search(r"sh ended with status 7 before its port [0-9]+ was open\s+no model [0-9]+", result.stderr)


def test_what_cannot_be_forwarded_is_refused_with_the_next_command(plain_nodes):
    nothing = plain_nodes.run("tunnel", "node01:9")
    assert nothing.returncode == 5
    assert "no process listens on 127.0.0.1:9" in nothing.stderr
    assert "clusterctl tunnel node01:9 -- CMD" in nothing.stderr
    with socket.create_server(("127.0.0.1", 0)) as mine:
        taken = mine.getsockname()[1]
        result = plain_nodes.run("tunnel", "--port", str(taken), "node01:22")
    assert result.returncode == 2
    assert f"port {taken} of this machine cannot be used" in result.stderr
    assert re.search(r"another one: --port [0-9]+", result.stderr)
    absent = plain_nodes.run("jupyter")
    assert absent.returncode == 2
    assert "the release has no jupyter-lab" in absent.stderr
    assert "pip install jupyterlab" in absent.stderr


def test_a_program_that_other_machines_can_reach_is_reported(tunnel):
    attached, _ = tunnel("node01", "--", "python", "-m", "http.server", "{port}")
    attached.send(signal.SIGINT)
    attached.finish()
    assert "listens on every address of node01" in attached.output


def test_a_program_that_is_running_already_is_forwarded(tunnel):
    attached, port = tunnel("node01:22")
    with socket.create_connection(("127.0.0.1", port), timeout=30) as near:
        assert near.recv(4) == b"SSH-"
    attached.send(signal.SIGINT)
    assert attached.finish() == 0, attached.output
