"""After ``report``: the file and its runs; and the diagnosis as the report shows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provision.env.text import number
from provision.masking import mask_text
from provision.output_text import Summary, size
from provision.report.names import RULES
from provision.report.redaction import Known, Redaction, redact
from provision.run import record as records
from provision.summaries.diagnosis import diagnosis_output, earlier_reasons

if TYPE_CHECKING:
    from provision.diagnosis import Diagnosis
    from provision.model import Inventory
    from provision.report import RunData

_NODES = 4  # whose names are printed


def described(diagnosis: Diagnosis) -> dict[str, Any]:
    """The fields of ``RunData`` that a diagnosis fills."""
    causes = tuple(map(mask_text, earlier_reasons(diagnosis.earlier)))
    return {"diagnosis": mask_text(diagnosis_output(diagnosis)[1]), "causes": causes}


def redacted_report(runs: Sequence[RunData], inventory: Inventory | None) -> Redaction:
    """The runs without names, addresses and secrets; the inventory and this machine know more names than their data."""
    nodes = inventory.nodes if inventory else ()
    user, _, host = records.author().partition("@")
    hosts = {host, *(address for node in nodes for address in (node.address, node.data_address) if address)}
    users = {user, *(each for each in (*(node.user for node in nodes), inventory and inventory.ssh.user) if each)}
    return redact(runs, Known(tuple(node.name for node in nodes), tuple(sorted(hosts)), tuple(sorted(users))))


def report_output(path: Path, written: int, runs: Sequence[RunData], redaction: Redaction | None = None) -> Summary:
    """The file, its size and its runs; of a redacted one, what was removed, and the nodes' names for the user."""
    data: dict[str, Any] = {
        "report": str(path),
        "bytes": written,
        "runs": [run.id for run in runs],
        "missing": {name: why for run in runs for name, why in run.missing.items()},
    }
    rows = sum(len(run.rows) for run in runs)
    text = f"{path}: {number(len(runs), 'run')}, {number(rows, 'step')}, {size(written)}"
    if redaction is None:
        return data, text
    data |= {"removed": dict(redaction.removed), "nodes": dict(redaction.nodes)}
    removed = ", ".join(f"{RULES[rule].title} ({count})" for rule, count in redaction.removed.items()) or "nothing"
    known = [f"{word} is {name}" for word, name in list(redaction.nodes.items())[:_NODES]]
    more = len(redaction.nodes) - len(known)
    nodes = f"in the file {', '.join(known)}{f' and {more} more, see --json' if more > 0 else ''}" if known else ""
    lines = (text, f"removed: {removed}", nodes, "read the file before it leaves: rules cannot know every name")
    return data, "\n".join(line for line in lines if line)
