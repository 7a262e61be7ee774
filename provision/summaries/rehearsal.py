"""After ``rehearse``: the certificate in the terminal, and what a dry run would do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from provision.output_text import Line, Style, clean, duration
from provision.rehearsal.certificate import WORDS, Certificate, about, fix, headline
from provision.rehearsal.faults import Fault
from provision.rehearsal.judging import Outcome

_STYLES: dict[Outcome, Style] = {"survived": "green", "resumed": "yellow", "not survived": "red", "not tried": "dim"}


def certificate_rows(certificate: Certificate, page: Path) -> list[Line]:
    """The certificate, for 80 columns."""
    rows = [Line(f"rehearsal of {about(certificate)}", "bold"), Line("")]
    rows.append(Line(f"{'FAULT':<33}{'RESULT':<23}{'RECOVERY':>11}{'REPEATED':>13}"))
    for each in certificate.results:
        if each.outcome == "not tried":
            continue
        recovery = "-" if each.seconds is None else duration(each.seconds)
        steps = "-" if each.repeated is None else f"{each.repeated:,} steps" if each.repeated != 1 else "1 step"
        row = f"{each.fault.about:<33}{WORDS[each.outcome]:<23}{recovery:>11}{steps:>13}"
        rows.append(Line(row, _STYLES[each.outcome]))
        rows.append(Line(f"    {each.node + ': ' if each.node else ''}{clean(each.text)}"))
        if text := fix(each):
            rows.append(Line(f"    try: {text}", "bold"))
    if untried := certificate.having("not tried"):
        rows += [Line(""), Line("NOT TRIED")]
        rows += [Line(f"{each.fault.about}: {clean(each.text)}", "dim") for each in untried]
    rows += [Line(""), Line(f"{headline(certificate)}. The certificate: {page}", "bold")]
    rows += [Line(f"warning: {name}: {clean(why)}", "yellow") for name, why in certificate.left]
    return rows


def plan_lines(faults: Iterable[tuple[Fault, str, int]], nodes: str, seconds: float) -> list[str]:
    """What a rehearsal will do: each fault with its node and its seconds."""
    lines = [f"This rehearsal trains on {nodes} for about {duration(seconds)}, in a folder of its own, and there it will:"]
    for fault, node, lasts in faults:
        time = f" for {duration(lasts)}" if lasts else ""
        lines.append(f"  {fault.about} on {node}{time}: {fault.expected}")
    return lines
