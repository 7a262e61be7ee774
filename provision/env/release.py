"""A release on a node: what is examined, when it is refused, and the steps that bring it there.

Everything here is pure: facts in, problems and steps out. The layout is described in docs/concepts.md, "On a node".
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from provision.model import Inventory, Step
from provision.render import render

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import PurePosixPath

    from provision.env.manifest import Manifest
from provision.errors import ClusterctlError

# uname -m as conda names it (conda's platform is "linux-" and this).
MACHINES = {"x86_64": "64", "aarch64": "aarch64", "ppc64le": "ppc64le", "s390x": "s390x"}

# Importing these and starting these is the proof that a release works; only those that were packed are tried.
MODULES = ("torch", "deepspeed", "llamafactory")
COMMANDS = (("torchrun", "--help"), ("deepspeed", "--help"), ("llamafactory-cli", "help"))

# What a file or folder takes at least, and in multiples of which, on the file systems that nodes have.
BLOCK = 4096
SPACE_MARGIN = 1.02  # for the file system's own tables

State = Literal["complete", "unpacked", "absent"]


@dataclass(frozen=True)
class NodeFacts:
    """What ``examine`` found on a node. Sizes in bytes; None where the node could not say."""

    machine: str = ""
    glibc: str = ""
    user: str = ""
    tools: frozenset[str] = frozenset()
    prefix_link: str | None = None
    prefix_other: bool = False
    releases_foreign: bool = False
    release: State = "absent"
    base: str = "/"
    writable: bool = False
    free_bytes: int | None = None
    free_inodes: int | None = None


def release_path(inventory: Inventory, manifest: Manifest) -> PurePosixPath:
    """The environment's real prefix on a node; everything relocated names this path."""
    return inventory.root / "releases" / manifest.release_id


def examine(inventory: Inventory, manifest: Manifest) -> str:
    """The read-only script whose output ``read_facts`` understands."""
    return render(
        "release/examine.sh.j2",
        prefix=str(inventory.prefix),
        root=str(inventory.root),
        release=manifest.release_id,
    )


def read_facts(out: str) -> NodeFacts:
    """Facts from the output of ``examine``.

    Raises:
        ClusterctlError: the output is not whole; the script was cut off.
    """
    facts = dict(re.findall(r"^fact ([a-z0-9_.]+)=(.*)$", out, flags=re.MULTILINE))
    if "end" not in facts:
        raise ClusterctlError("its answer is incomplete")
    state = facts["release"]
    assert state in ("complete", "unpacked", "absent")
    return NodeFacts(
        machine=facts["machine"],
        glibc=facts["glibc"].removeprefix("glibc "),
        user=facts["user"],
        tools=frozenset(key[5:] for key, value in facts.items() if key.startswith("tool.") and value == "yes"),
        prefix_link=facts.get("prefix.link"),
        prefix_other="prefix.other" in facts,
        releases_foreign="releases.foreign" in facts,
        release=state,
        base=facts["base"],
        writable=facts["writable"] == "yes",
        free_bytes=int(facts["free_bytes"]) if "free_bytes" in facts else None,
        free_inodes=int(facts["free_inodes"]) if "free_inodes" in facts else None,
    )


def is_current(facts: NodeFacts, inventory: Inventory, manifest: Manifest) -> bool:
    """Whether the release is complete on the node and the inventory's prefix points at it."""
    return facts.release == "complete" and _is_link_to(facts.prefix_link, inventory, manifest.release_id)


def judge(facts: NodeFacts, inventory: Inventory, manifest: Manifest) -> str | None:
    """Why this node cannot take the release, or None. The reason ends with what to do."""
    return (
        _wrong_tools(facts)
        or _wrong_platform(facts, manifest)
        or _not_ours(facts, inventory)
        or _not_writable(facts, inventory)
        or _too_small(facts, manifest)
    )


def steps(inventory: Inventory, manifest: Manifest) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps of the two stages: ``send`` (its ``receive`` step reads the tar stream on stdin) and ``activate``."""
    release = str(release_path(inventory, manifest))
    releases = str(inventory.root / "releases")
    incoming = f"{releases}/.incoming-{manifest.release_id}"
    target = f"releases/{manifest.release_id}"
    there = render("release/exists.sh.j2", path=release)
    send = (
        Step("prepare", render("release/prepare.sh.j2", releases=releases, incoming=incoming), unless=there),
        Step("receive", render("release/receive.sh.j2", incoming=incoming), unless=there, stdin=True),
        Step("seal", render("release/seal.sh.j2", incoming=incoming, release=release), unless=there),
    )
    packed = {entry.path for entry in manifest.files}
    program = "import " + ", ".join(["sys", *(m for m in MODULES if manifest.versions.get(m))])
    commands = [argv for argv in COMMANDS if f"bin/{argv[0]}" in packed]
    activate = (
        Step(
            "smoke test",
            render("release/smoke.sh.j2", release=release, program=program, commands=commands),
            unless=render("release/exists.sh.j2", path=f"{release}.ok"),
        ),
        Step(
            "switch",
            render("release/switch.sh.j2", root=str(inventory.root), link=inventory.prefix.name, target=target),
            unless=render("release/is_link.sh.j2", link=str(inventory.prefix), target=target),
        ),
    )
    return send, activate


def _is_link_to(link: str | None, inventory: Inventory, release_id: str) -> bool:
    return link in (f"releases/{release_id}", str(inventory.root / "releases" / release_id))


def _wrong_tools(facts: NodeFacts) -> str | None:
    if "tar" in facts.tools:
        return None
    return "tar is missing; install it (Debian: apt-get install tar)"


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


def _not_ours(facts: NodeFacts, inventory: Inventory) -> str | None:
    releases = f"{inventory.root}/releases"
    if facts.prefix_other:
        return f"{inventory.prefix} exists and is not clusterctl's; choose another prefix or move it away"
    link = facts.prefix_link
    if link is not None and not link.startswith(("releases/", f"{releases}/")):
        return f"{inventory.prefix} is a link to {link}, not clusterctl's; choose another prefix or remove the link"
    if facts.releases_foreign:
        return f"{releases} exists and is not clusterctl's; choose a prefix in a folder of its own"
    return None


def _not_writable(facts: NodeFacts, inventory: Inventory) -> str | None:
    if facts.writable:
        return None
    return (
        f"{facts.user} may not write in {facts.base}; choose a prefix below the user's home, "
        f"or let an administrator run: install -d -o {facts.user} {inventory.root}"
    )


def _too_small(facts: NodeFacts, manifest: Manifest) -> str | None:
    if facts.release != "absent":
        return None
    blocks = sum(max(1, math.ceil(entry.size / BLOCK)) for entry in manifest.files if entry.type != "link")
    need = int(blocks * BLOCK * SPACE_MARGIN)
    if facts.free_bytes is not None and facts.free_bytes < need:
        return (
            f"{_gigabytes(facts.free_bytes)} free at {facts.base}, the environment needs {_gigabytes(need)}; "
            "free some space or choose a prefix on a larger disk"
        )
    if facts.free_inodes is not None and facts.free_inodes < len(manifest.files):
        return f"{facts.free_inodes} inodes free at {facts.base}, the environment needs {len(manifest.files)}"
    return None


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def describe(facts: Mapping[str, NodeFacts], inventory: Inventory, manifest: Manifest) -> dict[str, str]:
    """One short word for each node: what a deploy has to do there."""
    words = {"complete": "switch", "unpacked": "test and switch", "absent": "send"}
    return {
        name: "unchanged" if is_current(fact, inventory, manifest) else words[fact.release]
        for name, fact in facts.items()
    }
