"""How two bundles differ, as one mapping for ``--json`` and as text of 80 columns."""

from __future__ import annotations

from typing import Any

from provision.env.report.difference import Difference, Sending, Version
from provision.env.report.words import columns, line, number, size, some

FEW = 20  # packages or folders that are named before --json is needed


def difference_data(difference: Difference) -> dict[str, Any]:
    """Everything, for programs. Sizes in bytes."""
    added, removed, changed = _sorted(difference)
    counts = difference.counts()
    return {
        "old": _side(difference, "old"),
        "new": _side(difference, "new"),
        "identical": difference.identical,
        "same_content": difference.same_content,
        "packages": {
            "added": {version.name: version.new for version in added},
            "removed": {version.name: version.old for version in removed},
            "changed": {version.name: [version.old, version.new] for version in changed},
            "same_version_other_content": list(difference.touched),
        },
        "facts": {version.name: [version.old or None, version.new or None] for version in difference.facts},
        "unowned": list(difference.unowned),
        "data": list(difference.data),
        "counts": counts,
        "files": [change._asdict() for change in difference.changes],
        "recompiled": difference.recompiled,
        "other_times": difference.times,
        "sends": _sending(difference.sending),
        "sends_always": _sending(difference.always),
    }


def difference_text(difference: Difference, *, files: bool = False) -> str:
    """What a person reads; ``files`` lists every path that differs."""
    old, new = difference.old, difference.new
    title = f"{old.name} {old.release_id} -> {new.name} {new.release_id}"
    if difference.identical:
        return f"{title}\nthe same release: a deploy would send nothing"
    added, removed, changed = _sorted(difference)
    counts = difference.counts()
    lines = [title]
    if difference.same_content:
        lines.append("the same content, other times")
    lines += line("added", *_table([(version.name, version.new) for version in added]))
    lines += line("removed", *_table([(version.name, version.old) for version in removed]))
    lines += line("changed", *_table([(version.name, f"{version.old} -> {version.new}") for version in changed]))
    lines += line(
        "facts", *_table([(fact.name, f"{fact.old or 'none'} -> {fact.new or 'none'}") for fact in difference.facts])
    )
    lines += line("same version", *_table([(name, _counted(counts[name])) for name in difference.touched]))
    lines += line("no package", *_table([(name, _counted(counts[name])) for name in difference.unowned]))
    lines += line("data", *_table([(name, _counted(counts[name])) for name in difference.data]))
    lines += line("only times", *_times(difference))
    lines += line("deploy sends", *_words(difference))
    if files and difference.changes:
        lines += ["", *(f"{change.sign} {change.path}" for change in difference.changes)]
    return "\n".join(lines)


def _sorted(difference: Difference) -> tuple[list[Version], list[Version], list[Version]]:
    """Packages that were added, removed, and changed."""
    packages = difference.packages
    added = [version for version in packages if not version.old]
    removed = [version for version in packages if not version.new]
    return added, removed, [version for version in packages if version.old and version.new]


def _table(rows: list[tuple[str, str]]) -> list[str]:
    return some(columns(rows), FEW, "--json") if rows else []


def _counted(count: dict[Any, int]) -> str:
    words = {"+": "added", "-": "removed", "~": "changed"}
    told = [f"{count[sign]:,} {words[sign]}" for sign in words if sign in count]
    return f"files: {', '.join(told)}"


def _times(difference: Difference) -> list[str]:
    found = []
    if difference.times:
        found.append(f"of {number(difference.times, 'file')}")
    if difference.recompiled:
        found.append(f"{number(difference.recompiled, 'file')} compiled anew from the same source")
    return found


def _words(difference: Difference) -> list[str]:
    sending, always = difference.sending, difference.always
    chunks = f"{sending.chunks} of {number(len(difference.new.chunks), 'chunk')}"
    return [
        f"{chunks} to a node that has {difference.old.release_id}",
        f"{size(sending.compressed)} compressed, {size(sending.plain)} plain",
        f"and the files that hold the prefix: {size(always.compressed)}, {size(always.plain)} plain",
    ]


def _side(difference: Difference, which: str) -> dict[str, str]:
    manifest = difference.old if which == "old" else difference.new
    return {"name": manifest.name, "release": manifest.release_id, "digest": manifest.digest}


def _sending(sending: Sending) -> dict[str, int]:
    return {"chunks": sending.chunks, "compressed_bytes": sending.compressed, "bytes": sending.plain}
