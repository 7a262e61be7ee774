"""env.same: every node uses the same release of the environment.

A release's name is made of the digest of everything in it; ``.clusterctl/complete`` comes last when it is unpacked, and
the mark ``<id>.ok`` when it has been tried (docs/releases.md, "On a node").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, warn
from provision.checks._host import pairs, unread
from provision.checks._judging import odd
from provision.model import Finding, Node
from provision.render import quote

ID = "env.same"
LEVEL = 0
TITLE = "every node uses the same release of the environment"
WHY = "Ranks with other versions of torch or NCCL hang at the first exchange, or train something else."

_NONE = "no release"


def probe(seen: Plan, node: Node) -> str:  # noqa: ARG001 - every probe has it
    """What the inventory's prefix is, where it leads, and whether that is whole."""
    return f"""\
prefix={quote(seen.inventory.prefix)}
if [ -L "$prefix" ]; then echo "is link"; elif [ -e "$prefix" ]; then echo "is other"; else echo "is nothing"; fi
if real=$(cd -- "$prefix" 2>/dev/null && pwd -P); then
    echo "release ${{real##*/}}"
    if [ -e "$real/.clusterctl/complete" ] && [ -e "$real.ok" ]; then echo "whole yes"; fi
    if [ -x "$real/bin/python" ]; then echo "python yes"; fi
fi
echo "looked yes"
"""


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """FAIL for a release that is broken or not that of most nodes, WARN for one that is not the bundle's."""
    prefix = seen.inventory.prefix
    releases = {}
    for node, answer in answers.items():
        told = pairs(answer)
        release = told.get("release", _NONE)
        if "looked" not in told:
            yield unread(ID, node, answer)
        elif told.get("is") == "other":
            said = f"{prefix} was not made by clusterctl"
            yield fail(
                ID, node, said, expected="a link to a release", fix=f"move {prefix} away, or choose another prefix"
            )
        elif release != _NONE and not ("whole" in told and "python" in told):
            yield fail(ID, node, f"release {release} is not whole", expected="a whole release", fix="clusterctl deploy")
        elif told.get("is") == "link" and release == _NONE:
            said = f"{prefix} leads to a release that is not there"
            yield fail(ID, node, said, expected="a whole release", fix="clusterctl deploy")
        else:
            releases[node] = release
    yield from _compare(releases, seen.manifest.release_id if seen.manifest else "")


def _compare(releases: Mapping[str, str], bundle: str) -> Iterator[Finding]:
    used = set(releases.values())
    if used == {_NONE}:
        for node in releases:
            yield ok(ID, node, "nothing has been deployed yet")
    elif bundle and used != {bundle} and len(used) == 1:
        for node, release in releases.items():
            said = f"release {release}, the bundle is {bundle}"
            yield warn(ID, node, said, expected=f"release {bundle}", fix="clusterctl deploy the bundle")
    else:
        yield from odd(ID, releases, show=_text, fix="clusterctl deploy", verdict="FAIL")


def _text(release: str) -> str:
    return release if release == _NONE else f"release {release}"
