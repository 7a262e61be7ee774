"""``clusterctl status`` of a run of many nodes, through the run's agents: one connection of ssh, and the agents' link.

The command, sshd, ``agent statuses``, the link and the agents' part of it are real. An agent here is only that: the
links of all nodes are in a few processes, as in ``scale_link``, and no node trains. Each node has its own folder. A
thousand real scripts at once would need this machine's cores for longer than agents wait. So each node's script runs
once, and prints its output again when it is asked. A node of its own needs 10 ms for the real one.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from scale_link import PATIENCE, PROCESSES, ROOT, plan

RUN = "20261128-010000-sft-1a2b"
RELEASE = "0123456789ab"


class Agents:
    """The agents of a run, of which the first listens to ``agent statuses``; a context manager that ends them."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        """``folder`` is the nodes' root; the first node's folder of the run is in it, as on a node."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        link = {"host": "127.0.0.1", "port": port, "token": secrets.token_hex(32), "nodes": list(names)}
        link["lost_after"] = 600.0
        (folder / "releases" / RELEASE / "bin").mkdir(parents=True)
        (folder / "releases" / RELEASE / "bin/python").symlink_to(Path(sys.executable).resolve())
        (folder / "current").symlink_to(f"releases/{RELEASE}")
        self._children: list[subprocess.Popen[str]] = []
        groups = [[0], *(list(range(1 + first, len(names), PROCESSES)) for first in range(PROCESSES))]
        for ranks in groups:
            argv, env = [sys.executable, __file__], dict(os.environ, PYTHONPATH=str(ROOT))
            child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
            self._children.append(child)
            assert child.stdin
            child.stdin.write(json.dumps([str(folder), ranks, link]) + "\n")
            child.stdin.flush()
        for child in self._children:
            assert child.stdout
            child.stdout.readline()

    @property
    def hub(self) -> int:
        """The process of the first agent."""
        return self._children[0].pid

    def __enter__(self) -> "Agents":  # noqa: PYI034 - Self is of Python 3.11
        return self

    def __exit__(self, *_error: object) -> None:
        for child in self._children:
            child.kill()
            child.communicate()


def node_folder(folder: Path, rank: int) -> Path:
    """A node's folder of the run. The first is where its node's command finds it."""
    return (folder if rank == 0 else folder / f"of-{rank}") / "runs" / RUN


def _process(folder: Path, ranks: Sequence[int], link: dict[str, Any]) -> None:
    """A child: serves until its input ends."""
    from provision.model import Inventory, Node  # noqa: PLC0415 - only children need the agent
    from provision.tasks.status import status_script  # noqa: PLC0415
    from trainer.agent.contract.statuses import SCRIPT  # noqa: PLC0415
    from trainer.agent.link.link import Link  # noqa: PLC0415
    from trainer.agent.run_files import NodePlan, State  # noqa: PLC0415
    from trainer.agent.statuses import Statuses  # noqa: PLC0415

    names = link["nodes"]
    nodes = tuple(Node(name, name) for name in names)
    woken = threading.Event()
    served = []
    for rank in ranks:
        there = node_folder(folder, rank)
        data = plan(rank, link)._replace(run=RUN, logs=f"logs/node{rank}")
        mine = NodePlan(data, there, there / f"plan-{rank}.json")
        mine.logs.mkdir(parents=True)
        root = PurePosixPath(there.parents[1])
        inventory = Inventory(path=there / "inventory.yaml", prefix=root / "current", nodes=nodes)
        (there / SCRIPT).write_text(status_script(inventory))
        state = State(mine.logs, run=RUN, node=names[rank], node_rank=rank, nnodes=len(names), pid=os.getpid())
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        state.set(state="running", start=stat[19], step=1000, total=9000, loss=2.5, phase="training")
        sample = json.dumps({"time": time.time(), "step": 1000, "gpus": [{"busy": 97, "memory": 0.9}] * 8})
        (mine.logs / "metrics.jsonl").write_text((sample + "\n") * 30)
        script = subprocess.run(["sh", there / SCRIPT], capture_output=True, check=True)
        (there / "answer").write_bytes(script.stdout)
        (there / SCRIPT).write_text(f"exec cat {there}/answer\n")
        if rank == 0:
            mine.path.write_text(data.to_json())
            (there / "release").write_text(str(folder / "releases" / RELEASE) + "\n")
            (there / "agent").symlink_to(ROOT / "trainer/agent")
        joined = Link(data, woken.set)
        joined.start()
        served.append((joined, Statuses(mine, joined.send)))
    if 0 in ranks:
        signal.signal(signal.SIGUSR2, lambda *_: served[0][1].asked_here())
    until = time.monotonic() + PATIENCE
    while 0 not in ranks and time.monotonic() < until:
        if all(peer.connection for each, _ in served for peer in each.endpoint.peers.values()):
            break
        time.sleep(0.01)
    threading.Thread(target=_serve, args=(served, woken), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


def _serve(served: Sequence[Any], woken: threading.Event) -> None:
    from trainer.agent.contract.statuses import ANSWER, QUESTION  # noqa: PLC0415 - only children need the agent

    while True:
        woken.wait()
        woken.clear()
        for link, statuses in served:
            for message in link.take():
                if message["kind"] == QUESTION:
                    statuses.asked(message["rank"], message["number"])
                elif message["kind"] == ANSWER:
                    statuses.take(message["node"], message["number"], message)


if __name__ == "__main__":
    _folder, _ranks, _link = json.loads(sys.stdin.readline())
    _process(Path(_folder), _ranks, _link)
