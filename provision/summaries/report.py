"""After ``report``: the file and its runs; and the diagnosis as the report shows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provision.env.text import number
from provision.masking import mask_text
from provision.output_text import Summary, size
from provision.summaries.diagnosis import diagnosis_output, earlier_reasons

if TYPE_CHECKING:
    from provision.diagnosis import Diagnosis
    from provision.report import RunData


def described(diagnosis: Diagnosis) -> dict[str, Any]:
    """The fields of ``RunData`` that a diagnosis fills."""
    causes = tuple(map(mask_text, earlier_reasons(diagnosis.earlier)))
    return {"diagnosis": mask_text(diagnosis_output(diagnosis)[1]), "causes": causes}


def report_output(path: Path, written: int, runs: Sequence[RunData]) -> Summary:
    """The file, its size and its runs."""
    data = {
        "report": str(path),
        "bytes": written,
        "runs": [run.id for run in runs],
        "missing": {name: why for run in runs for name, why in run.missing.items()},
    }
    rows = sum(len(run.rows) for run in runs)
    return data, f"{path}: {number(len(runs), 'run')}, {number(rows, 'step')}, {size(written)}"
