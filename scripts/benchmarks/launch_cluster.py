"""Nodes that see this machine's environment, and `clusterctl train` on them as a user types it."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench_machine
import launch_proc
from bench_measure import BenchError, Done, run

from provision import sandbox
from provision.sandbox import Sandbox

PATIENCE = 300.0  # seconds for a start: many nodes import torch on the cores of one machine
CODE = "code"  # the folder that is sent with every run
TRAINERS = (
    bench_machine.ROOT / "tests/nodes/trainers/tiny.py",
    bench_machine.ROOT / "scripts/benchmarks/launch_trainer.py",
)
TINY, PLAIN = (f"{CODE}/{path.name}" for path in TRAINERS)
RUN = r"Training (\d\S+) \.\.\."  # the line with the run's id


class Lines:
    """A process whose lines are read as they arrive, each with its time in seconds since the epoch."""

    def __init__(self, argv: Sequence[str | Path], *, cwd: Path) -> None:
        self.process = subprocess.Popen(
            [str(word) for word in argv],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._lines: list[tuple[float, str]] = []
        self._turn = threading.Condition()
        self._over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                with self._turn:
                    self._lines.append((time.time(), line.rstrip("\n")))
                    self._turn.notify_all()
        with self._turn:
            self._over = True
            self._turn.notify_all()

    @property
    def text(self) -> str:
        with self._turn:
            return "\n".join(line for _, line in self._lines)

    def until(self, pattern: str, patience: float = PATIENCE) -> tuple[float, re.Match[str]]:
        """The time of the first line that matches the pattern, and the match.

        Raises:
            BenchError: it exited without one, or ``patience`` seconds have passed.
        """
        seen, end = 0, time.monotonic() + patience
        with self._turn:
            while True:
                for came, line in self._lines[seen:]:
                    if found := re.search(pattern, line):
                        return came, found
                seen = len(self._lines)
                if self._over or (not self._turn.wait(end - time.monotonic()) and time.monotonic() >= end):
                    last = "; ".join(line for _, line in self._lines[-6:])
                    raise BenchError(f"nothing like {pattern!r}: {last}")

    def finish(self, patience: float = PATIENCE) -> int:
        """Its exit status.

        Raises:
            BenchError: it runs for longer than ``patience`` seconds.
        """
        try:
            status = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            raise BenchError(
                f"it is still running after {patience:g} s: {shlex.join(map(str, self.process.args))}"
            ) from None  # type: ignore[arg-type]
        self._reader.join(10)
        return status

    def end(self) -> None:
        """Kill it and everything in its session, if it is still running."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(10)


@dataclass
class Cluster:
    """Use it in a ``with`` block, which always ends nodes, runs and commands."""

    clusterctl: Path
    folder: Path
    prefix: Path
    nodes: int
    _commands: list[Lines] = field(default_factory=list)

    def __enter__(self) -> "Cluster":  # noqa: PYI034 - no class derives from it
        self.folder.mkdir()
        (self.folder / CODE).mkdir()
        for path in TRAINERS:
            shutil.copy(path, self.folder / CODE)
        self.box: Sandbox = sandbox.up(
            sandbox.Options(
                nodes=self.nodes,
                name=f"bench-l-{os.getpid()}",
                rootfs="host",
                directory=self.folder,
                prefix=str(self.prefix),
            )
        )
        self.names = [node.name for node in self.box.nodes]
        self.ssh_config = self.folder / "ssh_config"
        hosts = "".join(f"Host {node.name}\n  HostName {node.address}\n" for node in self.box.nodes)
        self.ssh_config.write_text(
            f"{hosts}Host *\n  User root\n  IdentityFile {self.box.key}\n  IdentitiesOnly yes\n  BatchMode yes\n"
            f"  UserKnownHostsFile {self.box.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
            f"  ControlMaster auto\n  ControlPersist 600\n  ControlPath {self.folder}/%n.ssh\n"
        )
        return self

    def __exit__(self, *_: object) -> None:
        for command in self._commands:
            command.end()
        self.box.down()

    def command(self, *words: str) -> Lines:
        """``clusterctl WORDS``, started. It is killed with the cluster at the latest."""
        return self.start([self.clusterctl, *words])

    def start(self, argv: Sequence[str | Path]) -> Lines:
        """Any command, started."""
        self._commands.append(lines := Lines(argv, cwd=self.folder))
        return lines

    def finished(self, *words: str) -> Done:
        """``clusterctl WORDS``, to its end.

        Raises:
            BenchError: it failed.
        """
        return run([self.clusterctl, *words], cwd=self.folder)

    def train(self, *words: str, nodes: int | None = None) -> "Run":
        """``clusterctl train`` on the first ``nodes`` nodes, once it has printed the run's id."""
        lines = self.command("train", "--nodes", str(nodes or self.nodes), *words)
        return Run(self, lines, lines.until(RUN)[1][1], self.names[: nodes or self.nodes])

    def ssh(self, node: str, script: str) -> Lines:
        """A command on a node through the system's ssh, over a connection that lasts: see ssh_config(5)."""
        return self.start(["ssh", "-F", self.ssh_config, node, script])


@dataclass(frozen=True)
class Run:
    """A run that has started, with the command that follows it."""

    cluster: Cluster
    lines: Lines
    id: str
    names: Sequence[str]

    def processes(self) -> list[launch_proc.Process]:
        return launch_proc.of_run(self.id, self.names)

    def processes_until(self, kind: launch_proc.Kind, nodes: Sequence[str]) -> list[launch_proc.Process]:
        """All processes, as soon as each of ``nodes`` has one of that kind.

        Raises:
            BenchError: this never happens.
        """
        end = time.monotonic() + PATIENCE
        while not all(launch_proc.only(found := self.processes(), kind, node) for node in nodes):
            if time.monotonic() > end or self.lines.process.poll() not in (None, 0):
                raise BenchError(f"no {kind} on every node: {self.lines.text[-600:]}")
            time.sleep(launch_proc.LOOK)
        return found

    def record(self) -> Mapping[str, Any]:
        """clusterctl's record of the run."""
        return json.loads((self.cluster.folder / "runs" / self.id / "run.json").read_text())

    def events(self, node: str) -> list[dict[str, Any]]:
        """The events of a node's agent so far."""
        folder = str(self.record()["folder"]).lstrip("/")
        path = self.cluster.box.node_root(node) / folder / f"logs/node{self.names.index(node)}/events.jsonl"
        whole = path.read_text(errors="replace").rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def over(self, patience: float) -> tuple[float, Sequence[launch_proc.Process]]:
        """Seconds until no process of it is left on any node, agents included; and the processes that are left."""
        return launch_proc.gone(self.processes, patience)
