"""The numbers of a run as a table, as one line, as a curve of a few signs, and for ``--json``."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

from provision.env.text import number
from provision.output_text import Line, Summary, size
from provision.render import quote

if TYPE_CHECKING:
    from provision.tasks.logs import Metrics
    from provision.tasks.tensorboard import EventFile

SIGNS = "▁▂▃▄▅▆▇█"
NO_NUMBER = "x"
CURVE = 60  # signs of the curve


def _places(count: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{count}f}"


def _milliseconds(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:,.0f}"


COLUMNS: tuple[tuple[str, str, int, Callable[[float], str]], ...] = (  # field, heading, width, how
    ("loss", "loss", 11, _places(4)),
    ("lr", "lr", 11, lambda value: f"{value:.3g}"),
    ("grad_norm", "grad norm", 12, _places(3)),
    ("ms", "ms/step", 11, _milliseconds),
    ("tokens_per_second", "tokens/s", 12, _places(0)),
    ("eval_loss", "eval loss", 12, _places(4)),
)


def metrics_lines(found: Metrics, last: int | None) -> list[Line]:
    """A row for each step, at most the ``last`` ones; empty columns are omitted."""
    series = found.series
    rows = list(series) if last is None else series.last(last)
    columns = [each for each in COLUMNS if any(getattr(row, each[0]) is not None for row in rows)]
    head = "line" if series.counted else "step"
    lines = [Line(f"{head:>8}" + "".join(f"{heading:>{wide}}" for _, heading, wide, _ in columns), "bold", None)]
    resumed = {resume.at: resume.after for resume in series.resumes}
    for row in rows:
        if row.step in resumed:
            lines.append(Line(f"{'':>8}  resumed: step {row.step} follows step {resumed[row.step]}", "dim", None))
        cells = ((getattr(row, name), wide, how) for name, _, wide, how in columns)
        text = "".join(f"{'' if value is None else how(value):>{wide}}" for value, wide, how in cells)
        broken = any(value is not None and not math.isfinite(value) for value in (row.loss, row.eval_loss))
        lines.append(Line(f"{row.step:>8}{text}".rstrip(), "red" if broken else "", None))
    return lines


def events_output(written: EventFile) -> Summary:
    """The file of ``--tensorboard``, with what it contains."""
    data = {
        "run": written.run,
        "file": str(written.path),
        "bytes": written.bytes,
        "steps": written.steps,
        "samples": written.samples,
        "missing": dict(written.missing),
    }
    amount = f"{number(written.steps, 'step')}, {number(written.samples, 'sample')}, {size(written.bytes)}"
    return data, f"{written.path}: {amount}; to show it: tensorboard --logdir {quote(str(written.path.parent.parent))}"


def metrics_output(found: Metrics, last: int | None) -> Summary:
    """All of it for ``--json``, and one line for people."""
    series = found.series
    rows = list(series) if last is None else series.last(last)
    data = {
        "logs": list(found.names),
        "bytes": found.bytes,
        "sources": sorted(series.sources),
        "rank": series.rank,
        "ranks": list(series.ranks),
        "counted": series.counted,
        "total": series.total,
        "resumes": [resume._asdict() for resume in series.resumes],
        "rows": [{name: _plain(value) for name, value in row._asdict().items()} for row in rows],
    }
    return data, _sentence(found)


def curve(values: Sequence[float], width: int = CURVE) -> str:
    """The values as signs of eight heights, each the mean of as many; ``x`` where one is no finite number."""
    if not values:
        return ""
    count = min(width, len(values))
    parts = [values[place * len(values) // count : (place + 1) * len(values) // count] for place in range(count)]
    means = [fmean(part) if all(map(math.isfinite, part)) else math.nan for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    step = (high - low) / len(SIGNS) or 1.0
    return "".join(
        SIGNS[min(len(SIGNS) - 1, int((mean - low) / step))] if math.isfinite(mean) else NO_NUMBER for mean in means
    )


def loss_curve(found: Metrics) -> list[Line]:
    """The curve of the losses, with its lowest and its highest value; nothing where there are fewer than two."""
    losses = array("d", (row.loss for row in found.series if row.loss is not None))
    if len(losses) < 2:
        return []
    finite = array("d", filter(math.isfinite, losses))
    between = f"  {min(finite):.4g} to {max(finite):.4g}" if finite else ""
    return [Line(f"    loss  {curve(losses)}{between}", "", None)]


def _sentence(found: Metrics) -> str:
    series = found.series
    values = {name: (array("q"), array("d")) for name, *_ in COLUMNS}  # rows of a million steps would fill a GB
    count = step = 0
    for row in series:
        count, step = count + 1, row.step
        for name, (steps, column) in values.items():
            value = getattr(row, name)
            if value is not None:
                steps.append(step)
                column.append(value)
    more = len(found.names) - 1
    name = f"{found.names[0]} and {more} more" if more else found.names[0]
    progress = f"{count} lines" if series.counted else f"step {step}" + (f" of {series.total}" if series.total else "")
    parts = [f"{name}: {progress}", *_losses(*values["loss"]), *_evaluations(*values["eval_loss"])]
    ms, speed = values["ms"][1], values["tokens_per_second"][1]
    parts += [f"{_milliseconds(median(ms))} ms a step"] if ms else []
    parts += [f"{median(speed):,.0f} tokens/s"] if speed else []
    parts += [f"resumed at step {resume.at} after step {resume.after}" for resume in series.resumes[-1:]]
    others = len(series.ranks) - 1
    parts += (
        [f"rank {series.rank} ({others} more {'rank reports' if others == 1 else 'ranks report'} numbers)"]
        if others
        else []
    )
    return "; ".join(parts)


def _losses(steps: Sequence[int], losses: Sequence[float]) -> Iterator[str]:
    if losses:
        yield f"loss {losses[0]:.4g}, now {losses[-1]:.4g}" if len(losses) > 1 else f"loss {losses[0]:.4g}"
        broken = [step for step, loss in zip(steps, losses, strict=True) if not math.isfinite(loss)]
        if broken:
            yield f"no finite number at {len(broken)} of {len(losses)}, first at {broken[0]}"


def _evaluations(steps: Sequence[int], losses: Sequence[float]) -> Iterator[str]:
    best = min(((loss, step) for step, loss in zip(steps, losses, strict=True) if math.isfinite(loss)), default=None)
    if best:
        yield f"eval loss {losses[-1]:.4g}, best {best[0]:.4g} at {best[1]}"


def _plain(value: float | None) -> float | int | str | None:
    """A number for JSON, which has no NaN: other values become the text ``NaN``, ``Infinity`` or ``-Infinity``."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
