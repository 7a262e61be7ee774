"""fs.options: NFS mounts wait for their server and use the network well.

Options as the kernel shows them in /proc/self/mounts (nfs(5)). ``soft`` gives up after a while and hands the error to
programs; one TCP connection carries 1 to 2 GB/s, so several (``nconnect``, kernel 5.3 and later) are needed on a fast
network; 1 MiB is the largest transfer size. Of several mounts from one server the first decides ``nconnect``.
"""

from provision.checks.kit import Answer, Judgement, Plan, fail, many, number, ok, unread, warn
from provision.checks.kit.mounts import Mount, folders, mount_of, mounts

TITLE = "NFS mounts wait for their server and use the network well"
LIMITS = {"connections": 4, "transfer_kib": 1024}
WHY = "A soft mount loses written data when the server is slow; one connection leaves most of a fast network unused."


probe = folders


def judge(answer: Answer, plan: Plan) -> Judgement:
    """FAIL for a soft mount, WARN for slow options."""
    table = mounts(answer)
    if mount_of(table, "/") is None:
        return unread(answer)
    nfs = [mount for mount in table if mount.type in {"nfs", "nfs4"}]
    soft = [mount for mount in nfs if {"soft", "softerr"} & {*mount.options}]
    slow = [(mount, observed) for mount in nfs if (observed := _slow(plan, mount))]
    if soft:
        fix = f"mount it hard: in /etc/fstab, then umount {soft[0].target} && mount {soft[0].target}"
        return fail(f"{soft[0].target} is mounted soft", expected="hard", fix=fix)
    if slow:
        mount, observed = slow[0]
        wanted = f"nconnect={plan.limits['connections'] * 2:g},rsize=1048576,wsize=1048576"
        fix = f"{wanted} in /etc/fstab; umount every mount of that server before it is mounted again"
        expected = (
            f"nconnect of at least {plan.limits['connections']:g}, transfers of {plan.limits['transfer_kib']:g} KiB"
        )
        return warn(f"{mount.target}: {observed}", expected=expected, fix=fix)
    return ok(many(len(nfs), "hard mount") if nfs else "no NFS mounts")


def _slow(plan: Plan, mount: Mount) -> str:
    """What of a mount's options is slow."""
    found = []
    connections = number(mount.option("nconnect")) or 1
    if connections < plan.limits["connections"] and mount.option("proto") != "rdma":
        found.append(f"nconnect={connections}")
    for key in ("rsize", "wsize"):
        size = number(mount.option(key))
        if size is not None and size < plan.limits["transfer_kib"] * 1024:
            found.append(f"{key}={size}")
    return ", ".join(found)
