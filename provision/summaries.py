"""What a finished command says: one mapping for ``--json``, one text for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from provision.env.report.words import number, size
from provision.inventory import fold
from provision.output_text import fold_equal

if TYPE_CHECKING:
    from provision.env.release.upkeep import Releases
    from provision.model import Finding, Inventory
    from provision.sandbox import Sandbox
    from provision.tasks.deploy import DeployResult
    from provision.tasks.pack import PackResult
    from provision.tasks.push import PushResult
    from provision.tasks.releases import Pruned, Switched
    from provision.tasks.tool import ToolResult
    from provision.tasks.train import TrainResult

Summary = tuple[Mapping[str, Any], str]


def packed(result: PackResult) -> Summary:
    """After ``pack-env``."""
    manifest = result.manifest
    unpacked = sum(entry.size for entry in manifest.files)
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items() if version)
    text = (
        f"packed {manifest.name} ({versions or 'python ' + (manifest.python or '?')}): "
        f"{size(result.size)} of {size(unpacked)}, {len(manifest.files)} files, {len(manifest.chunks)} chunks "
        f"in {result.seconds:.1f} s\n"
        f"{result.bundle} holds release {manifest.release_id}"
        + (f", in {number(len(result.files), 'file')}" if len(result.files) > 1 else "")
    )
    data = {
        "bundle": str(result.bundle),
        "files_written": [str(path) for path in result.files],
        "release": manifest.release_id,
        "bytes": result.size,
        "unpacked_bytes": unpacked,
        "files": len(manifest.files),
        "chunks": len(manifest.chunks),
        "versions": dict(manifest.versions),
        "notices": list(manifest.notices),
        "seconds": round(result.seconds, 2),
    }
    return data, text


def tooled(result: ToolResult) -> Summary:
    """After ``pack-tool``."""
    tool = result.tool
    glibc = ".".join(map(str, tool.glibc))
    data = {
        "file": str(result.file),
        "digest": tool.digest,
        "python": tool.python,
        "machine": tool.machine,
        "glibc": glibc,
        "bytes": tool.size,
        "unpacked_bytes": tool.unpacked,
        "files": tool.files,
        "notices": list(tool.notices),
        "seconds": round(result.seconds, 2),
    }
    text = (
        f"packed clusterctl with Python {tool.python} for {tool.machine}, glibc {glibc} or later: "
        f"{size(tool.size)} of {size(tool.unpacked)} in {result.seconds:.1f} s\n"
        f"on the other side: sh {result.file.name} deploy --inventory inventory.yaml"
    )
    return data, text


def deployed(result: DeployResult, inventory: Inventory) -> Summary:
    """After ``deploy``; equal nodes are folded."""
    data = {
        "release": result.release_id,
        "prefix": str(inventory.prefix),
        "changed": result.changed,
        "dry_run": result.dry_run,
        "nodes": dict(result.states),
        "bytes_sent": result.bytes_sent,
        "seconds": {stage: round(seconds, 2) for stage, seconds in result.seconds.items()},
        "steps": {step: round(seconds, 2) for step, seconds in result.steps.items()},
    }
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
    return data, text


def trained(result: TrainResult) -> Summary:
    """After ``train``."""
    data = {
        "run": result.run,
        "nodes": list(result.nodes),
        "world_size": result.world_size,
        "steps": result.steps,
        "first_loss": result.first_loss,
        "last_loss": result.last_loss,
        "seconds": round(result.seconds, 1),
        "output": result.output,
        "logs": str(result.folder),
    }
    losses = ""
    if result.first_loss is not None and result.last_loss is not None:
        losses = f", loss {result.first_loss:.4g} -> {result.last_loss:.4g}"
    text = (
        f"logs in {result.folder}\n"
        f"checkpoint in {result.nodes[0]}:{result.output}\n"
        f"trained on {fold(result.nodes)} (world size {result.world_size}): "
        f"{result.steps if result.steps is not None else '?'} steps{losses}, {result.seconds:.0f} s"
    )
    return data, text


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
    rows += [f"  {name}  not finished; clusterctl prune removes it" for name in (*has.broken, *has.left)]
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


def enrolled(states: Mapping[str, str]) -> Summary:
    """After ``init``."""
    text = "\n".join(f"{names}: {state}" for state, names in fold_equal(states).items())
    return {"nodes": dict(states)}, text


def sandbox_up(box: Sandbox) -> Summary:
    """After ``sandbox up``."""
    data = _sandbox(box)
    return data, f"{fold(data['nodes'])} are up; inventory.yaml, known_hosts and id_ed25519 are in {box.directory}"


def sandboxes(boxes: Sequence[Sandbox]) -> Summary:
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
