"""After ``rehearse``: the certificate in the terminal, and what a dry run would do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from provision.inventory import fold
from provision.output_text import Line, Style, Summary, clean, duration, wrap
from provision.rehearsal.certificate import WORDS, Certificate, about, fix, headline
from provision.rehearsal.faults import Place, Planned, inject_script
from provision.rehearsal.judging import Outcome

WIDTH = 80
_STYLES: dict[Outcome, Style] = {"survived": "green", "resumed": "yellow", "not survived": "red", "not tried": "dim"}


def certificate_rows(certificate: Certificate, page: Path) -> list[Line]:
    """The certificate, for 80 columns."""
    rows = [Line(f"rehearsal of {about(certificate)}", "bold"), Line("")]
    rows.append(Line(f"{'FAULT':<33}{'RESULT':<22}{'RECOVERY':>12}{'REPEATED':>13}"))
    for each in certificate.results:
        if each.outcome == "not tried":
            continue
        recovery = "-" if each.seconds is None else duration(each.seconds)
        steps = "-" if each.repeated is None else f"{each.repeated:,} step{'' if each.repeated == 1 else 's'}"
        row = f"{each.fault.about:<33}{WORDS[each.outcome]:<22}{recovery:>12}{steps:>13}"
        rows.append(Line(row, _STYLES[each.outcome]))
        rows.append(Line(f"    {each.node + ': ' if each.node else ''}{clean(each.text)}"))
        if text := fix(each):
            rows.append(Line(f"    try: {text}", "bold"))
    if untried := certificate.having("not tried"):
        rows += [Line(""), Line("NOT TRIED")]
        rows += [Line(f"{each.fault.about}: {clean(each.text)}", "dim") for each in untried]
    rows += [Line(""), Line(f"{headline(certificate)}", "bold"), Line(f"the certificate: {page}", hang=None)]
    rows += [Line(f"warning: {name}: {clean(why)}", "yellow") for name, why in certificate.left]
    return [Line(text, row.style, hang=None) for row in rows for text in wrap(row, WIDTH)]


def plan_lines(plan: Sequence[Planned], nodes: Sequence[str], seconds: float) -> list[str]:
    """What a rehearsal will do: each fault with its node and its seconds."""
    lines = [f"train on {fold(nodes)} for about {duration(seconds)}, in an output folder of the rehearsal, and there:"]
    for each in plan:
        time = f" for {duration(each.seconds)}" if each.seconds else ""
        lines.append(f"  {each.fault.about}{f' on {each.node}' if each.node else ''}{time}")
    return lines


def dry_run_output(plan: Sequence[Planned], nodes: Sequence[str], root: str, seconds: float) -> Summary:
    """The plan, and the script of each fault on its node. RUN stands for the run's id."""
    scripts = {}
    for each in plan:
        if each.node:
            folder, rank = f"{root}/runs/RUN", nodes.index(each.node)
            place = Place("RUN", each.node, folder, f"{folder}/logs/node{rank}", f"{folder}/OUTPUT", ("*-[0-9]*",))
            scripts[each.fault.name] = inject_script(each.fault, place, each.seconds)
    faults = [
        {"fault": each.fault.name, "node": each.node or None, "seconds": each.seconds, "root": each.fault.root}
        for each in plan
    ]
    data = {"run": None, "nodes": list(nodes), "faults": faults, "scripts": scripts}
    texts = [
        f"# --- {each.fault.name} on {each.node}{', as root' if each.fault.root else ''}\n{scripts[each.fault.name]}"
        for each in plan
        if each.node
    ]
    return data, "\n".join([*plan_lines(plan, nodes, seconds), "", *texts]).rstrip("\n")
