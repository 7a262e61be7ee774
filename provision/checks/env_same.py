"""env.same: every node uses the same release of the environment.

A release's name is made of the digest of everything in it; ``.clusterctl/complete`` comes last when it is unpacked, and
the mark ``<id>.ok`` when it has been tried (docs/releases.md, "On a node").
"""

from collections.abc import Mapping

from provision.checks.kit import Answers, Judgements, Plan, fail, odd, ok, pairs, unread, warn
from provision.render import quote

TITLE = "every node uses the same release of the environment"
WHY = "Ranks with other versions of torch or NCCL hang at the first exchange, or train something else."

_NONE = "no release"


def probe(seen: Plan) -> str:
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


def judge(seen: Plan, answers: Answers) -> Judgements:
    """FAIL for a release that is broken or not that of most nodes, WARN for one that is not the bundle's."""
    prefix = seen.inventory.prefix
    releases = {}
    for node, answer in answers.items():
        facts = pairs(answer)
        release = facts.get("release", _NONE)
        if "looked" not in facts:
            yield node, unread(answer)
        elif facts.get("is") == "other":
            observed = f"{prefix} was not made by clusterctl"
            yield (
                node,
                fail(observed, expected="a link to a release", fix=f"move {prefix} away, or choose another prefix"),
            )
        elif release != _NONE and not ("whole" in facts and "python" in facts):
            yield node, fail(f"release {release} is not whole", expected="a whole release", fix="clusterctl deploy")
        elif facts.get("is") == "link" and release == _NONE:
            observed = f"{prefix} leads to a release that is not there"
            yield node, fail(observed, expected="a whole release", fix="clusterctl deploy")
        else:
            releases[node] = release
    yield from _compare(releases, seen.manifest.release_id if seen.manifest else "")


def _compare(releases: Mapping[str, str], bundle: str) -> Judgements:
    used = set(releases.values())
    if used == {_NONE}:
        for node in releases:
            yield node, ok("nothing has been deployed yet")
    elif bundle and used != {bundle} and len(used) == 1:
        for node, release in releases.items():
            observed = f"release {release}, the bundle is {bundle}"
            yield node, warn(observed, expected=f"release {bundle}", fix="clusterctl deploy the bundle")
    else:
        yield from odd(releases, show=_text, fix="clusterctl deploy", verdict="FAIL")


def _text(release: str) -> str:
    return release if release == _NONE else f"release {release}"
