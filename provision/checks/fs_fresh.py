"""fs.fresh: Whether what one node writes into a shared folder is read on the others at once, and back.

Measured with files of new names, which no cache knows (``tasks/measures/shares.py``), written as the training user: an
export with root_squash takes nothing from root.
"""

from provision.checks.kit import Answer, Judgement, fail, ok, unknown, warn
from provision.checks.kit.measures import Side, sides

LEVEL = 1
MEASURE = "shares"
TITLE = "what one node writes into a shared folder, the others read at once"
WHY = (
    "Checkpoints and data are invisible to the other nodes: they are on a local disk, in a stale mount, or on a dead "
    "server, where every process that reads them hangs."
)

_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "ramfs", "f2fs", "vfat", "exfat", "rootfs"}


def judge(node: str, answer: Answer) -> Judgement:
    """FAIL where a share hangs, is local, stale or takes nothing."""
    found = sides(answer)
    bad = [finding for side in found if (finding := _of(node, side))]
    if bad:
        return min(bad, key=lambda finding: ("FAIL", "WARN", "UNKNOWN").index(finding.verdict))
    if found:
        return ok(", ".join(f"{side.path} ({side.type})" for side in found))
    if "no shares" in answer.lines:
        return ok("no shared folder in the inventory")
    return unknown(f"its shares were not tried: {answer.err or 'no answer'}"[:200])


def _of(name: str, side: Side) -> Judgement | None:
    """What is wrong with one share on one node."""
    first = name == side.server
    again = f"umount -f -l {side.path} && mount {side.path} on {name}; on the server: exportfs -ra"
    if "hung" in {side.wrote, side.read}:
        what = "reading" if side.read == "hung" else "writing"
        where = f"; waiting in the kernel: {', '.join(side.stuck[:5])}" if side.stuck else ""
        observed = f"{side.path} ({side.source}): {what} got no answer in time{where}"
        return fail(observed, fix=f"is the server up? {again}")
    if side.wrote == "absent":
        return fail(f"{side.path} does not exist", fix=f"findmnt -T {side.path} on {name}")
    if side.read == "absent" and side.type in _LOCAL:
        observed = (
            f"{side.path} is on local disk ({side.type}, {side.source}): it does not hold what {side.server} wrote"
        )
        return fail(observed, fix=f"mount {side.path} on {name}; findmnt -T {side.path}")
    if side.read == "absent":
        observed = f"{side.path} ({side.source}) does not show what {side.server} has just written"
        return fail(observed, fix=again)
    if side.read not in {"fine", "not tried"}:
        return fail(f"{side.path} cannot be read: {side.read}", fix=again)
    if side.wrote != "fine":
        observed = f"{side.path} takes no file of the training user: {side.wrote}"
        fix = f"give the training user the folder on {side.server}: chown, or no root_squash; exportfs -v"
        return fail(observed, fix=fix)
    if not first and side.back == "absent":
        observed = f"{side.server} does not see what {name} wrote to {side.path} ({side.type}, {side.source})"
        return fail(observed, fix=again)
    if not first and "not tried" in {side.read, side.back}:
        observed = f"{side.path} was compared in one direction only: see {side.server}"
        return warn(observed, fix=f"clusterctl check --only fs.fresh, once {side.server} is well")
    if first and side.back == "alone":
        return unknown(f"{side.path}: no second node to compare with")
    return None
