"""env.platform: the bundle was packed for the node's processor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok
from provision.checks._host import pairs, unread
from provision.checks.env_glibc import PROBE as GLIBC
from provision.env.release.examine import MACHINES
from provision.model import Finding

ID = "env.platform"
LEVEL = 0
TITLE = "the bundle was packed for the node's processor"
PROBE = GLIBC  # it tells the machine as well, and is run once for both
BUNDLE = True
WHY = "No program of the environment starts: 'Exec format error'."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """FAIL for another platform."""
    assert seen.manifest is not None
    for node, answer in answers.items():
        machine = pairs(answer).get("machine")
        if not machine:
            yield unread(ID, node, answer)
            continue
        here = f"linux-{MACHINES.get(machine, machine)}"
        if here == seen.manifest.platform:
            yield ok(ID, node, here)
        else:
            fix = f"pack the environment on a {here} machine"
            yield fail(ID, node, here, expected=seen.manifest.platform, fix=fix)
