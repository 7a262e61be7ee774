"""Links of a run over 127.0.0.1 for tests: in this process, or in children; a clock, and a network that breaks."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from agents import plan_of

from trainer.agent.link import door, endpoint, meeting, spoke
from trainer.agent.link import hub as hubs
from trainer.agent.link import link as links
from trainer.agent.link.link import Link

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("AGENT_PYTHON", sys.executable)  # to try the agent under an older Python
TOKEN = "0123456789abcdef" * 4

PATIENCE = 60.0  # seconds for what takes milliseconds: only a mistake takes so long, however busy the machine

# A separate agent: meets, prints that, and runs until its stdin ends. Its heartbeats are quick.
CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from trainer.agent.link import endpoint, spoke
from trainer.agent.contract.plan import from_json
from trainer.agent.link.link import Link
endpoint.BEAT = endpoint.TICK = 0.02
spoke.REACH = 60.0
link = Link(from_json(sys.argv[2]), lambda: None)
link.start()
link.meet({}, lambda _: {}, 60)
print("met", flush=True)
sys.stdin.read()
link.close()
"""


def free_port(host="127.0.0.1"):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]


class Cluster:
    """Plans of one run, and the links that a test has made of them."""

    def __init__(self, count, host="127.0.0.1", lost_after=60.0, most=None):
        self.names = [f"n{rank}" for rank in range(count)]
        self.link = {"host": host, "port": free_port(host), "token": TOKEN, "nodes": self.names}
        self.link.update(lost_after=lost_after, most=most)
        self.links = {}
        self.children = []

    def plan(self, rank, **link):
        return plan_of(run="r1", node=self.names[rank], node_rank=rank, link=self.link | link)

    def start(self, rank, wake=lambda: None, **link):
        made = Link(self.plan(rank, **link), wake)
        made.start()
        self.links[rank] = made
        return made

    def child(self, rank, **link):
        argv = [PYTHON, "-IB", "-c", CHILD, ROOT, self.plan(rank, **link).to_json()]
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.children.append(child)
        return child

    def meet(self, decide=lambda _: {}, patience=600.0, before_rank_0=lambda: True):
        """All links of this process meet; the results (or what was raised) by rank.

        Rank 0 joins when ``before_rank_0()`` is true; only its ``patience`` ends.
        """
        results = {}

        def meet(rank, link):
            try:
                results[rank] = link.meet({"from": rank}, decide, 600.0 if rank else patience)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                results[rank] = error

        threads = {rank: threading.Thread(target=meet, args=(rank, link)) for rank, link in self.links.items()}
        for rank in sorted(threads, reverse=True):
            if rank == 0:
                eventually(before_rank_0)
            threads[rank].start()
        for thread in threads.values():
            thread.join(PATIENCE)
        return results

    def close(self):
        for child in self.children:
            child.kill()
            child.wait()
            child.stdin.close()
            child.stdout.close()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(links, "GOODBYE", 0.2)  # a test that asks for more has closed its link
            closing = [threading.Thread(target=link.close) for link in self.links.values()]
            for thread in closing:
                thread.start()
            for thread in closing:
                thread.join(20)


@contextlib.contextmanager
def _closed_later(kind, **defaults):
    """Makes objects of a class, and closes them."""
    made = []

    def make(*arguments, **options):
        made.append(kind(*arguments, **defaults | options))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.close()


def clusters(**defaults):
    """Makes clusters, and closes them."""
    return _closed_later(Cluster, **defaults)


class Clock:
    """The time that the links of this process see. Stopped, it moves only by ``advance``, however busy the machine is.

    With every step each link has heard what the others had sent and has looked at the clock before the next step.
    """

    STEP = 0.3  # more than a tick, and less than what a link takes for a stop of this process

    def __init__(self):
        self._stopped_at = None
        self._ahead = 0.0

    def __getattr__(self, name):
        return getattr(time, name)

    def monotonic(self):
        stopped_at = self._stopped_at
        return time.monotonic() if stopped_at is None else stopped_at

    def stop(self):
        self._stopped_at = time.monotonic()

    def advance(self, seconds, *seen_by):
        """Let time pass for these links, of which each looks at the clock meanwhile."""
        steps = math.ceil(seconds / self.STEP)
        for _ in range(steps):
            self._stopped_at += seconds / steps
            for link in seen_by * 2:  # the second time each has read what the others sent the first time
                for _ in range(2):  # posted work is done before the look at the clock
                    looked = threading.Event()
                    link.endpoint.loop.post(looked.set)
                    assert looked.wait(PATIENCE)

    def until(self, true, *seen_by):
        """Let time creep until it is: far less of it passes than real time, and every step is a tick."""
        return eventually(lambda: self.advance(0.02, *seen_by) or true())


def clock_of_links(monkeypatch):
    """Let the links of this process see a clock of the test's."""
    made = Clock()
    for module in (endpoint, door, hubs, meeting, spoke):
        monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(endpoint, "TICK", 0.01)
    monkeypatch.setattr(endpoint, "HURRY", 0.01)
    return made


def eventually(test):
    limit = time.monotonic() + PATIENCE
    while not (found := test()):
        assert time.monotonic() < limit, "did not happen"
        time.sleep(0.01)
    return found


def come(link):
    """The messages that have come and that no test has looked at."""
    kept = link.__dict__.setdefault("kept_by_test", [])
    kept += link.take()
    return kept


def coming(link, kind, node=None):
    """The next message of this kind. Others that came before it are dropped."""

    def found():
        kept = come(link)
        while kept:
            message = kept.pop(0)
            if message["kind"] == kind and node in (None, message.get("node")):
                return message
        return None

    return eventually(found)


def kinds(link):
    """The kinds of the messages that have come; they are dropped."""
    found = [message["kind"] for message in come(link)]
    link.__dict__["kept_by_test"].clear()
    return found


class Proxy:
    """Forwards to a port while ``flowing`` is set; keeps accepting."""

    def __init__(self, port):
        self.flowing = threading.Event()
        self.flowing.set()
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                with self._lock:
                    self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source, target):
        with contextlib.suppress(OSError):
            while True:
                data = source.recv(65536)
                self.flowing.wait()
                if not data:
                    break
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def cut(self):
        """End every connection, and lose the bytes in transit."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def close(self):
        self.flowing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


def proxies():
    """Makes proxies, and closes them."""
    return _closed_later(Proxy)
