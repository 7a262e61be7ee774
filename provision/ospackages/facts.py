"""What a node answered about its packages, and whether it can take what it lacks. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from provision.ospackages.node import Choice
from provision.script import whole

_ROOM = 4  # bytes on the disk for each byte of a bundle: the file, its copy, its packages, and what they install


@dataclass(frozen=True)
class Facts:
    """What a node answered.

    Attributes:
        refused: why it can take no bundle; empty if it can.
        lacks: wanted packages that it does not have.
        broken: packages that dpkg has not finished.
        errors: what apt said when it found no way.
        changes: kind of change (``new``, ``upgrade``, ``downgrade``, ``remove``) to names.
        holder: who uses dpkg now: process and name.
        free: bytes on the disks that it installs to; None: not told.
        name: release and architecture; empty where nothing is lacking.
    """

    refused: str = ""
    lacks: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    changes: Mapping[str, tuple[str, ...]] | None = None
    holder: str = ""
    free: int | None = None
    name: str = ""


def read(out: str) -> Facts:
    """What the script of ``facts`` said."""
    lines: dict[str, list[str]] = {}
    for line in out.splitlines():
        word, _, rest = line.partition(" ")
        lines.setdefault(word, []).append(rest.strip())

    def names(word: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(rest.split()[0] for rest in lines.get(word, ()) if rest))

    free = [whole(rest) for rest in lines.get("free", ()) if re.fullmatch("[0-9]{1,18}", rest)]
    return Facts(
        refused=" ".join(lines.get("refused", ())),
        lacks=tuple(" ".join(lines.get("lacks", ())).split()),
        broken=names("broken"),
        errors=tuple(lines.get("unmet", ()) or lines.get("error", ())),
        changes={kind: names(kind) for kind in ("new", "upgrade", "downgrade", "remove")},
        holder=" ".join(lines.get("holder", ())),
        free=min(free, default=None),
        name=" ".join(lines.get("name", ())),
    )


def judge(found: Facts, chosen: Sequence[Choice], replace: Sequence[str]) -> str:
    """Why a node cannot take its packages, with what to do about it; empty if it can."""
    if found.refused:
        return found.refused
    if not found.lacks:
        return ""
    if found.broken:
        return f"dpkg was interrupted: {', '.join(found.broken)} half installed; run there: dpkg --configure -a"
    if found.errors:
        return (
            f"apt finds no way to install {', '.join(found.lacks)}: {'; '.join(found.errors)}; if the node is newer "
            "than the bundle, pack it again"
        )
    changes = found.changes or {}
    removed = [name for name in changes.get("remove", ()) if name not in replace]
    if removed:
        return (
            f"installing {', '.join(found.lacks)} would remove {', '.join(removed)}; to allow it, write "
            f"`replace: [{', '.join(removed)}]` below os_packages in the inventory"
        )
    if lower := changes.get("downgrade", ()):
        return f"installing {', '.join(found.lacks)} would downgrade {', '.join(lower)}; pack the bundle again"
    size = next((choice.bundle.size for choice in chosen if choice.name == found.name), 0)
    if found.free is not None and found.free < _ROOM * size:
        return f"{found.free / 1e6:.0f} MB free, {_ROOM * size / 1e6:.0f} MB are needed; free some space in /var"
    return ""
