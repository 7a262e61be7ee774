"""After ``bench nccl``: bandwidths, slow nodes and links, and the fastest settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from provision.inventory import fold
from provision.output_text import Line, Summary, duration

if TYPE_CHECKING:
    from provision.netbench import Judgement, Setting, Tuning
    from provision.tasks.bench import BenchResult

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def bench_output(result: BenchResult) -> Summary:
    """The numbers, and one sentence; ``measured_rows`` has the tables. Bandwidths are bytes a second."""
    data: dict[str, Any] = {
        "nodes": list(result.nodes),
        "world_size": result.world_size,
        "backend": result.backend,
        "network": result.network,
        "interfaces": result.interfaces,
        "versions": dict(result.versions),
        "rows": [
            {
                "op": row.op,
                "bytes": row.size,
                "iterations": len(row.times),
                "seconds": row.seconds,
                "spread": round(row.spread, 4),
                "algbw": row.algbw,
                "busbw": row.busbw,
                "wrong": row.wrong,
            }
            for row in result.rows
        ],
        "skipped": dict(result.skipped),
        "pairs": [{"nodes": list(pair), "bandwidth": rate} for pair, rate in result.pairs.items()],
        "seconds": round(result.seconds, 1),
    }
    if result.judgement is not None:
        judgement = result.judgement
        data["slow"] = {"nodes": list(judgement.nodes), "links": [list(pair) for pair in judgement.links]}
        data["usual"] = judgement.usual
    if result.tuning is not None:
        data["tuning"] = _tuning_data(result.tuning)
    by = f"{result.backend} over {result.network or result.interfaces}"
    versions = ", ".join(f"{name} {result.versions[name]}" for name in ("torch", "nccl") if name in result.versions)
    text = (
        f"{fold(result.nodes)} (world size {result.world_size}): {by}"
        f"{f' ({versions})' if versions else ''}, measured in {duration(result.seconds)}"
    )
    return data, text


def bench_rows(result: BenchResult) -> list[Line]:
    """The tables."""
    lines: list[Line] = []
    if result.rows:
        lines.append(Line(f"{'operation':<15}{'size':>9}{'time':>12}{'algbw':>12}{'busbw':>12}{'spread':>8}", "bold"))
    for row in result.rows:
        text = (
            f"{row.op:<15}{_binary(row.size):>9}{_time(row.seconds):>12}"
            f"{_rate(row.algbw):>12}{_rate(row.busbw):>12}{row.spread:>8.0%}"
        )
        lines.append(Line(f"{text}  WRONG RESULT" if row.wrong else text, "red" if row.wrong else ""))
    lines += [Line(f"{op}: skipped: {why}", "yellow") for op, why in result.skipped.items()]
    if result.judgement is not None:
        lines += _pair_rows(result, result.judgement)
    if result.tuning is not None:
        lines += _tuning_rows(result.tuning)
    return lines


def _pair_rows(result: BenchResult, judgement: Judgement) -> list[Line]:
    rates = sorted(result.pairs.values())
    summary = (
        f"{_pairs(len(rates))}, each way: {_rate(rates[0])} to {_rate(rates[-1])}" if rates else "no pair was measured"
    )
    lines = [Line(summary)]
    if not judgement.compared:
        return [*lines, Line("a single pair cannot be compared: use three nodes or more to find a slow one", "dim")]
    for name, (slow, all_) in judgement.nodes.items():
        best = max(rate for pair, rate in result.pairs.items() if name in pair)
        lines.append(
            Line(
                f"slow node: {name}: {slow} of its {_pairs(all_)} are slow; its fastest reaches {_rate(best)}, "
                f"the usual rate is {_rate(judgement.usual)}. Check its cable, port and adapter",
                "red",
            )
        )
    for a, b in judgement.links:
        lines.append(
            Line(
                f"slow link: {a} - {b}: {_rate(result.pairs[a, b])}, the usual rate is {_rate(judgement.usual)}; both "
                f"nodes are fast on other links. Check the switches between them",
                "red",
            )
        )
    if not (judgement.nodes or judgement.links):
        lines.append(Line("no node and no link is slower than the others", "green"))
    return lines


def _tuning_rows(tuning: Tuning) -> list[Line]:
    lines = [Line("all-reduce, busbw:", "bold")]
    for setting, rate in tuning.tried:
        lines.append(Line(f"  {_rate(rate) if rate else 'failed':>12}  {setting}"))
    lines.append(
        Line(
            f"best: {tuning.best}: {_rate(tuning.best_busbw)}, {tuning.factor:.2f} times NCCL's defaults "
            f"({_rate(tuning.default)})",
            "green" if tuning.worth_it else "",
        )
    )
    if tuning.best == tuning.present:
        lines.append(
            Line(
                "the inventory already has these settings"
                if tuning.present.env
                else "no setting is faster than the default"
            )
        )
    elif not tuning.worth_it:
        lines.append(Line(f"that is {tuning.gain - 1:.0%} over the present settings: too little to change them"))
    return lines


def _tuning_data(tuning: Tuning) -> dict[str, Any]:
    def both(setting: Setting, rate: float | None) -> dict[str, Any]:
        return {"env": setting.env, "busbw": rate}

    return {
        "default": tuning.default,
        "present": both(tuning.present, tuning.present_busbw),
        "best": both(tuning.best, tuning.best_busbw),
        "factor": round(tuning.factor, 3),
        "worth_it": tuning.worth_it,
        "tried": [both(setting, rate) for setting, rate in tuning.tried],
    }


def _pairs(count: int) -> str:
    return f"{count} pair" if count == 1 else f"{count} pairs"


def _binary(size: int) -> str:
    """``8 MiB``: sizes of buffers are powers of two."""
    for unit, name in _UNITS:
        if size > 0.999 * unit:  # rounded down to a whole number for each rank
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


def _rate(bandwidth: float) -> str:
    """``12.3 GB/s``, ``0.118 GB/s``: in one unit, so that columns compare."""
    return f"{bandwidth / 1e9:.3g} GB/s" if bandwidth < 1e11 else f"{bandwidth / 1e9:.0f} GB/s"


def _time(seconds: float) -> str:
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.3g} ms"
        if seconds < 0.1
        else f"{seconds * 1e3:.0f} ms"
    )
