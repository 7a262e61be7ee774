"""After commands on nodes: ``deploy``, ``push``, ``releases``, ``services``, ``init``, ``run`` and others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal

from provision.env.text import number, size
from provision.inventory import fold
from provision.output_text import Line, Summary, clean, fold_equal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from provision.env.release.catalog import Releases
    from provision.model import Finding, Inventory, Result, StepResult
    from provision.sandbox import Sandbox
    from provision.tasks.command import Commanded
    from provision.tasks.deploy import DeployResult
    from provision.tasks.init import Created
    from provision.tasks.push import PushResult
    from provision.tasks.releases import Pruned, Switched
    from provision.tasks.services import ServicesResult


def deploy_output(result: DeployResult, inventory: Inventory) -> Summary:
    """After ``deploy``; equal nodes are folded."""
    data: dict[str, Any] = {
        "release": result.release_id,
        "prefix": str(inventory.prefix),
        "changed": result.changed,
        "dry_run": result.dry_run,
        "nodes": dict(result.states),
        "bytes_sent": result.bytes_sent,
        "seconds": {stage: round(seconds, 2) for stage, seconds in result.seconds.items()},
        "steps": {step: round(seconds, 2) for step, seconds in result.steps.items()},
    }
    before = ""
    if result.services is not None:
        of_services, text = services_output(result.services, "apply")
        data |= {"services": of_services, "changed": result.changed or result.services.changed}
        before = text.removesuffix("\ndry run: nothing was written on any node") + "\n"
    if not result.changed:
        text = f"{fold(result.states)}: release {result.release_id} is current, nothing changed"
    elif result.dry_run:
        would = [
            f"{names}: would {state}" for state, names in fold_equal(result.states).items() if state != "unchanged"
        ]
        same = [f"{names}: unchanged" for state, names in fold_equal(result.states).items() if state == "unchanged"]
        text = "\n".join([*would, *same, "dry run: nothing was written on any node"])
    else:
        states = "; ".join(f"{names}: {state}" for state, names in fold_equal(result.states).items())
        total = sum(result.seconds.values())
        where = f"{inventory.prefix}, release {result.release_id}"
        text = f"{states} ({where}); {size(result.bytes_sent)} sent, {total:.0f} s"
    return data, before + text


def push_output(result: PushResult) -> Summary:
    """After ``push``; equal nodes are folded."""
    data = {
        "source": str(result.source),
        "destination": result.destination,
        "files": result.files,
        "bytes": result.size,
        "changed": result.changed,
        "dry_run": result.dry_run,
        "nodes": dict(result.states),
        "bytes_sent": result.bytes_sent,
        "seconds": round(result.seconds, 2),
    }
    what = f"{result.destination}: {number(result.files, 'file')}, {size(result.size)}"
    if not result.changed:
        return data, f"{fold(result.states)}: {what}, nothing changed"
    if result.dry_run:
        would = [
            f"{names}: would {state}" for state, names in fold_equal(result.states).items() if state != "unchanged"
        ]
        return data, "\n".join([*would, "dry run: nothing was written on any node"])
    states = "; ".join(f"{names}: {state}" for state, names in fold_equal(result.states).items())
    return data, f"{states} ({what}); {size(result.bytes_sent)} sent, {result.seconds:.0f} s"


def releases_output(found: Mapping[str, Releases]) -> Summary:
    """After ``releases``: what each node has, equal nodes folded."""
    data = {
        name: {
            "current": has.current,
            "previous": has.previous,
            "complete": list(has.complete),
            "broken": list(has.broken),
        }
        for name, has in found.items()
    }
    lines = []
    for text, names in fold_equal({name: _listing(has) for name, has in found.items()}).items():
        lines += [f"{names}:", text]
    return {"nodes": data}, "\n".join(lines)


def _listing(has: Releases) -> str:
    """One line for each release, the latest first."""
    words = {has.current: "current", has.previous: "previous"}
    rows = [
        f"  {name}  {datetime.fromtimestamp(when, timezone.utc):%Y-%m-%d %H:%M}  {words.get(name, '')}".rstrip()
        for name, when in reversed(list(has.complete.items()))
    ]
    rows += [f"  {name}  incomplete; to remove it: clusterctl prune" for name in (*has.broken, *has.left)]
    return "\n".join(rows) or "  none"


def rollback_output(result: Switched) -> Summary:
    """After ``rollback``."""
    data = {name: {"before": before, "current": after} for name, (before, after) in result.nodes.items()}
    states = {
        name: f"release {after} is current" + ("" if before == after else f", {before} was")
        for name, (before, after) in result.nodes.items()
    }
    text = "\n".join(f"{names}: {state}" for state, names in fold_equal(states).items())
    return {"changed": result.changed, "nodes": data}, text if result.changed else f"{text}; nothing changed"


def prune_output(result: Pruned) -> Summary:
    """After ``prune``."""
    verb = "would remove" if result.dry_run else "removed"
    states = {
        name: (f"{verb} {', '.join(gone)}" if gone else "nothing to remove")
        + (f"; in use: {', '.join(result.in_use[name])}" if result.in_use.get(name) else "")
        for name, gone in result.removed.items()
    }
    text = "\n".join(f"{names}: {state}" for state, names in fold_equal(states).items())
    nodes = {
        name: {"removed": list(gone), "in_use": list(result.in_use.get(name, ()))}
        for name, gone in result.removed.items()
    }
    return {"dry_run": result.dry_run, "nodes": nodes}, text


def verify_output(findings: Sequence[Finding]) -> Summary:
    """After ``verify``."""
    data = [vars(finding) for finding in findings]
    good = {finding.node: finding.observed for finding in findings if finding.verdict == "OK"}
    return {"findings": data}, "\n".join(f"{names}: {state}" for state, names in fold_equal(good).items())


Verb = Literal["apply", "status", "verify", "undo"]

# The states of a service without a failed step, and of a changed service.
_GOOD: Mapping[Verb, str] = {
    "apply": "unchanged",
    "status": "up to date",
    "verify": "works",
    "undo": "nothing to undo",
}
_CHANGED: Mapping[Verb, str] = {"apply": "set up", "undo": "undone"}


def services_output(result: ServicesResult, verb: Verb) -> Summary:
    """Each service once, nodes with the same state together, with the messages of failed steps."""
    states = {name: _states(steps, verb) for name, steps in result.steps.items()}
    data = {
        "services": list(result.services),
        "changed": result.changed,
        "dry_run": result.dry_run,
        "nodes": {
            name: {
                "services": states[name],
                "steps": [
                    {"name": step.name, "state": step.state, "detail": step.detail, "seconds": round(step.seconds, 2)}
                    for step in steps
                ],
            }
            for name, steps in result.steps.items()
        },
        "seconds": {stage: round(seconds, 2) for stage, seconds in result.seconds.items()},
    }
    if not result.services:
        return data, "the inventory has no services: docs/inventory.md lists the possible ones"
    if result.unreached:
        data["unreached"] = dict(result.unreached)
    if not any(states.values()):
        return data, f"{fold(states)}: nothing to do"
    lines = []
    shown = [name for name in result.services if verb != "undo" or _somewhere(name, states)]
    if not shown:
        return data, f"{fold(states)}: nothing to undo"
    wide = max(len(name) for name in shown)
    for service in shown:
        of_nodes = {name: each[service] for name, each in states.items() if service in each}
        head = f"{service:<{wide}}"
        for state, names in fold_equal(of_nodes).items():
            lines.append(f"{head}  {names}: {state}")
            head = " " * wide
    if result.dry_run and verb in _CHANGED:
        lines.append("dry run: nothing was written on any node")
    return data, "\n".join(lines)


def _somewhere(service: str, states: Mapping[str, Mapping[str, str]]) -> bool:
    return any(each.get(service, _GOOD["undo"]) != _GOOD["undo"] for each in states.values())


def _states(steps: tuple[StepResult, ...], verb: Verb) -> dict[str, str]:
    """The state of each service of one node."""
    of_service: dict[str, list[StepResult]] = {}
    for step in steps:
        of_service.setdefault(step.name.partition(": ")[0], []).append(step)
    return {service: _state(each, verb) for service, each in of_service.items()}


def _state(steps: list[StepResult], verb: Verb) -> str:
    wrong = [step for step in steps if step.state == "failed"]
    if wrong:
        failures = "; ".join(f"{_short(step)}: {' '.join(step.detail.split())}" for step in wrong)
        return f"{'does not work' if verb == 'verify' else 'failed'}: {failures}"
    would = [_short(step) for step in steps if step.state == "would change"]
    if would:
        return "differs: " + ", ".join(would) if verb == "status" else "would change: " + ", ".join(would)
    changed = [_short(step) for step in steps if step.state == "changed"]
    if changed:
        return _CHANGED.get(verb, "changed") + (f" ({', '.join(changed)})" if verb == "apply" else "")
    return _GOOD[verb]


def _short(step: StepResult) -> str:
    return step.name.partition(": ")[2]


def enroll_output(states: Mapping[str, str]) -> Summary:
    """After ``init``."""
    text = "\n".join(f"{names}: {state}" for state, names in fold_equal(states).items())
    return {"nodes": dict(states)}, text


def inventory_output(result: Created) -> Summary:
    """After ``init`` has written an inventory: the actions on the nodes, and the file."""
    data, text = enroll_output(result.states)
    text = f"{text}\nwrote {result.path}:\n" + "\n".join(f"  {line}" for line in result.text.splitlines())
    return {**data, "inventory": str(result.path), "text": result.text}, text


def sandbox_output(box: Sandbox) -> Summary:
    """After ``sandbox up``."""
    data = _sandbox(box)
    return data, f"{fold(data['nodes'])} are up; inventory.yaml, known_hosts and id_ed25519 are in {box.directory}"


def sandboxes_output(boxes: Sequence[Sandbox]) -> Summary:
    """After ``sandbox list``."""
    lines = [f"{box.name}: {fold(_sandbox(box)['nodes'])}, {box.status}, {box.directory}" for box in boxes]
    return {"sandboxes": [_sandbox(box) for box in boxes]}, "\n".join(lines) or "no sandbox on this machine"


def _sandbox(box: Sandbox) -> dict[str, Any]:
    return {
        "name": box.name,
        "state": box.status,
        "directory": str(box.directory),
        "nodes": {node.name: node.address for node in box.nodes},
    }


_RULE = "-" * 15


def command_output(result: Commanded) -> Summary:
    """After ``run``, for ``--json``; people get ``ran_rows``."""
    nodes: dict[str, dict[str, object]] = {
        name: {"rc": answer.rc, "out": answer.out, "err": answer.err, "seconds": round(answer.seconds, 3)}
        for name, answer in result.results.items()
    }
    nodes |= {
        name: {"rc": None, "out": "", "err": "", "reason": why}
        for name, why in result.failed.items()
        if name not in nodes
    }
    return {"command": result.command, "nodes": nodes}, ""


def command_rows(result: Commanded) -> list[Line]:
    """One block for each different output, the most frequent first: the names, then the unchanged output.

    stderr follows stdout. Exit codes are in the error, not here.
    """
    outputs = {name: _text(answer) for name, answer in result.results.items()}
    rows: list[Line] = []
    for text, names in _groups(outputs):
        if text:
            count = f" ({len(names)})" if len(names) > 1 else ""
            rows += [Line(_RULE, "dim"), Line(f"{fold(names)}{count}", "bold"), Line(_RULE, "dim")]
            rows += [Line(row, hang=None) for row in text.split("\n")]
    if not rows and outputs and not result.failed:
        rows.append(Line(f"{fold(outputs)}: done, no output"))
    return rows


def _text(answer: Result) -> str:
    parts = (clean(part).rstrip("\n") for part in (answer.out, answer.err))
    return "\n".join(part for part in parts if part)


def _groups(outputs: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for name, text in outputs.items():
        groups.setdefault(text, []).append(name)
    return sorted(groups.items(), key=lambda group: -len(group[1]))
