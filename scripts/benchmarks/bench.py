#!/usr/bin/env python3
"""scripts/bench: prints the figures of the project beside those of its peers, measured in the same run."""

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import bench_distribute
import bench_machine
import bench_nodes
import bench_pack
import bench_redeploy
from bench_context import Context
from bench_envs import describe
from bench_measure import BenchError
from bench_table import FIGURES, Missing, Outcome, as_json, notes, row, table

from provision.errors import ClusterctlError

# What is measured together, in this order.
GROUPS: dict[tuple[str, ...], Callable[[Context], dict[str, Outcome]]] = {
    ("pack", "pack-conda-pack", "pack-conda-pack-zst"): bench_pack.packing,
    ("memory",): bench_pack.memory,
    ("unpack",): bench_nodes.unpacking,
    ("changed", "rebuilt"): bench_redeploy.redeploying,
    ("deploy-many", "uplink", "unchanged"): bench_nodes.many,
    ("broken",): bench_nodes.broken,
    tuple(name for name in FIGURES if name.startswith("distribute-")): bench_distribute.distributing,
}


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    signal.signal(signal.SIGTERM, _terminated)
    wanted = [name for name in FIGURES if not arguments.only or name in arguments.only]
    parent = arguments.work or Path("/var/tmp")
    work = Path(tempfile.mkdtemp(prefix="clusterctl-bench-", dir=parent))
    try:
        context = context_of(arguments, work)
        above = [
            f"machine: {bench_machine.machine(work)}",
            f"versions: {bench_machine.versions(context.clusterctl)}",
            f"environment: {context.env.name}, {describe([context.env.prefix, context.env.checkout])}",
        ]
        outcomes = measure(context, wanted)
    except BenchError as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("scripts/bench: interrupted; nothing was left behind", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(work)
    words = words_of(context)
    command = shlex.join(["scripts/bench", *argv])
    rows = [row(FIGURES[name], outcome, words) for name, outcome in outcomes.items()]
    print("\n".join([*above, "", table(rows), "", *notes(outcomes), "", f"    {command}"]))
    if arguments.json:
        data = {"above": above, "command": command, "words": words, "figures": as_json(outcomes, words)}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")
    return 1 if any(isinstance(outcome, Missing) for outcome in outcomes.values()) else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=(__doc__ or "").partition(": ")[2])
    benches = parser.add_subparsers(dest="bench", required=True)
    env = benches.add_parser("env", help="packing, sending and unpacking an environment")
    env.add_argument("--env", choices=("cpu", "cuda"), default="cpu", help="torch for the CPU (2 GB) or CUDA (6 GB)")
    env.add_argument("--only", type=_figures, metavar="NAME,...", help=f"of {', '.join(FIGURES)}")
    env.add_argument("--runs", type=int, default=3, metavar="N", help="of every side, in turn (default: 3)")
    env.add_argument("--nodes", type=int, default=16, metavar="N", help="that share the links (default: 16)")
    env.add_argument("--peer-nodes", type=int, default=4, metavar="N", help="for the peers that send it N times (4)")
    env.add_argument("--link", default="50mbit", metavar="RATE", help="of every link (default: 50mbit)")
    env.add_argument("--payload", type=int, default=600, metavar="MB", help="sent to many nodes (default: 600)")
    env.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    env.add_argument("--work", type=Path, metavar="DIR", help="on a local disk with 25 GB free (default: /var/tmp)")
    env.add_argument("--clusterctl", type=Path, default=bench_machine.ROOT / ".venv/bin/clusterctl", metavar="FILE")
    env.add_argument("--quick", action="store_true", help="small, four nodes, one run: shows only that it works")
    return parser.parse_args(argv)


def _figures(text: str) -> set[str]:
    names = set(text.split(","))
    if unknown := names - set(FIGURES):
        raise argparse.ArgumentTypeError(f"no figure {', '.join(sorted(unknown))}")
    return names


def context_of(arguments: argparse.Namespace, work: Path) -> Context:
    quick = arguments.quick
    return Context(
        clusterctl=arguments.clusterctl.absolute(),
        work=work,
        variant="small" if quick else arguments.env,
        runs=1 if quick else arguments.runs,
        nodes=4 if quick else arguments.nodes,
        peer_nodes=2 if quick else arguments.peer_nodes,
        link="200mbit" if quick else arguments.link,
        payload=48 << 20 if quick else arguments.payload * 1_000_000,
        large=256 << 20 if quick else 3 << 30,
    )


def words_of(context: Context) -> dict[str, object]:
    """The values for the braces in the titles."""
    large = f"{context.large / (1 << 30):g} GiB"
    return {"nodes": context.nodes, "peer_nodes": context.peer_nodes, "large": large}


def measure(context: Context, wanted: Sequence[str]) -> dict[str, Outcome]:
    """The wanted figures in the table's order. A group that fails says why and stops no other."""
    found: dict[str, Outcome] = {}
    for names, group in GROUPS.items():
        if not set(names) & set(wanted):
            continue
        try:
            found |= group(context)
        except (BenchError, ClusterctlError, OSError, LookupError, ValueError) as error:
            why = str(error) if isinstance(error, BenchError) else repr(error)
            print(f"{', '.join(names)}: {why}", file=sys.stderr)
            found |= {name: Missing(why) for name in names}
    return {name: found[name] for name in wanted}


def _terminated(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM cleans up like Ctrl-C."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    os.environ.pop("CONDA_PREFIX", None)
    sys.exit(main(sys.argv[1:]))
