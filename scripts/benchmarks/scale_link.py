"""The agents' link with a real hub and real spokes: what rank 0's agent needs for a run of many nodes.

The hub has a process for itself, so its CPU time and memory are its own. The spokes are ``Link`` objects of a few other
processes: the real protocol over 127.0.0.1, a thread for each. What they need is not the hub's, but they share the
machine with it, so wall times here are upper bounds.
"""

import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROCESSES = max(4, (os.cpu_count() or 1) - 1)  # of spokes; the hub has one for itself
PATIENCE = 300.0  # seconds for what takes seconds
AT_ONCE = 16  # spokes of a process that connect
IDLE = 10.0  # seconds of heartbeats that are measured


def plan(rank: int, link: dict[str, Any]) -> Any:
    """A plan with this link."""
    from trainer.agent.contract.plan import from_object  # noqa: PLC0415 - only children need the agent

    fields = {"version": 2, "run": "r", "node": link["nodes"][rank], "argv": ["x"], "env": {}}
    return from_object(fields | {"node_rank": rank, "nnodes": len(link["nodes"]), "link": link})


class _Spokes:
    """The links of one process, and a condition that is notified when a message arrives."""

    def __init__(self, ranks: Sequence[int], link: dict[str, Any]) -> None:
        from trainer.agent.link.link import Link  # noqa: PLC0415 - only children need the agent

        self.changed = threading.Condition()
        self.links = [Link(plan(rank, link), self._wake) for rank in ranks]
        self.kinds = [dict[str, int]() for _ in self.links]
        for first in range(0, len(self.links), AT_ONCE):
            some = self.links[first : first + AT_ONCE]
            for each in some:
                each.start()
            # All at once, the threads of this process would take seconds for handshakes that a node does in one.
            until = time.monotonic() + PATIENCE
            while not all(self._connected(each) for each in some) and time.monotonic() < until:
                time.sleep(0.01)

    @staticmethod
    def _connected(link: Any) -> bool:
        return all(peer.connection is not None for peer in link.endpoint.peers.values()) or link.endpoint.rank == 0

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def meet(self) -> None:
        """All meet, in a thread each."""
        threads = [threading.Thread(target=each.meet, args=({}, lambda _: {}, PATIENCE)) for each in self.links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def wait(self, kind: str, count: int) -> None:
        """Wait until every link has received so many messages of a kind."""

        def complete() -> bool:
            for link, kinds in zip(self.links, self.kinds, strict=True):
                for message in link.take():
                    kinds[message["kind"]] = kinds.get(message["kind"], 0) + 1
            return all(kinds.get(kind, 0) >= count for kinds in self.kinds)

        with self.changed:
            while not complete():
                if not self.changed.wait(PATIENCE):
                    raise TimeoutError(f"only {self.kinds[0]} arrived")


def _process(ranks: Sequence[int], link: dict[str, Any]) -> None:
    """A child: carries out the commands of its input, and answers each with its CPU seconds and memory."""
    mine = _Spokes(ranks, link)
    for line in sys.stdin:
        word, *values = json.loads(line)
        if word == "meet":
            mine.meet()
        elif word == "wait":
            mine.wait(*values)
        elif word == "send":
            for each in mine.links[: values[1]]:
                each.send(values[0], attempt=1, failed=0, text="a rank failed: exit code 1", **values[2])
        usage = resource.getrusage(resource.RUSAGE_SELF)
        answer = [usage.ru_utime + usage.ru_stime, usage.ru_maxrss >> 10, len(list(Path("/proc/self/fd").iterdir()))]
        print(json.dumps(answer), flush=True)


class _Child:
    def __init__(self, ranks: Sequence[int], link: dict[str, Any]) -> None:
        argv, env = [sys.executable, __file__], dict(os.environ, PYTHONPATH=str(ROOT))
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.ask(list(ranks), link)

    def ask(self, *words: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def answer(self) -> tuple[float, int, int]:
        assert self.process.stdout
        cpu, memory, files = json.loads(self.process.stdout.readline())
        return cpu, memory, files


class _Agents:
    """All agents of a run, in a few processes; a context manager that ends them."""

    def __init__(self, count: int, most: int | None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        names = [f"n{rank + 1:04}" for rank in range(count)]
        link = {"host": "127.0.0.1", "port": port, "token": secrets.token_hex(32), "nodes": names, "lost_after": 600.0}
        link["most"] = most
        self.found: dict[str, float] = {}
        self.hub = _Child([0], link)
        before = self.look()[0]
        began = time.monotonic()
        self.others = [_Child(range(1 + first, count, PROCESSES), link) for first in range(min(PROCESSES, count - 1))]
        tell(self.others, "look")
        self.found["connect, s"] = time.monotonic() - began
        self.found["connect, hub CPU s"] = self.look()[0] - before

    def look(self) -> tuple[float, int, int]:
        """The hub's CPU seconds, memory in MB and open files."""
        self.hub.ask("look")
        return self.hub.answer()

    def measure(self, name: str, some: Sequence[_Child], *words: Any) -> None:
        """Let processes carry out a command, and note its seconds and the hub's CPU time."""
        before, began = self.look()[0], time.monotonic()
        tell(some, *words)
        self.found[f"{name}, s"] = time.monotonic() - began
        self.found[f"{name}, hub CPU s"] = self.look()[0] - before

    def __enter__(self) -> "_Agents":  # noqa: PYI034 - Self is of Python 3.11
        return self

    def __exit__(self, *_error: object) -> None:
        for child in [self.hub, *self.others]:
            child.process.kill()
            child.process.communicate()


def tell(children: Sequence[_Child], *words: Any) -> None:
    """Give processes a command, and wait until all have carried it out."""
    for child in children:
        child.ask(*words)
    for child in children:
        child.answer()


def measure(count: int, most: int | None = None) -> dict[str, float]:
    """What the hub of ``count`` nodes needs.

    Args:
        count: the agents, with the hub's.
        most: so many are connected to the hub, which serve the others; None: what a run has.

    Returns:
        By name: seconds of wall and of the hub's CPU time, its memory in MB and its file descriptors.
    """
    with _Agents(count, most) as agents:
        everyone, found = [agents.hub, *agents.others], agents.found
        agents.measure("meet", everyone, "meet")
        agents.measure("meet again", everyone, "meet")
        before, found["memory, MB"], found["files"] = agents.look()
        threading.Event().wait(IDLE)
        found["heartbeats, % of a core"] = 100 * (agents.look()[0] - before) / IDLE
        if len(agents.others) > 1:
            tell(agents.others[:1], "send", "failed", 1, {})
            agents.measure("one failure reaches all", [agents.hub, *agents.others[1:]], "wait", "failed", 1)
        tell(agents.others, "send", "ended", count, {"to": 0})
        agents.measure("all end", [agents.hub], "wait", "ended", count - 1)
        agents.measure("and meet", everyone, "meet")
        found["memory at the end, MB"] = agents.look()[1]
    return found


if __name__ == "__main__":
    _process(*json.loads(sys.stdin.readline()))
