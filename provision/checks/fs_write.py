"""fs.write: the login may write where the releases lie.

One empty file is written to the folder above the inventory's prefix, if that exists, and removed at once. Modes alone
do not tell: a server's root_squash, a quota and a read-only mount refuse as well. Where the folder does not exist yet,
the nearest one above it must be writable.
"""

from provision.checks.kit import Answer, Judgement, Plan, fail, ok, pairs, unread
from provision.checks.kit.mounts import nearest
from provision.render import quote

TITLE = "the login may write where the releases lie"
WHY = "`clusterctl deploy` and every run write there: without it nothing can be sent to this node."


def probe(plan: Plan) -> str:
    """Write and remove one file, or tell about the folder above."""
    root = quote(plan.inventory.root)
    return (
        nearest(plan.inventory.root)
        + f"""\
echo "at $at"
if [ "$at" = {root} ]; then
    file=$at/.clusterctl-check.$$
    if output=$({{ : >"$file"; }} 2>&1); then
        rm -f "$file"
        echo "writable yes"
    else
        echo "refused $output"
    fi
elif [ -w "$at" ]; then
    echo "writable yes"
else
    echo "refused $at is not writable"
fi
echo "user $(id -un 2>/dev/null || id -u)"
"""
    )


def judge(plan: Plan, answer: Answer) -> Judgement:
    """FAIL where it is refused."""
    root = plan.inventory.root
    facts = pairs(answer)
    at, user = facts.get("at", ""), facts.get("user", "USER")
    if "writable" in facts:
        return ok(f"{at} takes files" if at == str(root) else f"{root} can be made in {at}")
    if "refused" in facts:
        reason = facts["refused"].rpartition(": ")[2]
        observed = f"{at}: {reason}" if at == str(root) else f"{root} is missing, and {user} may not write to {at}"
        fix = f"as root: mkdir -p {root} && chown {user} {root}; if it is theirs, look at the mount and the quota"
        return fail(observed, expected=f"{user} may write to {root}", fix=fix)
    return unread(answer)
