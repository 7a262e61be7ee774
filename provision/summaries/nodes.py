"""After ``deploy``, ``push``, ``releases``, ``rollback``, ``prune`` and ``verify``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from provision.env.report.text import number, size
from provision.inventory import fold
from provision.output_text import fold_equal
from provision.summaries._summary import Summary
from provision.summaries.services import serviced

if TYPE_CHECKING:
    from provision.env.release.catalog import Releases
    from provision.model import Finding, Inventory
    from provision.tasks.deploy import DeployResult
    from provision.tasks.push import PushResult
    from provision.tasks.releases import Pruned, Switched


def deployed(result: DeployResult, inventory: Inventory) -> Summary:
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
        of_services, text = serviced(result.services, "apply")
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


def pushed(result: PushResult) -> Summary:
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


def listed(found: Mapping[str, Releases]) -> Summary:
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


def switched(result: Switched) -> Summary:
    """After ``rollback``."""
    data = {name: {"before": before, "current": after} for name, (before, after) in result.nodes.items()}
    states = {
        name: f"release {after} is current" + ("" if before == after else f", {before} was")
        for name, (before, after) in result.nodes.items()
    }
    text = "\n".join(f"{names}: {state}" for state, names in fold_equal(states).items())
    return {"changed": result.changed, "nodes": data}, text if result.changed else f"{text}; nothing changed"


def pruned(result: Pruned) -> Summary:
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


def verified(findings: Sequence[Finding]) -> Summary:
    """After ``verify``."""
    data = [vars(finding) for finding in findings]
    good = {finding.node: finding.observed for finding in findings if finding.verdict == "OK"}
    return {"findings": data}, "\n".join(f"{names}: {state}" for state, names in fold_equal(good).items())
