"""After what is done to node services: ``services apply``, ``status``, ``verify`` and ``undo``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from provision.inventory import fold
from provision.output_text import fold_equal
from provision.summaries._summary import Summary

if TYPE_CHECKING:
    from provision.model import StepResult
    from provision.tasks.services import ServicesResult

Verb = Literal["apply", "status", "verify", "undo"]

# The state of a service without a failed step, and of one that was changed.
_GOOD: Mapping[Verb, str] = {
    "apply": "unchanged",
    "status": "up to date",
    "verify": "works",
    "undo": "nothing to undo",
}
_CHANGED: Mapping[Verb, str] = {"apply": "set up", "undo": "undone"}


def serviced(result: ServicesResult, verb: Verb) -> Summary:
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
        said = "; ".join(f"{_short(step)}: {' '.join(step.detail.split())}" for step in wrong)
        return f"{'does not work' if verb == 'verify' else 'failed'}: {said}"
    would = [_short(step) for step in steps if step.state == "would change"]
    if would:
        return "differs: " + ", ".join(would) if verb == "status" else "would change: " + ", ".join(would)
    changed = [_short(step) for step in steps if step.state == "changed"]
    if changed:
        return _CHANGED.get(verb, "changed") + (f" ({', '.join(changed)})" if verb == "apply" else "")
    return _GOOD[verb]


def _short(step: StepResult) -> str:
    return step.name.partition(": ")[2]
