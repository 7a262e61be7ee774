"""The releases of a node: their paths, and how to list, choose and verify them. Pure.

docs/releases.md, "On a node", describes all paths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from provision.errors import ClusterctlError
from provision.model import Finding, Inventory
from provision.render import render
from provision.script import printable, whole


@dataclass(frozen=True)
class ReleasePaths:
    """The paths of one release, as text for scripts."""

    root: PurePosixPath
    link: PurePosixPath
    release_id: str

    @classmethod
    def of(cls, inventory: Inventory, release_id: str) -> ReleasePaths:
        """The paths of a release under an inventory's root."""
        return cls(inventory.root, inventory.prefix, release_id)

    @property
    def releases(self) -> str:
        """The folder of all releases."""
        return f"{self.root}/releases"

    @property
    def release(self) -> str:
        """The environment's real prefix, which relocated files contain."""
        return f"{self.releases}/{self.release_id}"

    @property
    def target(self) -> str:
        """The target of the inventory's prefix, a symlink, if this release is the current one."""
        return f"releases/{self.release_id}"

    @property
    def mark(self) -> str:
        """Exists if the release is complete and passed its smoke test."""
        return f"{self.release}.ok"

    @property
    def incoming(self) -> str:
        """The release while it is unpacked."""
        return f"{self.releases}/.incoming-{self.release_id}"

    @property
    def transfer(self) -> str:
        """The state of a transfer: received parts, and units that are not unpacked yet."""
        return f"{self.releases}/.transfer-{self.release_id}"

    @property
    def removing(self) -> str:
        """A release that is being removed."""
        return f"{self.releases}/.removing-{self.release_id}"


SHOWN = 5  # files named in one finding


@dataclass(frozen=True)
class Releases:
    """The releases of a node, from ``listing``.

    Attributes:
        current: the release that the inventory's prefix leads to; None if there is none.
        complete: releases that passed their smoke test, with its time (seconds since 1970), oldest first.
        broken: folders of releases that did not.
        history: releases in the order of switching, the latest last.
        used: releases that processes run from, with process ids.
        left: folders that interrupted commands left.
        same: equal on nodes that share the folder; empty if unknown.
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
        """The release that was current before; None if there is no other."""
        # Later entries than the current release were never switched to.
        before = len(self.history) - self.history[::-1].index(self.current) if self.current in self.history else None
        for release in reversed(self.history[:before]):
            if release != self.current and release in self.complete:
                return release
        others = [release for release in self.complete if release != self.current]
        return others[-1] if others else None

    def removable(self, keep: int) -> tuple[str, ...]:
        """Releases to remove: all except the current one, used ones, and the latest others up to ``keep`` in total."""
        ordered = [*dict.fromkeys(reversed(self.history)), *reversed(list(self.complete))]
        stays = [release for release in dict.fromkeys([self.current, *ordered]) if release in self.complete][:keep]
        return tuple(
            release for release in (*self.complete, *self.broken) if release not in {*stays, self.current, *self.used}
        )


def list_script(inventory: Inventory, *, used: bool = False) -> str:
    """The read-only script for ``read_listing``; with ``used`` it also examines processes."""
    return render("release/list.sh.j2", root=str(inventory.root), prefix=str(inventory.prefix), used=used)


def read_listing(out: str) -> Releases:
    """Parse the output of ``listing``.

    Raises:
        ClusterctlError: the output is incomplete.
    """
    rows = [line.split() for line in out.removesuffix("\n").split("\n")]  # splitlines also splits at other characters
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
    """A time before the year 10000, so that it can become a date."""
    when = whole(text)
    if not 0 <= when < 253402300800:
        raise ValueError(f"{text} is not a time")
    return when


def verify_script(release: str) -> str:
    """The read-only script that compares the release at a path with its lists."""
    return render("release/verify.sh.j2", release=release)


def absent_finding(node: str, has: Releases, wanted: str | None) -> Finding:
    """The finding for a node without the release to verify: ``wanted``, or a current one."""
    there = ", ".join(has.complete) or "none"
    if wanted:
        fix = f"clusterctl releases --limit {node}"
        return Finding("release", node, "FAIL", f"has no release {wanted}; its releases: {there}", fix=fix)
    back = f"clusterctl rollback --to {list(has.complete)[-1]} --limit {node}" if has.complete else ""
    return Finding(
        "release",
        node,
        "FAIL",
        f"has no current release; its releases: {there}",
        expected="a release that the inventory's prefix leads to",
        why="no release was deployed to the node, or its prefix was changed",
        fix=back or f"clusterctl deploy --limit {node}",
    )


def verify_finding(node: str, release_id: str, out: str) -> Finding:
    """The finding from the output of ``verify``.

    Raises:
        ClusterctlError: the output is incomplete.
    """
    rows = out.removesuffix("\n").split("\n")  # splitlines also splits names
    if rows[-1] != "end":
        raise ClusterctlError("its answer is incomplete")
    bad = [match.groups() for row in rows if (match := re.fullmatch(r"bad (\w+) (.+)", row))]
    checked = next((row.split()[1] for row in rows if row.startswith("checked ")), "0")
    if not bad:
        return Finding("release", node, "OK", f"release {release_id}: {checked} files are unchanged")
    return Finding(
        "release",
        node,
        "FAIL",
        f"release {release_id}: {_count_text(bad)}",
        expected="the deployed files",
        why="a user, a program or a disk error changed the release; run pip in the environment that is packed instead",
        fix=f"clusterctl deploy --repair --limit {node}",
    )


def _count_text(bad: Sequence[tuple[str, ...]]) -> str:
    """The number of each kind, with the first names."""
    parts = []
    for kind, words in (("changed", "changed"), ("missing", "missing"), ("added", "added"), ("link", "links changed")):
        names = [name for what, name in bad if what == kind]
        if names:
            more = ", ..." if len(names) > SHOWN else ""
            parts.append(f"{len(names)} {words} ({', '.join(map(printable, names[:SHOWN]))}{more})")
    return "; ".join(parts)
