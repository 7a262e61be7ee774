#!/usr/bin/env python3
"""scripts/bench scale: what a thousand nodes cost, measured and predicted.

- ``status``: ``clusterctl status`` of many nodes on this machine, all alive, and with some that do not answer.
- ``agents``: the same of the nodes of a run, whose agents tell of them.
- ``jumps``: ``status`` through eight jump hosts, and with one of them that does not answer.
- ``link``: rank 0's end of the agents' link, with a real spoke for every other node.
- ``nodes``: commands on sandbox nodes, beside the model's prediction for nodes that share this machine's cores.
- ``model``: the prediction for real nodes, which have their own cores. Needs no root.

CPU times are comparable on a machine that is busy with other things; seconds are not.
"""

import argparse
import os
import platform
import sys
from collections.abc import Sequence

import scale_link
import scale_model
import scale_nodes

JUMPS = 8  # hosts
PARTS = ("status", "agents", "jumps", "link", "nodes", "model")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench scale", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("--only", default=",".join(PARTS), metavar="NAME,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--nodes", type=int, default=1000, metavar="N", help="not of the sandbox (default: 1000)")
    parser.add_argument("--dead", type=int, default=50, metavar="N", help="nodes that do not answer (default: 50)")
    parser.add_argument("--sandbox", default="2,8,32", metavar="N,...", help="numbers of sandbox nodes (2,8,32)")
    arguments = parser.parse_args(argv)
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, load {load:.1f}")
    for name in arguments.only.split(","):
        print(f"\n{name}:")
        if name == "status":
            show_status(arguments.nodes, arguments.dead)
        elif name == "agents":
            show_agents(arguments.nodes, arguments.dead)
        elif name == "jumps":
            show_jumps(arguments.nodes)
        elif name == "link":
            show_link(arguments.nodes)
        elif name == "nodes":
            show_nodes([int(count) for count in arguments.sandbox.split(",")])
        else:
            show_model()
    return 0


def show_status(count: int, dead: int) -> None:
    """Print the cost of ``status``."""
    for silent in (0, dead):
        found = scale_nodes.status_of_many(count, silent)
        costs = scale_model.on_this_machine(scale_model.Costs(), os.cpu_count() or 1)
        names = [f"node{number + 1:04}" for number in range(count)]
        faults = scale_model.Faults(dead=frozenset(names[len(names) - silent :]))
        model = scale_model.simulate(scale_model.STATUS, names, costs, faults)
        print(f"{count} nodes, {silent} dead: {text_of(found)}; model {model.seconds:.1f} s, CPU {model.here:.1f} s")


def show_agents(count: int, dead: int) -> None:
    """Print the cost of ``status`` through a run's agents; the nodes' CPU time is the first agent's."""
    for silent in (0, dead):
        found = scale_nodes.status_of_many(count, silent, through_agents=True)
        print(f"{count} nodes, {silent} dead: {text_of(found)}")


def show_jumps(count: int) -> None:
    """Print the cost of ``status`` through jump hosts; the nodes' CPU time includes that of the jump hosts."""
    names = [f"node{number + 1:04}" for number in range(count)]
    hosts = [f"jump{number + 1}" for number in range(JUMPS)]
    for silent in (0, 1):
        found = scale_nodes.status_of_many(count, jumps=JUMPS, dead_jumps=silent)
        faults = scale_model.Faults(dead=frozenset(hosts[JUMPS - silent :]))
        here = scale_model.on_this_machine(scale_model.Costs(), os.cpu_count() or 1)
        shared, own = (
            scale_model.simulate(scale_model.STATUS, names, costs, faults, jumps=hosts)
            for costs in (here, scale_model.Costs())
        )
        print(
            f"{count} nodes through {JUMPS} jump hosts, {silent} of them dead: {text_of(found)}; model "
            f"{shared.seconds:.1f} s, CPU {shared.here:.1f} s, with their own cores {own.seconds:.1f} s"
        )


def show_link(count: int) -> None:
    """Print the cost of the hub: with all agents connected to it, and as in a run."""
    star, run = scale_link.measure(count, most=count), scale_link.measure(count)
    print(f"{'':36} {'star':>8} {'run':>8}")
    for name, value in star.items():
        print(f"{name:36} {value:8.2f} {run[name]:8.2f}")


def show_nodes(counts: Sequence[int]) -> None:
    """Print the cost of commands on sandbox nodes, beside the model's."""
    costs = scale_model.on_this_machine(scale_model.Costs(), os.cpu_count() or 1)
    for count, commands in scale_nodes.on_sandbox(counts).items():
        for name, found in commands.items():
            names = [f"node{number}" for number in range(count)]
            model = scale_model.simulate(scale_model.COMMANDS[name], names, costs)
            print(f"{count:4} {name:8} {text_of(found)}; model {model.seconds:.1f} s, CPU {model.here:.1f} s")


def show_model() -> None:
    """Print the prediction for nodes with their own cores."""
    for count in (16, 128, 1000):
        names = [f"node{number:04}" for number in range(count)]
        for name, command in scale_model.COMMANDS.items():
            found = scale_model.simulate(command, names)
            slowest = max(found.stages, key=lambda stage: found.stages[stage])
            print(
                f"{count:5} {name:15} {found.seconds:7.1f} s, CPU {found.here:5.1f} s; "
                f"longest: {slowest} {found.stages[slowest]:.1f} s"
            )


def text_of(found: scale_nodes.Measured) -> str:
    """A measurement as text."""
    return f"{found.seconds:.1f} s, CPU {found.here:.2f} s, nodes' CPU {found.there:.1f} s, {found.memory:.0f} MB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
