"""The releases of a node: which there are, which to go back to, which may go, and whether one is as it was. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from provision.errors import ClusterctlError
from provision.model import Finding, Inventory
from provision.render import render
from provision.script import whole

SHOWN = 5  # files named in one finding


@dataclass(frozen=True)
class Releases:
    """What ``listing`` found on a node.

    Attributes:
        current: the release behind the inventory's prefix; None if there is none.
        complete: releases that have passed their smoke test, with the time of it (seconds since 1970), oldest first.
        broken: folders of releases that never did.
        history: releases in the order in which they were to become the current one, the latest last.
        used: releases from which processes run, with their ids.
        left: folders, beside the releases, that commands which broke off have left.
        same: equal on nodes that share the folder; empty where it is not known.
    """

    current: str | None = None
    complete: Mapping[str, int] = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    history: tuple[str, ...] = ()
    used: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    same: str = ""

    @property
    def previous(self) -> str | None:
        """The release that was the current one before; None if no other is left."""
        # What was written behind the current one was never switched to.
        before = len(self.history) - self.history[::-1].index(self.current) if self.current in self.history else None
        for release in reversed(self.history[:before]):
            if release != self.current and release in self.complete:
                return release
        others = [release for release in self.complete if release != self.current]
        return others[-1] if others else None

    def removable(self, keep: int) -> tuple[str, ...]:
        """Releases that may go: all but the current one, those in use, and so many of the others that ``keep`` stay."""
        ordered = [*dict.fromkeys(reversed(self.history)), *reversed(list(self.complete))]
        stays = [release for release in dict.fromkeys([self.current, *ordered]) if release in self.complete][:keep]
        return tuple(
            release for release in (*self.complete, *self.broken) if release not in {*stays, self.current, *self.used}
        )


def listing(inventory: Inventory, *, used: bool = False) -> str:
    """The read-only script whose output ``read_listing`` understands; with ``used`` it looks at processes too."""
    return render("release/list.sh.j2", root=str(inventory.root), prefix=str(inventory.prefix), used=used)


def read_listing(out: str) -> Releases:
    """Releases from the output of ``listing``.

    Raises:
        ClusterctlError: the output is not whole; the script was cut off.
    """
    rows = [line.split() for line in out.removesuffix("\n").split("\n")]  # splitlines would also cut elsewhere
    if rows[-1] != ["end"]:
        raise ClusterctlError("its answer is incomplete")
    releases = [(row[1], row[2] == "ok", _when(row[3])) for row in rows if row[:1] == ["release"]]
    complete = sorted(((when, name) for name, good, when in releases if good))
    used: dict[str, list[str]] = {}
    for row in rows:
        if row[:1] == ["used"]:
            used.setdefault(row[1], []).append(row[2])
    current = next((row[1] for row in rows if row[:1] == ["current"] and len(row) == 2), None)
    return Releases(
        current=current,
        complete={name: when for when, name in complete},
        broken=tuple(name for name, good, _ in releases if not good),
        history=tuple(row[2] for row in rows if row[:1] == ["history"] and len(row) == 3),
        used={name: tuple(processes) for name, processes in used.items()},
        left=tuple(row[1] for row in rows if row[:1] == ["left"]),
        same=next((row[1] for row in rows if row[:1] == ["same"] and len(row) == 2), ""),
    )


def _when(text: str) -> int:
    """A time that a date can be made of: before the year 10000."""
    when = whole(text)
    if not 0 <= when < 253402300800:
        raise ValueError(f"{text} is no time")
    return when


def verify(release: str) -> str:
    """The read-only script that compares a release, by its path, with its lists."""
    return render("release/verify.sh.j2", release=release)


def absent(node: str, has: Releases, wanted: str | None) -> Finding:
    """The finding for a node without the release that is to be verified: the one that was named, or a current one."""
    there = ", ".join(has.complete) or "none"
    if wanted:
        fix = f"clusterctl releases --limit {node}"
        return Finding("release", node, "FAIL", f"has no release {wanted}; there: {there}", fix=fix)
    back = f"clusterctl rollback --to {list(has.complete)[-1]} --limit {node}" if has.complete else ""
    return Finding(
        "release",
        node,
        "FAIL",
        f"has no current release; there: {there}",
        expected="a release that the inventory's prefix leads to",
        why="nothing was deployed to the node, or its prefix was changed since",
        fix=back or f"clusterctl deploy --limit {node}",
    )


def findings(node: str, release_id: str, out: str) -> Finding:
    """What ``verify`` found on a node.

    Raises:
        ClusterctlError: the output is not whole; the script was cut off.
    """
    rows = out.removesuffix("\n").split("\n")  # splitlines would also cut names
    if rows[-1] != "end":
        raise ClusterctlError("its answer is incomplete")
    bad = [match.groups() for row in rows if (match := re.fullmatch(r"bad (\w+) (.+)", row))]
    checked = next((row.split()[1] for row in rows if row.startswith("checked ")), "0")
    if not bad:
        return Finding("release", node, "OK", f"release {release_id}: {checked} files are as they were deployed")
    return Finding(
        "release",
        node,
        "FAIL",
        f"release {release_id}: {_counted(bad)}",
        expected="what was deployed",
        why="somebody or the disk changed it after its deploy; pip belongs into the environment that is packed",
        fix=f"clusterctl deploy --repair --limit {node}",
    )


def _counted(bad: Sequence[tuple[str, ...]]) -> str:
    """How many of each kind, with the first names."""
    parts = []
    for kind, words in (("changed", "changed"), ("missing", "missing"), ("added", "added"), ("link", "links changed")):
        names = [name for what, name in bad if what == kind]
        if names:
            more = ", ..." if len(names) > SHOWN else ""
            parts.append(f"{len(names)} {words} ({', '.join(_readable(names[:SHOWN]))}{more})")
    return "; ".join(parts)


def _readable(names: Iterable[str]) -> Iterable[str]:
    return (name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name in names)
