"""After ``stop``, ``logs`` and ``collect``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from provision.inventory import fold
from provision.output_text import size
from provision.summaries._summary import Summary

if TYPE_CHECKING:
    from provision.tasks.collect import Collected
    from provision.tasks.logs import Logs
    from provision.tasks.stop import Stopped


def stopped_shown(result: Stopped) -> Summary:
    """After ``stop``."""
    failed = dict(result.failed or {})
    data = {
        "run": result.run,
        "stopped": list(result.nodes),
        "before": result.already or "live",
        "saved_step": result.saved,
        "step": result.step,
        "port": result.port,
        "failed": failed,
    }
    if not result.nodes:
        return data, ""
    port = f", port {result.port} free" if result.port else ""
    proof = f"no process left, no GPU memory held{port}"
    if result.already:
        text = f"run {result.run} had already ended ({result.already}) on {fold(result.nodes)}: {proof}"
    else:
        text = f"run {result.run} stopped on {fold(result.nodes)}: {proof}"
        if result.saved is not None:
            text += f"\nsaved a checkpoint at step {result.saved}"
            text += f"; to continue: clusterctl resume {result.run}" if result.resumable else ""
        elif result.asked_to_save and result.resumable:
            text += f"\nno new checkpoint was saved; to continue from the newest one: clusterctl resume {result.run}"
        elif result.asked_to_save:
            text += "\nno checkpoint was saved: without --output the checkpoint directory is not known"
        elif result.step is not None:
            text += f"\nits last step was {result.step}"
    return data, text


def logs_data(result: Logs) -> dict[str, Any]:
    """The lines for ``--json``."""
    return {
        "run": result.run,
        "state": result.state,
        "lines": [
            {"time": line.time, "node": line.node, "rank": line.rank, "line": line.text} for line in result.lines
        ],
        "unreachable": dict(result.unreachable),
        "cut": result.cut,
    }


def collected(result: Collected) -> Summary:
    """After ``collect``."""
    data = {
        "run": result.run,
        "folder": str(result.folder),
        "files": result.files,
        "bytes": result.bytes,
        "already_here": result.there,
        "checkpoint": result.checkpoint.name,
        "step": result.checkpoint.step,
        "refused": dict(result.checkpoint.refused),
        "fp32": str(result.fp32) if result.fp32 else None,
        "failed": dict(result.failed),
    }
    here = f", {result.there} were already here" if result.there else ""
    lines = [f"run {result.run}: {result.files} files ({size(result.bytes)}) in {result.folder}{here}"]
    if result.checkpoint.name:
        lines.append(f"newest complete checkpoint: {result.folder / 'output' / result.checkpoint.name}")
    if result.fp32:
        lines.append(f"fp32 weights: {result.fp32}")
    return data, "\n".join(lines)
