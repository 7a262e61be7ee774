"""The certificate of a rehearsal: its data, and one HTML page without requests to other hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from provision import __version__
from provision.env.text import number
from provision.inventory import fold
from provision.output_text import duration
from provision.rehearsal.judging import Outcome, Result
from provision.render import template_text
from provision.report.html import html_page
from provision.report.picture import escaped

JSON, HTML = "certificate.json", "certificate.html"
WORDS: dict[Outcome, str] = {
    "survived": "survived",
    "resumed": "survived, with resume",
    "not survived": "not survived",
    "not tried": "not tried",
}


@dataclass(frozen=True)
class Certificate:
    """What a job survived.

    Attributes:
        run: the rehearsal's run.
        job: the job's words.
        nodes: the nodes, in the order of their ranks.
        world_size: the number of processes.
        began: when it started, in UTC.
        seconds: how long the rehearsal took.
        start: seconds from the start of the run to its first step.
        results: of all faults, in the order of the rehearsal.
        left: by node, what could not be removed or undone.
    """

    run: str
    job: str
    nodes: tuple[str, ...]
    world_size: int
    began: str
    seconds: float
    start: float
    results: tuple[Result, ...]
    left: tuple[tuple[str, str], ...] = ()

    def having(self, *outcomes: Outcome) -> tuple[Result, ...]:
        """The results with one of these verdicts."""
        return tuple(each for each in self.results if each.outcome in outcomes)


def to_object(certificate: Certificate) -> dict[str, Any]:
    """The certificate for ``--json`` and its file; times are seconds."""
    return {
        "run": certificate.run,
        "job": certificate.job,
        "nodes": list(certificate.nodes),
        "world_size": certificate.world_size,
        "began": certificate.began,
        "seconds": certificate.seconds,
        "start_seconds": certificate.start,
        "version": __version__,
        "faults": [
            {
                "fault": each.fault.name,
                "outcome": each.outcome,
                "node": each.node or None,
                "text": each.text,
                "recovery_seconds": each.seconds,
                "repeated_steps": each.repeated,
                "lasted_seconds": each.lasted,
                "fix": fix(each) or None,
            }
            for each in certificate.results
        ],
        "left": dict(certificate.left),
    }


def fix(result: Result) -> str:
    """What to do about a fault that needs a command, or was not survived."""
    if result.outcome == "resumed":
        return "after such a fault: clusterctl resume"
    return result.fault.fix if result.outcome == "not survived" else ""


def headline(certificate: Certificate) -> str:
    """The result in a sentence."""
    tried = [each for each in certificate.results if each.outcome != "not tried"]
    good = certificate.having("survived", "resumed")
    text = f"survived {len(good)} of {number(len(tried), 'fault')}"
    if resumed := certificate.having("resumed"):
        text += f", {len(resumed)} with clusterctl resume"
    missing = len(certificate.results) - len(tried)
    return text + (f"; {missing} not tried" if missing else "")


def about(certificate: Certificate) -> str:
    """What was rehearsed, where and for how long."""
    where = f"{fold(certificate.nodes)} ({number(certificate.world_size, 'rank')})"
    return f"{certificate.job} on {where}, {duration(certificate.seconds)}"


def page(certificate: Certificate) -> str:
    """The certificate as HTML."""
    return html_page(f"Rehearsal of {certificate.job}", "".join(_body(certificate)), template_text("report/report.css"))


def _body(certificate: Certificate) -> Iterable[str]:
    yield f"<header><h1>{escaped(f'Rehearsal of {certificate.job}')}</h1>"
    yield f"<p>Written by clusterctl {escaped(__version__)}, <time>{escaped(certificate.began)}</time></p></header>"
    yield f"<main><section><h2>{escaped(headline(certificate).capitalize())}</h2>"
    yield _table(
        ("Run", "Nodes", "Ranks", "Duration", "Start to first step"),
        [
            (
                certificate.run,
                fold(certificate.nodes),
                str(certificate.world_size),
                duration(certificate.seconds),
                duration(certificate.start),
            )
        ],
    )
    yield "</section>"
    tried = [each for each in certificate.results if each.outcome != "not tried"]
    if tried:
        yield "<section><h2>Faults</h2>"
        heads = ("Fault", "Node", "Result", "Recovery", "Repeated steps", "What happened", "Next")
        rows = [
            (
                each.fault.about,
                each.node,
                WORDS[each.outcome],
                "" if each.seconds is None else duration(each.seconds),
                "" if each.repeated is None else f"{each.repeated:,}",
                each.text,
                fix(each),
            )
            for each in tried
        ]
        yield _table(heads, rows, bad=[each.outcome == "not survived" for each in tried])
        yield "</section>"
    if untried := certificate.having("not tried"):
        yield "<section><h2>Not tried</h2>"
        yield _table(("Fault", "Why"), [(each.fault.about, each.text) for each in untried])
        yield "</section>"
    for name, why in certificate.left:
        yield f'<p class="note"><b>{escaped(name)}</b>: {escaped(why)}</p>'
    yield "</main>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], bad: Sequence[bool] = ()) -> str:
    head = "".join(f"<th>{escaped(each)}</th>" for each in heads)
    marks = [' class="bad"' if each else "" for each in bad]
    body = "".join(
        f"<tr{marks[at] if at < len(marks) else ''}>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>"
        for at, row in enumerate(rows)
    )
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
