"""What all figures share: the settings of this run, and the files and environments that several of them need."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import bench_envs
from bench_cluster import Cluster
from bench_measure import PIPE, progress, run

T = TypeVar("T")
SMALL_DATA = 24 << 20  # of the quick environment
KEEP = "data that do not compress"


@dataclass
class Context:
    """Settings, and a folder ``work`` for everything that is made and goes at the end."""

    clusterctl: Path
    work: Path
    variant: str  # cpu, cuda or small
    runs: int
    nodes: int
    peer_nodes: int
    link: str
    payload: int  # bytes of data in the environment that is sent to many nodes
    large: int  # bytes of the file for the peak of memory
    _made: dict[str, Any] = field(default_factory=dict)

    def once(self, key: str, make: Callable[[], T]) -> T:
        """What ``make`` returns, made when it is first asked for."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @property
    def env(self) -> bench_envs.Env:
        """The environment that is packed and unpacked."""

        def make() -> bench_envs.Env:
            with progress(f"environment: {self.variant}"):
                if self.variant == "small":
                    return bench_envs.small(self.work / "small", data=SMALL_DATA)
                return bench_envs.lab(self.variant)

        return self.once("env", make)

    @property
    def many(self) -> bench_envs.Env:
        """The environment that is sent to many nodes of one machine: few files, and data that do not compress.

        Sixteen nodes that unpack 60,000 files each would be bound by the machine's cores and its one disk, not by
        their links, which is what the figure is about.
        """

        def make() -> bench_envs.Env:
            with progress(f"environment: small, with {self.payload / 1e6:.0f} MB of {KEEP}"):
                return bench_envs.small(self.work / "many", data=self.payload)

        return self.once("many", make)

    def bundle(self, env: bench_envs.Env) -> Path:
        """The environment, packed by the product."""
        return self.once(f"bundle of {env.prefix}", lambda: self._pack(env, []))

    def pack(self, env: bench_envs.Env, place: list[str], name: str) -> Path:
        """The environment as it looks from ``place`` (see ``bench_envs``), packed by the product."""
        return self._pack(env, place, name)

    def _pack(self, env: bench_envs.Env, place: list[str], name: str = "bundle") -> Path:
        out = self.work / f"{env.home.name}-{name}.ccb"
        with progress(f"clusterctl pack-env -o {out.name}"):
            run([*place, self.clusterctl, "pack-env", env.prefix, "-o", out])
        return out

    def archive(self, env: bench_envs.Env) -> Path:
        """The environment with its checkout, packed by ``tar | zstd -T0 -3``."""

        def make() -> Path:
            out = self.work / f"{env.home.name}.tar.zst"
            with progress(f"tar | zstd -T0 -3 -o {out.name}"):
                run(tar_zstd(env, out))
            return out

        return self.once(f"archive of {env.prefix}", make)

    def cluster(self, name: str, nodes: int, link: str | None = None) -> Cluster:
        """Nodes; use it in a ``with`` block."""
        return Cluster(self.clusterctl, self.work / f"nodes-{name}", nodes, link)


def tar_zstd(env: bench_envs.Env, out: Path) -> list[str | Path]:
    """``tar c ENV SRC | zstd -T0 -3``, with names relative to the root folder."""
    trees = [os.path.relpath(path, "/") for path in (env.prefix, env.checkout)]
    return [*PIPE, 'out=$1; shift; tar -C / -cf - "$@" | zstd -q -T0 -3 -f -o "$out"', "bash", out, *trees]
