"""On nodes: unpacking, distributing over equally limited links, and a link that breaks."""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict

from bench_bundle import chunks
from bench_cluster import Deploy
from bench_context import Context
from bench_measure import BenchError, Usage, alternate, progress, run
from bench_table import Measured, Outcome, quantity

BREAK_AT = 0.9
GIVES_UP = 300.0  # seconds for the command to notice the broken link; ssh's keepalive takes 60


def unpacking(context: Context) -> dict[str, Outcome]:
    """``unpack``: bytes over an unlimited link to one node with zstd, and to its disk.

    clusterctl's time is that of ``deploy`` on the node before the smoke test: it looks for existing files, receives,
    verifies and unpacks units with the rewritten files, flushes them to the disk, compiles modules that Python would
    compile at every start, and makes all read-only. The controller's time before that is in the note. The peer is the
    same tree, packed by ``tar | zstd -T0 -3``, through the same ssh into ``zstd -d | tar x``, and a flush. Every run
    has a new folder, and none is removed in between: ext4 skips inodes freed in the last minutes one by one, which
    doubles the time to create many files.
    """
    bundle, archive = context.bundle(context.env), context.archive(context.env)
    deploys: list[Deploy] = []
    with context.cluster("unpack", 1) as cluster:
        node = cluster.names[0]

        def ours(_memory: bool) -> Usage:
            os.sync()
            deploys.append(deploy := cluster.deploy(bundle, f"ours-{len(deploys)}"))
            return Usage(deploy.seconds, deploy.usage.cpu)

        def peer(_memory: bool) -> Usage:
            os.sync()
            root = f"/opt/peer-{len(deploys)}"
            script = f"mkdir {root} && zstd -dc | tar -xpf - -C {root} && sync -f {root}"
            return run(["ssh", "-F", cluster.ssh_config, node, script], stdin=archive).usage

        series = alternate("unpack", {"ours": ours, "peer": peer}, context.runs)
    walls = "; ".join(f"{name} {' '.join(f'{u.wall:.1f}' for u in one.runs)} s" for name, one in series.items())
    before = statistics.median(deploy.answer["seconds"]["verify"] for deploy in deploys)
    note = (
        f"from the first look to the smoke test, against ssh into zstd -d | tar x and sync; runs: {walls}; not in it: "
        f"verifying the bundle, {before:.1f} s; the whole command, smoke test included, {_wall(deploys):.1f} s"
    )
    raw = {name: one.raw() for name, one in series.items()} | {"deploys": [deploy.answer for deploy in deploys]}
    return {"unpack": Measured(series["ours"].wall, series["peer"].wall, note, raw)}


def many(context: Context) -> dict[str, Outcome]:
    """``deploy-many``, ``uplink`` and ``unchanged`` from the same deploys to one node and to all, in turn."""
    bundle = context.bundle(context.many)
    one: list[Deploy] = []
    every: list[Deploy] = []
    again: list[Deploy] = []
    with context.cluster("many", context.nodes, context.link) as cluster:
        for number in range(1, context.runs + 1):
            cluster.clear("one", "all")
            for title, found, root, limit in (
                ("1 node", one, "one", cluster.names[0]),
                (f"{context.nodes} nodes", every, "all", None),
                ("nothing changed", again, "all", None),
            ):
                with progress(f"deploy: {title}, run {number} of {context.runs}") as report:
                    found.append(deploy := cluster.deploy(bundle, root, limit=limit))
                    report(f"{deploy.usage.wall:.1f} s, {quantity(deploy.sent, 'bytes')} over the uplink")
    _unchanged(again)
    note = (
        f"links of {context.link}; {quantity(bundle.stat().st_size, 'bytes')} bundle of few files, since "
        f"{context.nodes} nodes share {os.cpu_count()} cores and one disk"
    )
    raw = {"one": _raw(one), "all": _raw(every)}
    payload = statistics.median(deploy.bytes_sent for deploy in one)
    return {
        "deploy-many": Measured(_wall(every), _wall(one), f"{note}; the whole command", raw),
        "uplink": Measured(
            statistics.median(deploy.sent for deploy in every),
            payload,
            f"counted on the controller's cable; deploy says {quantity(every[-1].bytes_sent, 'bytes')}; "
            f"for one node, {quantity(one[-1].sent, 'bytes')}, by its own word {quantity(payload, 'bytes')}",
            raw,
        ),
        "unchanged": Measured(
            _wall(again), None, f"the whole command, {quantity(again[-1].sent, 'bytes')} sent", {"runs": _raw(again)}
        ),
    }


def _wall(deploys: list[Deploy]) -> float:
    return statistics.median(deploy.usage.wall for deploy in deploys)


def _raw(deploys: list[Deploy]) -> list[dict[str, object]]:
    return [{"usage": asdict(each.usage), "sent": each.sent, "answer": each.answer} for each in deploys]


def _unchanged(deploys: list[Deploy]) -> None:
    if any(deploy.answer["changed"] for deploy in deploys):
        raise BenchError("a second deploy of the same bundle changed something")


def broken(context: Context) -> dict[str, Outcome]:
    """``broken``: a node's link is cut at 90 %; bytes that are sent again after it is restored."""
    bundle = context.bundle(context.many)
    largest = max(chunk.compressed for chunk in chunks(bundle).values())
    with context.cluster("broken", 1, context.link) as cluster:
        node = cluster.names[0]
        with progress("broken: the whole, undisturbed"):
            whole = cluster.deploy(bundle, "whole").sent
        cluster.clear("whole")
        before = cluster.sent()
        with progress(f"broken: link cut at {BREAK_AT:.0%}") as report:
            job = cluster.start(bundle, "broken")
            _wait_until(lambda: cluster.sent() - before >= BREAK_AT * whole or not job.running, GIVES_UP * 4)
            if not job.running:
                job.finish()
                raise BenchError("the deploy was over before its link could be broken")
            cluster.box.unplug(node)
            pulled = time.perf_counter()
            if not _wait_until(lambda: not job.running, GIVES_UP):
                job.stop()
                raise BenchError(f"deploy has not noticed the broken link within {GIVES_UP:g} s")
            noticed = time.perf_counter() - pulled
            status, done = job.wait()
            first = cluster.sent() - before
            report(f"{quantity(first, 'bytes')} were sent; noticed after {noticed:.0f} s, exit code {status}")
        if status == 0:
            raise BenchError("deploy succeeded although the node's link was cut")
        cluster.box.plug(node)
        with progress("broken: the same command again") as report:
            second = cluster.deploy(bundle, "broken").sent
            report(quantity(second, "bytes"))
    raw = {
        "whole": whole,
        "first": first,
        "second": second,
        "exit_code": status,
        "noticed": noticed,
        "stderr": done.err,
    }
    note = (
        f"one node, one stream; whole {quantity(whole, 'bytes')}, before the break {quantity(first, 'bytes')}, then "
        f"{quantity(second, 'bytes')}, on the controller's cable; peer: the bundle's largest chunk"
    )
    return {"broken": Measured(max(0, first + second - whole), largest, note, raw)}


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Polls: a counter of the kernel has no event to wait for."""
    end = time.perf_counter() + seconds
    while not condition():
        if time.perf_counter() > end:
            return False
        time.sleep(0.02)
    return True
