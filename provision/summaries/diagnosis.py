"""After ``diagnose``: the run, the verdict, its evidence, the fix, and the consequences."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from provision.diagnosis.case_code import encode
from provision.diagnosis.cause import Sign
from provision.diagnosis.causes import TABLE
from provision.diagnosis.conditions import RULES
from provision.diagnosis.verdict import TIMEOUT
from provision.env.text import number
from provision.inventory import fold
from provision.output_text import Summary, duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from provision.diagnosis import Case, Condition, Diagnosis, Verdict
    from provision.diagnosis.cause import Cause

WIDTH = 80  # columns
_PROGRAM = "clusterctl\N{NO-BREAK SPACE}"
_LONG = 4 * WIDTH  # characters of a log line that are shown


def diagnosis_output(result: Diagnosis) -> Summary:
    """The verdict and the conditions; times of ``--json`` are epoch seconds of the node's clock."""
    lines = (fill_commands(line, result) for line in _lines(result))
    data = _data(result)
    for part in (data["verdict"] or {}, *data["conditions"]):
        part["fix"] = [fill_commands(each, result) for each in part.get("fix", ())]
    return data, "\n".join(row for line in lines for row in (wrap_line(line) if line else [""]))


def fill_commands(text: str, result: Diagnosis) -> str:
    """Insert the run, rank and node into the commands of an advice; log files have none of these."""
    if not result.run or "clusterctl " not in text:
        return text
    verdict = result.verdict
    rank = f" --rank {verdict.rank}" if verdict is not None and verdict.rank is not None else ""
    text = re.sub(r"(clusterctl (?:collect|logs|resume|status|stop)) RUN\b", rf"\1 {result.run}", text)
    text = text.replace(" --rank N", rank)
    return text.replace("--exclude NODE", f"--exclude {verdict.node}") if verdict is not None and verdict.node else text


def _lines(result: Diagnosis) -> Iterator[str]:
    blocks: list[list[str]] = []
    if result.verdict is not None:
        blocks.append(list(_verdict(result.verdict, result.run)))
    blocks += [list(_condition(each, result.run)) for each in result.conditions]
    if result.earlier:
        blocks.append(list(_earlier(result.earlier)))
    if not blocks:
        blocks.append([_fine(result)])
    if result.case is not None:
        blocks.append(["code to read over the phone:", *(f"  {line}" for line in encode(result.case))])
    if result.missing:
        blocks.append([f"no answer from {fold(name for name, _ in result.missing)}: {result.missing[0][1]}"])
    if result.run and (result.verdict is not None or result.conditions or result.earlier):
        yield f"run {result.run}{f': {result.state}' if result.state else ''}"
    for place, block in enumerate(blocks):
        if place:
            yield ""
        yield from block


def _fine(result: Diagnosis) -> str:
    name = f"run {result.run}" if result.run else "these logs"
    match result.state:
        case "running" if result.missing:
            # The known events may be old.
            return f"{name} was running when it last reported; its current state is unknown without all nodes"
        case "running":
            return f"{name} is running, and no problem was found"
        case "finished":
            return f"{name} has finished, and no problem was found"
        case "stopped":
            return f"{name} was stopped; nothing failed"
        case _:
            return f"{name}: no failure was found"


def _verdict(verdict: Verdict, run: str) -> Iterator[str]:
    first = verdict.first
    if first is None:
        yield from _unknown(verdict)
        return
    alone = first.cause.alone if verdict.alone else ""
    who = _UNRESOLVED if verdict.unresolved else _who(first.node, first.rank)
    failed = "" if verdict.unresolved else " did not arrive" if "missing" in first.captured else " failed first"
    yield f"{who}{failed}: {first.says}{alone}"
    if verdict.by_file:
        yield "  the logs have no common time: of equal causes, the one in the first file counts"
    if verdict.also:
        yield f"  at the same moment on {_places(verdict.also)}"
    yield from (f"  {_cut(line)}" for line in first.before)
    yield f"  {_at(first.time)}{_cut(first.text)}"
    yield from (f"    {_cut(line)}" for line in first.more)
    if first.place:
        yield f"  in {first.place}"
    yield from _advice(first.fix, run, first.node)
    yield from _consequences(first, verdict.echoes, by_file=verdict.by_file)


def _unknown(verdict: Verdict) -> Iterator[str]:
    who = _who(verdict.node, verdict.rank) if verdict.node else "the run"
    reason = f": {verdict.reason}" if verdict.reason else ""
    yield f"{who} failed first{reason}; no line of the logs says why"
    if verdict.last:
        yield "  its last lines:"
        yield from (f"    {_cut(line)}" for line in verdict.last)
        if verdict.place:
            yield f"  until {verdict.place}"
    yield from _consequences(None, verdict.echoes)


def _consequences(first: Sign | None, echoes: Sequence[Sign], *, by_file: bool = False) -> Iterator[str]:
    """What followed, a line for each cause."""
    groups: dict[str, list[Sign]] = {}
    for sign in echoes:
        groups.setdefault(sign.says if sign.cause.grade != "echo" else sign.cause.says, []).append(sign)
    head = "also: " if by_file else "then: "
    for says, signs in groups.items():
        later = _later(first, signs, by_file=by_file)
        yield f"{head}{says} ({_places(signs)}{later})"
        head = "      "


def _later(first: Sign | None, signs: Sequence[Sign], *, by_file: bool) -> str:
    times = [
        sign.time for sign in signs if sign.time is not None and first and (not by_file or sign.node == first.node)
    ]
    if first is None or first.time is None or not times or min(times) - first.time < 1:
        return ""
    return f", {duration(min(times) - first.time)} later"


def _condition(condition: Condition, run: str) -> Iterator[str]:
    first, *more = condition.says
    yield first
    yield from more
    yield from _advice(condition.fix, run)


def earlier_reasons(verdicts: Iterable[Verdict]) -> Iterator[str]:
    """Of each earlier attempt, who failed and why."""
    for verdict in verdicts:
        reason = verdict.first.says if verdict.first else verdict.reason or "no line of the logs says why"
        yield f"{_who(verdict.node, verdict.rank)}: {reason}"


def _earlier(verdicts: Iterable[Verdict]) -> Iterator[str]:
    for attempt, reason in enumerate(earlier_reasons(verdicts), 1):
        yield f"attempt {attempt}: {reason}"


def _advice(fix: Iterable[str], run: str, node: str = "NODE") -> Iterator[str]:
    """What to do, with the run's id and the node's name in its commands."""
    head = "try: "
    for line in fix:
        yield head + (re.sub(r"\bNODE\b", node, re.sub(r"\bRUN\b", run, line)) if run else line)
        head = "     "


def _who(node: str, rank: int | None) -> str:
    return f"{node} rank {rank}" if rank is not None else node


def _places(signs: Iterable[Sign]) -> str:
    """``node01 rank 0-1, node02``: who shows something."""
    nodes: dict[str, set[int]] = {}
    for sign in signs:
        nodes.setdefault(sign.node, set()).update(() if sign.rank is None else (sign.rank,))
    return ", ".join(f"{node} rank {_folded(sorted(ranks))}" if ranks else node for node, ranks in nodes.items())


def _folded(numbers: Sequence[int]) -> str:
    rows: list[list[int]] = []
    for each in numbers:
        if rows and each == rows[-1][-1] + 1:
            rows[-1].append(each)
        else:
            rows.append([each])
    return ",".join(str(row[0]) if len(row) == 1 else f"{row[0]}-{row[-1]}" for row in rows)


def _at(time: float | None) -> str:
    if time is None:
        return ""
    return datetime.fromtimestamp(time, timezone.utc).strftime("%H:%M:%S.%f")[:-3] + "Z  "


def _cut(text: str) -> str:
    return text if len(text) <= _LONG else text[: _LONG - 1] + "…"


def wrap_line(line: str) -> list[str]:
    """Wrap a line. Further rows are indented by two; paths stay whole."""
    if line.removeprefix("try:").lstrip().startswith("clusterctl run "):
        return [line]  # a command to paste
    head = len(line) - len(line.lstrip())
    for word in ("try: ", "then: ", "also: "):
        head = len(word) if line.startswith(word) else head
    kept = line.replace("clusterctl ", _PROGRAM)  # the name of a command stays in the row of the program
    rows = textwrap.wrap(
        kept, WIDTH, subsequent_indent=" " * (head + 2), break_on_hyphens=False, break_long_words=False
    )
    return [row.replace(_PROGRAM, "clusterctl ") for row in rows] or [line]


def _data(result: Diagnosis) -> dict[str, Any]:
    return {
        "run": result.run or None,
        "state": result.state or None,
        "verdict": _verdict_data(result.verdict) if result.verdict else None,
        "conditions": [{"id": each.id, "says": list(each.says), "fix": list(each.fix)} for each in result.conditions],
        "attempts": result.attempts,
        "earlier": [_verdict_data(each) for each in result.earlier],
        "missing": dict(result.missing),
        "code": list(encode(result.case)) if result.case is not None else [],
    }


def case_output(case: Case) -> Summary:
    """The content of a case code, on a machine that has nothing of the run."""
    cause = next((each for each in TABLE if each.id == case.cause), None)
    data = {**dataclasses.asdict(case), "confidence": case.confidence, "conditions": list(case.conditions)}
    data["says"] = cause.says if cause else None
    return data, "\n".join(row for line in _case(case, cause) for row in wrap_line(line))


def _case(case: Case, cause: Cause | None) -> Iterator[str]:
    state = f" {case.state}" if case.state else ""
    release = f", release {case.release}" if case.release else ""
    nodes = number(case.nodes, "node")
    yield f"a run on {nodes}{state}: clusterctl {case.version}{release}"
    who = " ".join(part for part in (_numbered("node", case.node, 1), _numbered("rank", case.rank)) if part)
    if case.state in {"", "failed"} or case.cause:
        says = _without_values(cause.says) if cause else _unexplained(case)
        alone = cause.alone if cause and case.alone else ""
        is_timeout = case.cause.startswith(TIMEOUT)
        failed = f"{who or 'the run'} {'did not arrive' if is_timeout else 'failed first'}"
        yield f"{failed if who or not is_timeout else _UNRESOLVED}: {says}{alone}"
        yield f"  cause {case.cause or 'unknown'}, confidence {case.confidence}"
    facts = (
        _numbered("attempt", case.attempts if case.attempts > 1 else None),
        _numbered("last step", case.step),
        _numbered("exit code", case.exit_code),
        _numbered("signal", case.signal),
        f"no logs from {number(case.missing, 'node')}" if case.missing else "",
        "the logs have no common time" if case.by_file else "",
    )
    if any(facts):
        yield f"  {', '.join(fact for fact in facts if fact)}"
    titles = {rule.id: rule.title for rule in RULES}
    for each in case.conditions:
        yield f"also: {titles.get(each, _NEWER)} ({each})"
    yield from _advice(Sign(cause, "").fix if cause else (), "")


_UNRESOLVED = "the logs do not say which rank did not arrive"
_NEWER = "a problem that this version of clusterctl does not know"


def _unexplained(case: Case) -> str:
    if not case.cause:
        return "no line of the logs says why"
    return f"a cause that this version of clusterctl does not know; version {case.version} does"


def _numbered(name: str, value: int | None, first: int = 0) -> str:
    """``rank 3``; nodes are counted from one, as in a report."""
    return "" if value is None else f"{name}{'-' if first else ' '}{value + first}"


def _without_values(says: str) -> str:
    """A cause's sentence without the values of a run: their places are an ellipsis."""
    return re.sub(r"\{\w+\}", "\N{HORIZONTAL ELLIPSIS}", re.sub(r"\[[^\[\]]*\{[^\[\]]*\]", "", says))


def _verdict_data(verdict: Verdict) -> dict[str, Any]:
    first = verdict.first
    return {
        "cause": first.cause.id if first else None,
        "node": verdict.node or None,
        "rank": verdict.rank,
        "says": first.says + (first.cause.alone if verdict.alone else "") if first else verdict.reason or None,
        "fix": list(first.fix) if first else [],
        "time": first.time if first else None,
        "line": first.text if first else None,
        "place": (first.place if first else verdict.place) or None,
        "traceback": list(first.before) if first else [],
        "source": first.cause.source if first else None,
        "also": [_sign_data(sign) for sign in verdict.also],
        "consequences": [_sign_data(sign) for sign in verdict.echoes],
        "last_lines": list(verdict.last),
    }


def _sign_data(sign: Sign) -> dict[str, Any]:
    return {
        "cause": sign.cause.id,
        "node": sign.node,
        "rank": sign.rank,
        "time": sign.time,
        "line": sign.text,
        "place": sign.place or None,
    }
