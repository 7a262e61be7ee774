"""Packing: against tar and zstd, against conda-pack, and the memory it takes."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from bench_context import Context, tar_zstd
from bench_machine import ROOT
from bench_measure import Series, Usage, alternate, progress, run
from bench_table import Measured, Outcome, quantity

CONDA_PACK = ROOT / ".venv" / "bin" / "conda-pack"


def packing(context: Context) -> dict[str, Outcome]:
    """``pack``, ``pack-conda-pack`` and ``pack-conda-pack-zst`` from the same runs."""
    env = context.env

    def conda_pack(out: Path) -> list[str | Path]:
        # It refuses an environment with editable packages otherwise; their checkouts are then not in its archive.
        return [CONDA_PACK, "-q", "-f", "--ignore-editable-packages", "-p", env.prefix, "-o", out]

    outputs = {
        name: context.work / f"pack-{name}" for name in ("ours.ccb", "peer.tar.zst", "conda.tar.gz", "conda.tar.zst")
    }
    commands: dict[str, list[str | Path]] = {
        "ours.ccb": [context.clusterctl, "pack-env", "--json", env.prefix, "-o", outputs["ours.ccb"]],
        "peer.tar.zst": tar_zstd(env, outputs["peer.tar.zst"]),
        "conda.tar.gz": conda_pack(outputs["conda.tar.gz"]),
        "conda.tar.zst": conda_pack(outputs["conda.tar.zst"]),
    }

    def side(name: str) -> Callable[[bool], Usage]:
        def pack(memory: bool) -> Usage:
            outputs[name].unlink(missing_ok=True)
            os.sync()
            return run(commands[name], memory=memory).usage

        return pack

    series = alternate("pack", {name: side(name) for name in commands}, context.runs)
    sizes = {name: path.stat().st_size for name, path in outputs.items()}
    for path in outputs.values():
        path.unlink()

    def against(peer: str, extra: str = "") -> Measured:
        names = ("ours.ccb", peer)
        note = "; ".join(f"{name}: {_words(series[name])}, {quantity(sizes[name], 'bytes')}" for name in names)
        return Measured(
            series["ours.ccb"].wall,
            series[peer].wall,
            f"{note}{extra}",
            {name: {**series[name].raw(), "size": sizes[name]} for name in names},
        )

    left_out = "; conda-pack with --ignore-editable-packages: the checkout is not in its archive"
    return {
        "pack": against("peer.tar.zst"),
        "pack-conda-pack": against("conda.tar.gz", left_out),
        "pack-conda-pack-zst": against("conda.tar.zst", left_out),
    }


def _words(series: Series) -> str:
    walls = " ".join(f"{usage.wall:.2f}" for usage in series.runs)
    return f"{series.cpu:.1f} s CPU, peak memory {quantity(series.peak, 'bytes')} (runs: {walls} s)"


def memory(context: Context) -> dict[str, Outcome]:
    """``memory``: the peak of the process tree while it packs the environment with a large file in it."""
    env = context.env
    layer = context.work / "large"
    with progress(f"a file of {quantity(context.large, 'bytes')}"):
        place = env.with_large_file(layer, context.large)
    out, peer_out = context.work / "large.ccb", context.work / "large.tar.zst"
    with progress("memory: clusterctl pack-env"):
        ours = run([*place, context.clusterctl, "pack-env", env.prefix, "-o", out], memory=True).usage
    with progress("memory: tar | zstd"):
        peer = run([*place, *tar_zstd(env, peer_out)], memory=True).usage
    for path in (out, peer_out, layer / "upper/share/model.safetensors"):
        path.unlink()
    note = (
        f"ours in {ours.wall:.1f} s, tar | zstd in {peer.wall:.1f} s; proportional set size of the whole process tree"
    )
    return {"memory": Measured(ours.peak, peer.peak, note, {"ours": asdict(ours), "peer": asdict(peer)})}
