"""Examine a node before a deploy, and decide whether it can take a release. Pure: a script, its output, reasons."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from provision.env.bundle.manifest import Manifest
from provision.env.release.catalog import ReleasePaths
from provision.env.text import size
from provision.errors import ClusterctlError
from provision.model import Inventory
from provision.render import render
from provision.script import whole

# uname -m as conda names it (conda's platform is "linux-" and this).
MACHINES = {"x86_64": "64", "aarch64": "aarch64", "ppc64le": "ppc64le", "s390x": "s390x"}

# Files and folders take multiples of this on nodes' file systems.
BLOCK = 4096
SPACE_MARGIN = 1.02  # for the file system's own tables

REQUIRED = ("tar", "sha256sum")

State = Literal["complete", "unpacked", "absent"]


@dataclass(frozen=True)
class NodeFacts:
    """Facts about a node from ``examine``. Sizes in bytes; None if unknown."""

    machine: str = ""
    glibc: str = ""
    user: str = ""
    tools: frozenset[str] = frozenset()
    prefix_link: str | None = None
    prefix_other: bool = False
    releases_foreign: bool = False
    release: State = "absent"
    others: int = 0  # releases of other bundles
    begun: bool = False  # an interrupted deploy left files, which are used or deleted
    base: str = "/"
    writable: bool = False
    noexec: bool = False
    relay_left: bool = False  # a killed relay left a key
    free_bytes: int | None = None
    free_inodes: int | None = None


def examine(inventory: Inventory, release_id: str, relay: str) -> str:
    """The read-only script for ``read_facts``; ``relay`` marks the keys of relays."""
    return render(
        "release/examine.sh.j2",
        prefix=str(inventory.prefix),
        root=str(inventory.root),
        release=release_id,
        relay=relay,
    )


def read_facts(out: str) -> NodeFacts:
    """Parse the output of ``examine``.

    Raises:
        ClusterctlError: the output is incomplete.
        ValueError, KeyError: the output is invalid.
    """
    facts = dict(re.findall(r"^fact ([a-z0-9_.]+)=(.*)$", out, flags=re.MULTILINE))
    if "end" not in facts:
        raise ClusterctlError("its answer is incomplete")
    state = facts["release"]
    if state not in ("complete", "unpacked", "absent"):
        raise ValueError(f"unknown release state {state!r}")
    return NodeFacts(
        machine=facts["machine"],
        glibc=facts["glibc"].removeprefix("glibc "),
        user=facts["user"],
        tools=frozenset(key[5:] for key, value in facts.items() if key.startswith("tool.") and value == "yes"),
        prefix_link=facts.get("prefix.link"),
        prefix_other="prefix.other" in facts,
        releases_foreign="releases.foreign" in facts,
        release=state,
        others=whole(facts["others"]),
        begun="begun" in facts,
        base=facts["base"],
        writable=facts["writable"] == "yes",
        noexec="noexec" in facts,
        relay_left="relay.left" in facts,
        free_bytes=whole(facts["free_bytes"]) if "free_bytes" in facts else None,
        free_inodes=whole(facts["free_inodes"]) if "free_inodes" in facts else None,
    )


def is_current(facts: NodeFacts, paths: ReleasePaths) -> bool:
    """Whether the release is complete on the node and current."""
    return facts.release == "complete" and facts.prefix_link in (paths.target, paths.release)


class Action(Enum):
    """A deploy's action on a node; the value is its text for the user."""

    NOTHING = "unchanged"
    SWITCH = "switch"
    TEST = "test and switch"
    SEND = "send"
    REPAIR = "repair"

    @property
    def sends(self) -> bool:
        """Whether files go to the node."""
        return self in (Action.SEND, Action.REPAIR)


def action(facts: NodeFacts, paths: ReleasePaths, *, repair: bool = False) -> Action:
    """The work of a deploy on a node."""
    if facts.release == "absent":
        return Action.SEND
    if repair:
        return Action.REPAIR
    if facts.release == "unpacked":
        return Action.TEST
    return Action.NOTHING if is_current(facts, paths) else Action.SWITCH


def judge(facts: NodeFacts, inventory: Inventory, manifest: Manifest) -> str | None:
    """Why this node cannot take the release, with what to do about it; None if it can."""
    return (
        _lacks_tools(facts)
        or _wrong_platform(facts, manifest)
        or _is_foreign(facts, inventory)
        or _not_writable(facts, inventory)
        or _not_executable(facts)
        or _is_full(facts, manifest)
    )


def space(sizes: Mapping[str, int]) -> int:
    """The disk space for files of these sizes, in bytes."""
    blocks = sum(max(1, math.ceil(size / BLOCK)) for size in sizes.values())
    return int(blocks * BLOCK * SPACE_MARGIN)


def _lacks_tools(facts: NodeFacts) -> str | None:
    missing = [tool for tool in REQUIRED if tool not in facts.tools]
    if not missing:
        return None
    packages = " ".join("coreutils" if tool == "sha256sum" else tool for tool in missing)
    problem = "is missing; install it" if len(missing) == 1 else "are missing; install them"
    return f"{' and '.join(missing)} {problem} (Debian: apt-get install {packages})"


def _wrong_platform(facts: NodeFacts, manifest: Manifest) -> str | None:
    here = f"linux-{MACHINES.get(facts.machine, facts.machine)}"
    if here != manifest.platform:
        return f"is {here}, the bundle was packed for {manifest.platform}; pack the environment on a {here} machine"
    if manifest.glibc and facts.glibc and _version(facts.glibc) < _version(manifest.glibc):
        return (
            f"has glibc {facts.glibc}, the environment needs {manifest.glibc}; "
            "build the environment on a system as old as the node's"
        )
    return None


def _is_foreign(facts: NodeFacts, inventory: Inventory) -> str | None:
    releases = f"{inventory.root}/releases"
    if facts.prefix_other:
        return f"{inventory.prefix} exists and is not clusterctl's; choose another prefix or move it"
    link = facts.prefix_link
    if link is not None and not link.startswith(("releases/", f"{releases}/")):
        return f"{inventory.prefix} is a link to {link}, not clusterctl's; choose another prefix or remove the link"
    if facts.releases_foreign:
        return f"{releases} exists and is not clusterctl's; choose a prefix in another folder"
    return None


def _not_writable(facts: NodeFacts, inventory: Inventory) -> str | None:
    if facts.writable:
        return None
    return (
        f"{facts.user} has no permission to write in {facts.base}; choose a prefix below the user's home, "
        f"or let an administrator run: install -d -o {facts.user} {inventory.root}"
    )


def _not_executable(facts: NodeFacts) -> str | None:
    if not facts.noexec:
        return None
    return f"{facts.base} is mounted noexec, so no program starts there; choose a prefix on another file system"


def _is_full(facts: NodeFacts, manifest: Manifest) -> str | None:
    # A release shares most of its files with the previous one or with an interrupted deploy.
    if facts.release != "absent" or facts.others or facts.begun:
        return None
    return lacks_space(
        facts, space({entry.path: entry.size for entry in manifest.files if entry.type != "link"}), len(manifest.files)
    )


def lacks_space(facts: NodeFacts, need: int, inodes: int) -> str | None:
    """Why ``need`` bytes in ``inodes`` files and folders do not fit; None if they do."""
    if facts.free_bytes is not None and facts.free_bytes < need:
        return (
            f"{size(facts.free_bytes)} free at {facts.base}, the environment needs {size(need)}; "
            "free some space (clusterctl prune) or choose a prefix on a larger disk"
        )
    if facts.free_inodes is not None and facts.free_inodes < inodes:
        return f"{facts.free_inodes} inodes free at {facts.base}, the environment needs {inodes}"
    return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d{1,9}", text))
