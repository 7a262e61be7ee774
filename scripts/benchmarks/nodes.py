#!/usr/bin/env python3
"""scripts/bench nodes: a second pass over many nodes beside pyinfra and Ansible, and a check of 64 nodes."""

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import bench_machine
from bench_cluster import CONFIG
from bench_measure import BenchError, Series, Usage, alternate, progress, run
from bench_table import Figure, Measured, Outcome, as_json, notes, row, table
from latency import delayed
from nodes_peers import Sides, install, sessions, versions

from provision import sandbox
from provision.errors import ClusterctlError

FIGURES = {
    figure.name: figure
    for figure in (
        Figure(
            "second-pyinfra",
            "second pass of 4 steps on {nodes} nodes, against pyinfra",
            judged="speedup",
            must=2,
            aim=4,
        ),
        Figure(
            "second-ansible",
            "the same, against Ansible with pipelining and forks = 32",
            judged="speedup",
            must=8,
            aim=12,
        ),
        Figure(
            "second-latency",
            "the same against pyinfra, with {latency:g} ms of round-trip time",
            judged="speedup",
            must=2,
            aim=4,
        ),
        Figure("round-trips", "round trips a stage", "count", judged="ours", must=2, aim=1),
        Figure("check", "check at level 0, all checks, {check_nodes} nodes", judged="ours", must=10, aim=5),
    )
}


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    words = {"nodes": arguments.nodes, "check_nodes": arguments.check_nodes, "latency": arguments.latency}
    try:
        with tempfile.TemporaryDirectory(prefix="clusterctl-bench-", dir=arguments.work) as work:
            folder = Path(work)
            peers = install(Path(arguments.peers) if arguments.peers else folder / "peers")
            above = [
                f"machine: {bench_machine.machine(folder)}",
                f"versions: {bench_machine.versions(arguments.clusterctl)}, {versions(peers)}",
            ]
            outcomes = {**second_pass(arguments, folder, peers), **checking(arguments, folder)}
    except (BenchError, ClusterctlError) as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("scripts/bench: interrupted; nothing was left behind", file=sys.stderr)
        return 130
    rows = [row(FIGURES[name], outcome, words) for name, outcome in outcomes.items()]
    command = shlex.join(["scripts/bench", "nodes", *argv])
    print("\n".join([*above, "", table(rows), "", *notes(outcomes), "", f"    {command}"]))
    if arguments.json:
        data = {"above": above, "command": command, "figures": as_json(outcomes, words, FIGURES)}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench nodes", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("--nodes", type=int, default=32, metavar="N", help="of the second pass (default: 32)")
    parser.add_argument("--check-nodes", type=int, default=64, metavar="N", help="of the check (default: 64)")
    parser.add_argument(
        "--latency", type=float, default=20, metavar="MS", help="round-trip time of a link (default: 20)"
    )
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of every side, in turn (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--work", type=Path, default=Path("/var/tmp"), metavar="DIR")
    parser.add_argument("--peers", metavar="DIR", help="an environment that has the peers, or is made and kept")
    parser.add_argument("--clusterctl", type=Path, default=bench_machine.ROOT / ".venv/bin/clusterctl", metavar="FILE")
    return parser.parse_args(argv)


def second_pass(arguments: argparse.Namespace, folder: Path, peers: Path) -> dict[str, Outcome]:
    """The first pass changes the nodes and warms up; the runs that count find everything done."""
    with ExitStack() as stack:
        with progress(f"{arguments.nodes} nodes with Python"):
            box = stack.enter_context(
                sandbox.up(
                    sandbox.Options(
                        nodes=arguments.nodes,
                        name=f"bench-{os.getpid()}",
                        packages=("python3",),
                        directory=_made(folder / "box"),
                    )
                )
            )
        config = folder / "ssh_config"
        hosts = "".join(f"Host {node.name}\n  HostName {node.address}\n" for node in box.nodes)
        config.write_text(hosts + CONFIG.format(key=box.key, known_hosts=box.known_hosts))
        sides = Sides(arguments.clusterctl.absolute(), box, _with_keys(folder / "sides", box), peers, config)
        series = alternate(
            "second pass", {"ours": sides.ours, "pyinfra": sides.pyinfra, "ansible": sides.ansible}, arguments.runs
        )
        ports = stack.enter_context(delayed({node.name: node.address for node in box.nodes}, arguments.latency))
        distant = Sides(arguments.clusterctl.absolute(), box, _with_keys(folder / "far", box), peers, config, ports)
        later = alternate(
            "second pass, with latency", {"ours": distant.ours, "pyinfra": distant.pyinfra}, arguments.runs
        )
        sides.ours()  # the hosts have other addresses behind the relay
        sessions(box)
        sides.ours()
        trips = max(sessions(box).values())
    ours = series["ours"]
    return {
        "second-pyinfra": _against(ours, series["pyinfra"]),
        "second-ansible": _against(ours, series["ansible"]),
        "second-latency": _against(later["ours"], later["pyinfra"]),
        "round-trips": Measured(
            trips, note="commands that sshd started on a node in a second pass, which has one stage"
        ),
    }


def _against(ours: Series, peer: Series) -> Measured:
    note = f"CPU {ours.cpu:.1f} s, the peer {peer.cpu:.1f} s; runs {_walls(ours)} and {_walls(peer)} s"
    return Measured(ours.wall, peer.wall, note, {"ours": ours.raw(), "peer": peer.raw()})


def _walls(series: Series) -> str:
    return " ".join(f"{usage.wall:.2f}" for usage in series.runs)


def checking(arguments: argparse.Namespace, folder: Path) -> dict[str, Outcome]:
    """All checks of level 0; that nodes without GPUs have findings is no failure of the command."""
    with ExitStack() as stack:
        with progress(f"{arguments.check_nodes} nodes"):
            directory = _made(folder / "check")
            stack.enter_context(
                sandbox.up(
                    sandbox.Options(nodes=arguments.check_nodes, name=f"bench-c-{os.getpid()}", directory=directory)
                )
            )

        def check(_memory: object) -> Usage:
            script = '"$@" >/dev/null 2>&1; [ $? -le 4 ]'
            return run(
                ["sh", "-c", script, "sh", arguments.clusterctl.absolute(), "check", "--json"], cwd=directory
            ).usage

        series = alternate("check", {"ours": check}, arguments.runs)["ours"]
    return {
        "check": Measured(series.wall, note=f"CPU {series.cpu:.1f} s here; runs {_walls(series)} s", raw=series.raw())
    }


def _with_keys(folder: Path, box: sandbox.Sandbox) -> Path:
    """A folder with the nodes' key and host keys, which the inventory names beside it."""
    _made(folder)
    for path in (box.key, box.known_hosts):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / box.key.name).chmod(0o600)
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
