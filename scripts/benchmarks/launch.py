#!/usr/bin/env python3
"""scripts/bench launch: starting, supervising and ending runs on sandbox nodes, with real torchrun."""

import argparse
import json
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import bench_machine
from bench_measure import BenchError, run
from bench_table import Figure, Missing, Outcome, as_json, notes, row, table
from launch_cluster import Cluster
from launch_failures import hang, overhead, restart
from launch_start import kill, start
from launch_stops import stops

from provision.errors import ClusterctlError

FIGURES = {
    figure.name: figure
    for figure in (
        Figure(
            "start",
            "gate passed to first line of training code on all of {nodes} nodes, over bare torchrun by ssh",
            judged="more",
            must=1.5,
            aim=0.5,
        ),
        Figure("gate", "the gate itself, {nodes} nodes", judged="ours", must=5, aim=2),
        Figure("kill", "one rank killed, all processes gone on all of {nodes} nodes", judged="ours", must=5, aim=2),
        Figure("kill-alone", "the same, with `clusterctl train` killed first", judged="ours", must=15, aim=5),
        Figure(
            "restart",
            "crash to training again from the checkpoint, over the framework's own start",
            judged="more",
            must=5,
            aim=2,
        ),
        Figure("stops", "stops of {stops} that leave a process behind", "count", judged="ours", must=0),
        Figure("recover", "share of {restarts} automatic restarts that recover", "count", judged="most", must=1),
        Figure("hang", "a stopped (SIGSTOP) rank found and named", judged="ours", must=30, aim=10),
        Figure("cpu", "agent's own cost, % of one core", "count", judged="ours", must=1),
        Figure("rss", "agent's memory, guard and supervisor", "bytes", judged="ours", must=40e6),
    )
}

Part = Callable[[argparse.Namespace, Cluster], dict[str, Outcome]]

# By the name that --only takes: the figures, and what measures them.
PARTS: dict[str, tuple[tuple[str, ...], Part]] = {
    "start": (("start", "gate"), lambda given, cluster: start(cluster, given.runs)),
    "kill": (("kill", "kill-alone"), lambda given, cluster: kill(cluster, given.runs)),
    "restart": (("restart", "recover"), lambda given, cluster: restart(cluster, given.restarts, given.runs)),
    "hang": (("hang",), lambda given, cluster: hang(cluster, given.runs)),
    "cost": (("cpu", "rss"), lambda given, cluster: overhead(cluster, given.seconds)),
    "stops": (("stops",), lambda given, cluster: stops(cluster, given.stops)),
}
LARGE = ("start", "kill")  # those that need all nodes


def main(argv: Sequence[str]) -> int:
    given = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    words = {"nodes": given.nodes, "stops": given.stops, "restarts": given.restarts}
    try:
        with tempfile.TemporaryDirectory(prefix="clusterctl-bench-", dir=given.work) as work:
            folder = Path(work)
            prefix = given.prefix or Path(
                run([sys.executable, bench_machine.ROOT / "scripts/lab/build.py"]).out.strip()
            )
            above = [
                f"machine: {bench_machine.machine(folder)}",
                f"versions: {bench_machine.versions(given.clusterctl)}, {torch(prefix)}",
            ]
            outcomes, whole = measured(given, folder, prefix)
    except (BenchError, ClusterctlError) as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("scripts/bench: interrupted; nothing was left behind", file=sys.stderr)
        return 130
    if not whole:
        print("scripts/bench: interrupted; nothing was left behind", file=sys.stderr)
    rows = [row(FIGURES[name], outcome, words) for name, outcome in outcomes.items()]
    command = shlex.join(["scripts/bench", "launch", *argv])
    print("\n".join([*above, "", table(rows), "", *notes(outcomes), "", f"    {command}"]))
    if given.json:
        data = {"above": above, "command": command, "figures": as_json(outcomes, words, FIGURES)}
        given.json.write_text(json.dumps(data, indent=1) + "\n")
    return 0 if whole else 130


def measured(given: argparse.Namespace, folder: Path, prefix: Path) -> tuple[dict[str, Outcome], bool]:
    """The outcomes, and whether they are complete: Ctrl-C ends the measurement early.

    A part that fails does not stop the others.
    """
    outcomes: dict[str, Outcome] = {}
    nodes = given.nodes if set(given.only) & set(LARGE) else 2
    with Cluster(given.clusterctl.absolute(), folder / "cluster", prefix, nodes) as cluster:
        for part in given.only:
            names, measure = PARTS[part]
            try:
                outcomes |= measure(given, cluster)
            except BenchError as error:
                outcomes |= dict.fromkeys(names, Missing(" ".join(str(error).split())))
            except KeyboardInterrupt:
                return outcomes, False
    return outcomes, True


def torch(prefix: Path) -> str:
    """The version of torch there, for the head of the table."""
    script = "import importlib.metadata as m; print('torch', m.version('torch'))"
    return subprocess.run(
        [prefix / "bin/python", "-Ic", script], capture_output=True, text=True, check=True
    ).stdout.strip()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench launch", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("--only", type=_parts, default=list(PARTS), metavar="PART,…", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--nodes", type=int, default=16, metavar="N", help="of start and kill (default: 16)")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each figure that is a time (default: 3)")
    parser.add_argument("--restarts", type=int, default=20, metavar="N", help="automatic ones (default: 20)")
    parser.add_argument("--stops", type=int, default=100, metavar="N", help="in a row (default: 100)")
    parser.add_argument("--seconds", type=float, default=60, metavar="S", help="of cost (default: 60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--work", type=Path, default=Path("/var/tmp"), metavar="DIR")
    parser.add_argument(
        "--prefix", type=Path, metavar="ENV", help="an environment with torch (default: the rehearsal one)"
    )
    parser.add_argument("--clusterctl", type=Path, default=bench_machine.ROOT / ".venv/bin/clusterctl", metavar="FILE")
    return parser.parse_args(argv)


def _parts(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"there is no {unknown[0]}; there are {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
