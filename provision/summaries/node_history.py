"""After ``clusterctl nodes``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from provision.inventory.document import printable
from provision.output_text import Summary
from provision.run.node_history import NodeHistory
from provision.summaries.runs import fitted

_OMITTED = ("RESTARTS", "CHECKS", "RUNS")  # columns that a narrow table omits, in this order


def nodes_output(found: Sequence[NodeHistory]) -> Summary:
    """The nodes, one in each line, and why nodes are excluded."""
    data = {
        "nodes": {each.node: {key: value for key, value in asdict(each).items() if key != "node"} for each in found}
    }
    rows = [["NODE", "RUNS", "FAILURES", "RESTARTS", "CHECKS", "LAST"]]
    for each in found:
        numbers = (each.runs, each.failures, each.restarts, each.checks)
        rows.append([each.node, *map(str, numbers), printable(each.last)[:60] or "-"])
    lines = fitted(rows, _OMITTED)
    for each in found:
        if each.excluded is not None:
            why = printable(each.excluded.why)
            lines.append(
                f"{each.node} is excluded since {each.excluded.since}: {why}: clusterctl nodes trust {each.node}"
            )
    return data, "\n".join(lines)
