"""What a finished command says: one mapping for ``--json``, one text for people. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from provision.inventory import fold

if TYPE_CHECKING:
    from provision.model import Inventory
    from provision.sandbox import Sandbox
    from provision.tasks import DeployResult, PackResult, TrainResult

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
    )
    data = {
        "bundle": str(result.bundle),
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
    }
    if not result.changed:
        text = f"{fold(result.states)}: release {result.release_id} is current, nothing changed"
    elif result.dry_run:
        would = [f"{names}: would {state}" for state, names in _folded(result.states) if state != "unchanged"]
        same = [f"{names}: unchanged" for state, names in _folded(result.states) if state == "unchanged"]
        text = "\n".join([*would, *same, "dry run: nothing was written on any node"])
    else:
        states = "; ".join(f"{names}: {state}" for state, names in _folded(result.states))
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


def enrolled(states: Mapping[str, str]) -> Summary:
    """After ``init``."""
    text = "\n".join(f"{names}: {state}" for state, names in _folded(states))
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


def size(count: float) -> str:
    """Bytes for people, in powers of 1000 as disks and networks are sold."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def _folded(states: Mapping[str, str]) -> list[tuple[str, str]]:
    """``{node: state}`` as (state, folded names), in the order in which the states first appear."""
    by_state: dict[str, list[str]] = defaultdict(list)
    for name, state in states.items():
        by_state[state].append(name)
    return [(state, fold(names)) for state, names in by_state.items()]
