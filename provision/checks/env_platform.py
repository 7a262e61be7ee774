"""env.platform: the bundle was packed for the node's processor."""

from provision.checks.env_glibc import PROBE as GLIBC
from provision.checks.kit import Answers, Judgements, Plan, fail, ok, pairs, unread
from provision.env.release.examine import MACHINES

TITLE = "the bundle was packed for the node's processor"
PROBE = GLIBC  # it prints the machine as well; both checks share one run
BUNDLE = True
WHY = "No program of the environment starts: 'Exec format error'."


def judge(seen: Plan, answers: Answers) -> Judgements:
    """FAIL for another platform."""
    assert seen.manifest is not None
    for node, answer in answers.items():
        machine = pairs(answer).get("machine")
        if not machine:
            yield node, unread(answer)
            continue
        here = f"linux-{MACHINES.get(machine, machine)}"
        if here == seen.manifest.platform:
            yield node, ok(here)
        else:
            fix = f"pack the environment on a {here} machine"
            yield node, fail(here, expected=seen.manifest.platform, fix=fix)
