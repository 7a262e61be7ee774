"""After ``clusterctl runs list`` and ``runs prune``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from provision.env.text import number
from provision.inventory import fold
from provision.output_text import Summary, fold_equal, size, span
from provision.summaries.runs import fitted

if TYPE_CHECKING:
    from provision.run.history import Past
    from provision.tasks.history import History, Plan, Pruned

_OMITTED = ("TOOK", "NODES", "LOSS", "STEP")  # columns that a narrow table omits, in this order


def past_data(past: Past) -> dict[str, Any]:
    """A run for ``--json``; times are seconds, sizes are bytes."""
    return {
        "run": past.id,
        "state": past.state,
        "nodes": list(past.nodes),
        "owner": past.owner,
        "step": past.step,
        "total": past.total,
        "loss": past.loss,
        "began": past.began,
        "seconds": past.seconds,
        "bytes": past.size,
        "folders": {name: folder.size for name, folder in past.folders.items()},
        "recorded": past.recorded,
    }


def history_output(result: History, shown: Sequence[Past], last: int) -> Summary:
    """The first ``last`` of the runs that were chosen."""
    rows = shown[:last]
    data = {
        "runs": [past_data(past) for past in rows],
        "more": len(shown) - len(rows),
        "unreachable": dict(result.unreachable),
    }
    lines = table(rows)
    if not rows:
        lines = ["no run matches" if result.runs else "no runs; to start one: clusterctl train"]
    else:
        total = f"{number(len(shown), 'run')}, {size(sum(past.size for past in shown))} on the nodes"
        lines.append(
            total + (f"; {len(shown) - len(rows)} older ones: --last {len(shown)}" if len(shown) > len(rows) else "")
        )
    lines += [f"{names}: no answer: {why}" for why, names in fold_equal(result.unreachable).items()]
    return data, "\n".join(lines)


def table(runs: Sequence[Past]) -> list[str]:
    """The runs, one in each line."""
    rows = [["RUN", "STATE", "NODES", "STEP", "LOSS", "TOOK", "SIZE"], *map(_row, runs)]
    return fitted(rows, _OMITTED) if runs else []


def _row(past: Past) -> list[str]:
    return [
        past.id,
        past.state,
        fold(past.nodes) if past.nodes else "-",
        "-" if past.step is None else f"{past.step:.0f}" + (f"/{past.total:.0f}" if past.total else ""),
        "-" if past.loss is None else f"{past.loss:.4g}",
        "-" if past.seconds is None else span(past.seconds),
        size(past.size) if past.folders else "-",
    ]


def plan_lines(plan: Plan, more: Sequence[Past]) -> list[str]:
    """What ``prune`` would remove, before it asks."""
    lines = table([*plan.runs, *more])
    return [*lines, *(f"{past.id}: {plan.uncollected[past.id]}" for past in more)]


def prune_output(result: Pruned) -> Summary:
    """After ``runs prune``."""
    failed = dict(result.failed)
    freed = sum(past.size for past in result.removed)
    data = {
        "removed": [past_data(past) for past in result.removed],
        "kept": dict(result.kept),
        "bytes": freed,
        "failed": failed,
        "dry_run": result.dry_run,
    }
    kept = [f"kept {name}: {why}" for name, why in result.kept.items()]
    if not result.removed:
        return data, "\n".join([*kept, "no run to remove"])
    done = "would remove" if result.dry_run else "removed"
    names = "" if result.dry_run else " and from this machine's records"
    total = f"{done} {number(len(result.removed), 'run')} ({size(freed)}) from the nodes{names}"
    if failed:
        return data, "\n".join(kept)
    return data, "\n".join([*kept, *(table(result.removed) if result.dry_run else ()), total])
