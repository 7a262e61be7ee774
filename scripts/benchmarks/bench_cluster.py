"""Nodes to measure on: a rehearsal cluster, deploys to it, and the bytes that cross the controller's link."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_measure import PIPE, BenchError, Done, Job, Usage, progress, run

from provision import sandbox
from provision.errors import ClusterctlError

PACKAGES = ("zstd", "rsync")  # for the peers; clusterctl uses zstd if it exists
# clusterctl uses the same cipher.
CONFIG = """\
Host *
  User root
  IdentityFile {key}
  IdentitiesOnly yes
  BatchMode yes
  StrictHostKeyChecking yes
  UserKnownHostsFile {known_hosts}
  GlobalKnownHostsFile /dev/null
  Ciphers aes128-gcm@openssh.com
"""


@dataclass(frozen=True)
class Deploy:
    """A successful deploy: its cost, its --json result, and the bytes that left the controller."""

    usage: Usage
    answer: dict[str, Any]
    sent: int

    @property
    def seconds(self) -> float:
        """Seconds from the first look at the node's releases until the new one is compiled, read-only and flushed."""
        seconds, steps = self.answer["seconds"], self.answer["steps"]
        compiling = steps.get("compile", 0)  # no such step if all compiled files were sent
        return float(seconds["gather"] + seconds["send"] + steps["complete"] + compiling + steps["seal"])

    @property
    def bytes_sent(self) -> int:
        return int(self.answer["bytes_sent"])


class Cluster:
    """Nodes with sshd, tar, zstd and rsync; a context manager that stops them."""

    def __init__(self, clusterctl: Path, folder: Path, nodes: int, link: str | None = None) -> None:
        folder.mkdir()
        self.folder = folder
        self.link = link
        self._clusterctl = clusterctl
        self._stack = ExitStack()
        with progress(f"{nodes} nodes{f' at {link}' if link else ''}"):
            try:
                name = f"bench-{os.getpid()}-{folder.name.removeprefix('nodes-')}"
                self.box = self._stack.enter_context(
                    sandbox.up(sandbox.Options(nodes=nodes, name=name, packages=PACKAGES, link=link, directory=folder))
                )
            except ClusterctlError as error:
                raise BenchError(
                    f"no rehearsal cluster: {error}" + (f" ({error.hint})" if error.hint else "")
                ) from error
        self.names = [node.name for node in self.box.nodes]
        hosts = "".join(f"Host {node.name}\n  HostName {node.address}\n" for node in self.box.nodes)
        self.ssh_config = folder / "ssh_config"
        self.ssh_config.write_text(hosts + CONFIG.format(key=self.box.key, known_hosts=self.box.known_hosts))

    def __enter__(self) -> "Cluster":  # noqa: PYI034 - Self is of Python 3.11
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def sent(self) -> int:
        """Bytes that have left the controller through its link, without those that nodes send each other."""
        device = self.box.state.uplink[0]
        return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())

    def start(self, bundle: Path, root: str, *, limit: str | None = None) -> Job:
        """``clusterctl deploy`` to ``/opt/ROOT``, started."""
        argv = [self._clusterctl, "deploy", "--json", "--inventory", self._inventory(root), bundle]
        return Job([*argv, *(("--limit", limit) if limit else ())], cwd=self.folder)

    def deploy(self, bundle: Path, root: str, *, limit: str | None = None) -> Deploy:
        """``clusterctl deploy`` to ``/opt/ROOT``.

        Raises:
            BenchError: it failed.
        """
        before = self.sent()
        done = self.start(bundle, root, limit=limit).finish()
        return Deploy(done.usage, json.loads(done.out), self.sent() - before)

    def _inventory(self, root: str) -> Path:
        """The cluster's inventory with the prefix ``/opt/ROOT/current``."""
        folder = self.folder / root
        if not folder.exists():
            folder.mkdir()
            for path in (self.box.key, self.box.known_hosts):
                shutil.copy2(path, folder)
            text = self.box.inventory.read_text()
            text = re.sub(r"(?m)^prefix: .*$", f"prefix: /opt/{root}/current", text)
            (folder / "inventory.yaml").write_text(text)
        return folder / "inventory.yaml"

    def clear(self, *roots: str) -> None:
        """Removes ``/opt/ROOT`` from every node, and waits until all disks are at rest."""
        for name in self.names:
            done = self.box.enter(name, ["rm", "-rf", *(f"/opt/{root}" for root in roots)])
            if done.returncode:
                raise BenchError(f"{name} cannot be cleared: {done.stderr.strip()}")
        os.sync()

    def on_each(self, script: str, *arguments: str | Path, names: Sequence[str] = ()) -> Done:
        """Runs a bash script on this machine for all nodes at once, with ``$node`` and ``$F``, the ssh_config.

        Raises:
            BenchError: it failed for one of them.
        """
        nodes = " ".join(names or self.names)
        return run([*PIPE, _EACH.format(config=self.ssh_config, nodes=nodes, script=script), "bash", *arguments])


_EACH = """
F={config} pids=() status=0
for node in {nodes}; do ( {script} ) & pids+=($!); done
for pid in "${{pids[@]}}"; do wait "$pid" || status=1; done
exit $status
"""
