"""The report's HTML: tables and pictures that need no script, and the data of the curves.

Everything from nodes and logs is escaped; ``html`` has the frame of the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from statistics import fmean, median
from typing import Any

from provision import __version__
from provision.inventory import fold
from provision.masking import mask_text
from provision.output_text import duration
from provision.render import template_text
from provision.report.curves import run_curves
from provision.report.data import (
    SHOWN,
    Happening,
    NodeData,
    RunData,
    bands,
    clock_jumps,
    configuration,
    described,
    happenings,
    row_times,
    step_times,
)
from provision.report.html import html_page
from provision.report.names import RULES
from provision.report.picture import Points, escaped, picture
from provision.run.difference import KINDS, RANKS, compare
from provision.run.preflight import from_record

_UPLOT = "report/uplot-1.6.32"
_CURVES = (  # a row's field, and the English title
    ("loss", "Loss"),
    ("eval_loss", "Evaluation loss"),
    ("lr", "Learning rate"),
    ("grad_norm", "Gradient norm"),
    ("tokens_per_second", "Tokens per second"),
    ("ms", "Milliseconds per step"),
)
_MEANS = (  # of a node's samples
    ("gpu", "GPU utilisation, %"),
    ("gpu_memory", "GPU memory, GiB"),
    ("power", "GPU power, W"),
    ("temperature", "GPU temperature, °C"),
    ("memory", "Memory used, GiB"),
    ("network", "Network, MB/s"),
)
_PACE = ("gpu", "power", "temperature")  # a slow GPU differs from the others in one of them
_FAR = 0.1  # part of the median
_VERDICTS = (("OK", "passed"), ("FAIL", "failed"), ("WARN", "warned"), ("UNKNOWN", "unknown"), ("N/A", "inapplicable"))
_STRAGGLERS = 100
_DRAWN = 8  # runs or nodes in a picture without scripts
_DIFFERENCES = 500
_TABLE = 40  # rows in the table of numbers
_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def report_page(runs: Sequence[RunData], now: float, removed: Mapping[str, int] | None = None) -> str:
    """The HTML of a report on one or several runs.

    Args:
        runs: the runs; the first one is compared with the others.
        now: epoch seconds.
        removed: by rule, how many values were removed from the runs (``redaction``); None: the runs are complete.
    """
    style = template_text(f"{_UPLOT}/uPlot.min.css") + template_text("report/report.css")
    scripts = [template_text(f"{_UPLOT}/uPlot.iife.min.js"), template_text("report/report.js")]
    data = _json({"runs": [run_curves(run) for run in runs]})
    title = ", ".join(run.id for run in runs)
    licence = template_text(f"{_UPLOT}/LICENSE").replace("--", "- -")
    body = "".join(_body(runs, now, removed))
    tail = f'<script id="data" type="application/json">{data}</script>\n<!-- uPlot 1.6.32\n{licence}-->\n'
    return html_page(title, body, style, scripts, tail)


def _json(data: Any) -> str:
    """JSON that is also safe inside ``<script>``."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character, escape in _ESCAPED.items():
        text = text.replace(character, escape)
    return text


def _label(key: str, english: str, tag: str = "span") -> str:
    """A text of the page itself, which the script replaces in Chinese browsers."""
    return f'<{tag} data-i="{key}">{english}</{tag}>'


def _body(runs: Sequence[RunData], now: float, removed: Mapping[str, int] | None) -> Iterator[str]:
    title = escaped(runs[0].id) if len(runs) == 1 else _label("comparison", "Comparison of runs")
    yield f"<header><h1>{title}</h1><p>{_label('written', 'Written by clusterctl')} {escaped(__version__)}, "
    yield f"<time>{_when(now)}</time></p></header><main>"
    yield _section("summary", "Summary", _summary(runs))
    if notes := list(_notes(runs)):
        yield "".join(f'<p class="note">{note}</p>' for note in notes)
    if len(runs) > 1:
        yield _section("differences", "Differences", _differences(runs))
    yield _section("curves", "Curves", _curves(runs))
    for key, english, part in (
        ("diagnosis", "Diagnosis", _diagnosis),
        ("attempts", "Restarts", _attempts),
        ("slowest", "Slowest rank", _slowest),
        ("preflight", "Checks before the start", _preflight),
        ("nodes", "Nodes", _nodes),
        ("configuration", "Configuration", _configuration),
        ("events", "Events", _events),
    ):
        parts = [(run, part(run)) for run in runs]
        content = "".join(
            (f"<h3>{escaped(run.id)}</h3>" if len(runs) > 1 else "") + text for run, text in parts if text
        )
        if content:
            yield _section(key, english, content)
    if removed is not None:
        yield _section("removed", "Removed from this report", _removed(removed))
    yield "</main>"


def _removed(removed: Mapping[str, int]) -> str:
    rows = [
        (_label(f"rule_{rule}", escaped(RULES[rule].title)), f"<code>{RULES[rule].word}-1</code>", _number(count))
        for rule, count in removed.items()
    ]
    text = _label(
        "removed_text", "The same value is the same word in the whole report. The values are not in this file."
    )
    heads = (("rule", "Rule"), ("word", "Word"), ("values", "Values"))
    return f"<p>{text}</p>{_table(heads, rows)}"


def _section(key: str, english: str, content: str) -> str:
    return f'<section id="{key}"><h2 data-i="{key}">{english}</h2>{content}</section>'


def _table(heads: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """A table; the cells are HTML already."""
    head = "".join(_label(key, english, "th") for key, english in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _when(time: float | None) -> str:
    if time is None:
        return ""
    try:
        return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, OSError, ValueError):
        return f"{time:.0f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.6g}" if isinstance(value, float) else f"{value:,}"


def _summary(runs: Sequence[RunData]) -> str:
    rows = []
    for run in runs:
        losses = [row for row in run.rows if row.loss is not None]
        speeds = [row.tokens_per_second for row in run.rows if row.tokens_per_second is not None]
        began, ended = run.began, run.ended
        attempts = max((each.attempt for each in happenings(run)), default=1)
        rows.append((
            escaped(run.id),
            f'<b class="state {escaped(run.state)}">{escaped(run.state)}</b>',
            _number(len(run.nodes) + len(run.missing)),
            _when(began),
            escaped(duration(max(0.0, ended - began))) if began is not None and ended is not None else "",
            _number(run.rows[-1].step) if run.rows else "",
            _number(losses[-1].loss) if losses else "",
            _number(round(median(speeds))) if speeds else "",
            _number(attempts - 1),
            escaped(_effective(run)),
            escaped(configuration(run).get("release", "")),
        ))  # fmt: skip
    heads = (
        ("run", "Run"), ("state", "State"), ("node_count", "Nodes"), ("started", "Started"),
        ("duration", "Duration"), ("last_step", "Last step"), ("last_loss", "Last loss"),
        ("speed", "Tokens/s (median)"), ("restarts", "Restarts"),
        ("effective", "Effective training time"), ("release", "Release"),
    )  # fmt: skip
    return _table(heads, rows)


def _effective(run: RunData) -> str:
    """The share of training; "" if it is unknown."""
    ratio = run.spent.ratio if run.spent is not None else None
    return "" if ratio is None else f"{100 * ratio:.1f} %"


def _notes(runs: Sequence[RunData]) -> Iterator[str]:
    """What a reader must know before the numbers."""
    for run in runs:
        name = f"{escaped(run.id)}: "
        if run.state in {"running", "starting", "meeting", "ending"}:
            yield name + _label("live", "the run was running when this report was written.")
        yield from (name + note for note in _expectation(run))
        if run.missing:
            missing = ", ".join(f"{escaped(node)} ({escaped(why)})" for node, why in list(run.missing.items())[:20])
            yield name + _label("no_files", "no files of these nodes:") + f" {missing}"
        if not run.rows:
            yield name + _label("no_numbers", "its log has no step and no loss.")
        broken = [row.step for row in run.rows if row.loss is not None and not abs(row.loss) < float("inf")]
        if broken:
            yield f"{name}{_label('not_finite', 'losses that are NaN or infinite:')} {len(broken):,}; "
            yield f"{_label('first_step', 'the first one is at step')} {broken[0]:,}"
        jumped = [node.name for node in run.nodes if clock_jumps(time for _, time in node.times)]
        jumped += [node.name for node in run.nodes if clock_jumps(sample.time for sample in node.samples)]
        if jumped:
            names = ", ".join(escaped(node) for node in dict.fromkeys(jumped))
            yield f"{name}{_label('jumped', 'the clocks of these nodes went back during the run:')} {names}"


def _expectation(run: RunData) -> Iterator[str]:
    """The expected band, and whether the run left it, in words."""
    band, state = run.expected, run.head.state if run.head else {}
    if band is None:
        return
    if not band.known:
        yield _label("no_band", "no step time is expected:") + f" {escaped(band.basis)}"
    if band.step_seconds is not None:
        measured = (state.get("measured") or {}).get("step_seconds")
        found = f"; {_label('measured_step', 'measured, median:')} {measured[1]:.3g} s" if measured else ""
        text = f"{band.step_seconds[0]:.3g} to {band.step_seconds[1]:.3g} s ({escaped(band.basis)})"
        yield _label("expected_step", "expected time of a step:") + f" {text}{found}"
    for key in ("slow", "full"):
        if state.get(key):
            yield f"<b>{escaped(state[key])}</b>"


def _differences(runs: Sequence[RunData]) -> str:
    """The differences as ``clusterctl compare`` finds them, and what is not known of some runs."""
    found = compare([described(run) for run in runs])
    rows = [
        (
            _label(f"d_{each.kind}", each.about.title),
            f"<code>{escaped(each.name)}</code>",
            *(escaped("\N{EN DASH}" if value is None else value) for value in each.values),
        )
        for each in found.differences[:_DIFFERENCES]
    ]
    text = ""
    if unknown := list(found.unknown):
        label = _label("unknown", "Not compared, because it is not known of every run:")
        text = f"<p>{label} {', '.join(_label(f'd_{kind}', KINDS[RANKS[kind]].title) for kind in unknown)}</p>"
    if not rows:
        return f"{text}<p>{_label('no_difference', 'No difference is known.')}</p>"
    if (more := len(found.differences) - len(rows)) > 0:
        text += f"<p>{_label('more_differences', 'Further differences are not listed:')} {more:,}</p>"
    order = _label("likely", "The most likely cause of another behaviour is first.")
    heads = (("type", "Kind"), ("name", "Name"), *(("", escaped(run.id)) for run in runs))
    return f"{text}<p>{order}</p>{_table(heads, rows)}"


def _curves(runs: Sequence[RunData]) -> str:
    pictures = []
    for name, title in _CURVES:
        lines: list[tuple[str, Points]] = [
            (run.id, [(row.step, value) for row in run.rows if (value := getattr(row, name)) is not None])
            for run in runs[:_DRAWN]
        ]
        if name == "ms":
            lines = [(run.id, points or _paces(run)) for run, (_, points) in zip(runs, lines, strict=False)]
        pictures.append(picture(title, lines, [bands(run).get(name) for run in runs[:_DRAWN]]))
    sampled = (("gpu", "GPU utilisation, %"), ("gpu_memory", "GPU memory, GiB"), ("memory", "Memory used, GiB"))
    for name, title in sampled:
        nodes = [(node, bands(run).get(name)) for run in runs for node in run.nodes][:_DRAWN]
        drawn = [(node.name, list(_sampled(node, name))) for node, _ in nodes]
        pictures.append(picture(title, drawn, [nodes[0][1]] if nodes else ()))
    tables = "".join(
        f"<details open><summary>{escaped(run.id)}</summary>{_numbers(run)}</details>" for run in runs if run.rows
    )
    return f'<div id="charts"></div><noscript>{"".join(pictures)}</noscript>{tables}'


def _paces(run: RunData) -> list[tuple[float, float]]:
    """Milliseconds per step from the times of the reports."""
    found = zip(run.rows, step_times(run.rows, row_times(run)), strict=True)
    return [(row.step, value) for row, value in found if value is not None]


def _sampled(node: NodeData, name: str) -> Iterator[tuple[float, float]]:
    start = node.samples[0].time if node.samples else 0.0
    for sample in node.samples:
        value = sample.values.get(name)
        if value is not None:
            yield sample.time - start, value


def _numbers(run: RunData) -> str:
    """A table of evenly spaced rows, with the last one."""
    by = max(1, -(-len(run.rows) // _TABLE))
    rows = [*run.rows[:-1:by], run.rows[-1]]
    fields = [(name, title) for name, title in _CURVES if any(getattr(row, name) is not None for row in rows)]
    cells = ((_number(row.step), *(_number(getattr(row, name)) for name, _ in fields)) for row in rows)
    return _table((("line", "Line") if run.counted else ("step", "Step"), *fields), cells)


def _diagnosis(run: RunData) -> str:
    return f"<pre>{_lines(run.diagnosis)}</pre>" if run.diagnosis else ""


def _lines(text: str) -> str:
    return "\n".join(escaped(line) for line in text.splitlines())


def _attempts(run: RunData) -> str:
    """The restarts with their causes."""
    found = [each for each in happenings(run) if each.kind == "restart"]
    first: dict[int, Happening] = {}
    for each in found:
        first.setdefault(each.attempt, each)
    rows = []
    for number, each in sorted(first.items()):
        cause = run.causes[number - 2] if 0 <= number - 2 < len(run.causes) else ""
        rows.append((_number(number - 1), _when(each.time), _number(each.step), escaped(each.text), escaped(cause)))
    heads = (("restart", "Restart"), ("time", "Time"), ("step", "Step"), ("text", "Text"), ("cause", "Cause"))
    return _table(heads, rows) if rows else ""


def _slowest(run: RunData) -> str:
    """What the agents recorded about a rank that the others wait for."""
    kinds = {"straggler", "stack"}
    found = [{"node": node.name, **event} for node in run.nodes for event in node.events if event.get("event") in kinds]
    found.sort(key=lambda event: event.get("time") or 0.0)
    rows = [
        (
            _when(event.get("time")),
            *(escaped(mask_text(str(event.get(name, "")))) for name in ("node", "rank", "kind", "text")),
        )
        for event in found[-_STRAGGLERS:]
    ]
    heads = (("time", "Time"), ("node", "Node"), ("rank", "Rank"), ("cause", "Cause"), ("text", "Text"))
    return _table(heads, rows) if rows else ""


def _preflight(run: RunData) -> str:
    """The results of the checks before the newest start."""
    done = from_record(run.record.get("preflight"))
    if done is None:
        return ""
    counts = [f"{count:,} {_label(f'v_{word}', word)}" for name, word in _VERDICTS if (count := done.checks.get(name))]
    rows = [
        (
            f'<span class="{"bad" if each.verdict == "FAIL" else "note"}">{escaped(each.verdict)}</span>',
            escaped(each.check),
            escaped(fold(each.nodes)),
            escaped(each.observed),
            escaped(each.fix),
        )
        for each in done.problems
    ]
    left_out = _label("left_out", "left out")
    rows += [(left_out, "", escaped(name), escaped(why), "") for name, why in done.dropped.items()]
    heads = (("verdict", "Verdict"), ("check", "Check"), ("node", "Node"), ("text", "Text"), ("fix", "Fix"))
    return f"<p>{', '.join(counts)}</p>" + (_table(heads, rows) if rows else "")


def _nodes(run: RunData) -> str:
    """The nodes with the means of their samples. Far means of what the speed depends on are marked."""
    measured = [
        each for each in _MEANS if any(each[0] in sample.values for node in run.nodes for sample in node.samples)
    ]
    names = [name for name, _ in measured]
    means = {node.name: {name: fmean(found) for name in names if (found := _values(node, name))} for node in run.nodes}
    known = {name: [each[name] for each in means.values() if name in each] for name in names}
    middle = {name: median(found) for name, found in known.items()}
    marked = _PACE if len(run.nodes) > 2 else ()  # of two nodes, nothing tells which is the slow one
    rows = [
        (
            escaped(node.name),
            _number(node.rank),
            escaped(node.state.get("state") or ""),
            *(_mean(means[node.name].get(name), middle[name] if name in marked else None) for name in names),
            _number(len(node.samples)),
        )
        for node in run.nodes
    ]
    rows += [(escaped(name), "", escaped(why), *("" for _ in names), "") for name, why in run.missing.items()]
    heads = (("node", "Node"), ("rank", "Rank"), ("state", "State"), *measured, ("samples", "Samples"))
    return _table(heads, rows) if rows else ""


def _values(node: NodeData, name: str) -> list[float]:
    return [sample.values[name] for sample in node.samples if name in sample.values]


def _mean(value: float | None, middle: float | None) -> str:
    """A node's mean, marked if it is far from the median of the nodes' means; ``middle`` is None for no mark."""
    if value is None:
        return ""
    is_far = middle is not None and abs(value - middle) > _FAR * abs(middle)
    return f'<b class="note">{value:,.1f}</b>' if is_far else f"{value:,.1f}"


def _configuration(run: RunData) -> str:
    rows = [
        (f"<code>{escaped(key)}</code>", f"<code>{escaped(value)}</code>") for key, value in configuration(run).items()
    ]
    return _table((("name", "Name"), ("value", "Value")), rows) if rows else ""


def _events(run: RunData) -> str:
    found = happenings(run)
    rows = [
        (
            _when(each.time),
            _number(each.step),
            escaped(", ".join(each.nodes[:4]) + (f" +{len(each.nodes) - 4}" if len(each.nodes) > 4 else "")),
            f'<span class="{each.level}">{escaped(each.kind)}</span>',
            escaped(each.text),
        )
        for each in found[-SHOWN:]
    ]
    heads = (("time", "Time"), ("step", "Step"), ("node", "Node"), ("kind", "Event"), ("text", "Text"))
    older = len(found) - SHOWN
    more = f"<p>{_label('older', 'Older events are not listed:')} {older:,}</p>" if older > 0 else ""
    return more + _table(heads, rows) if rows else ""
