"""fs.mount: shared folders are mounted from their server, and not on the local disk.

The mount table /proc/self/mounts is read without touching the folders: one that hangs does not block the check. A
directory that is mounted on first use (autofs) is opened first, for 5 s at most. Without shares in
the inventory, the NFS mounts of most nodes are expected on the others too.
"""

from collections import Counter
from collections.abc import Mapping

from provision.checks.kit import Answers, Judgements, Plan, fail, ok, unread
from provision.checks.kit.mounts import Mount, Share, folders, hosts, mount_of, mounts, shares

TITLE = "shared folders are mounted from their server"
WHY = "Checkpoints and data land on the node's own disk: it stays unnoticed until a resume finds half a checkpoint."

_NFS = frozenset({"nfs", "nfs4"})


probe = folders


def judge(plan: Plan, answers: Answers) -> Judgements:
    """FAIL for the first share that is not where it should be."""
    nodes = {node.name: node for node in plan.inventory.nodes}
    tables = {name: mounts(answer) for name, answer in answers.items()}
    wanted = shares(plan) or _usual(tables)
    for name, table in tables.items():
        if mount_of(table, "/") is None:
            yield name, unread(answers[name])
            continue
        own = {name, *(hosts(nodes[name]) if name in nodes else ())}
        external = [
            share for share in wanted if not {share.server, *(s.partition(":")[0] for s in share.sources)} & own
        ]
        wrong = [found for share in external if (found := _wrong(share, table))]
        if wrong:
            observed, expected, fix = wrong[0]
            yield name, fail(observed, expected=expected, fix=fix)
        elif external:
            yield name, ok(", ".join(f"{share.path} from {share.server}" for share in external))
        else:
            yield name, ok("serves the shared folders" if wanted else "no shared folder is named or mounted")


def _wrong(share: Share, table: tuple[Mount, ...]) -> tuple[str, str, str] | None:
    """What is observed, expected and advised for a share that is not mounted correctly."""
    found = mount_of(table, share.path)
    expected = f"{share.path} from {share.sources[0]}"
    if found is None or found.type not in _NFS | {"autofs"}:
        where = f"{found.type} of {found.target}" if found else "no file system"
        fix = f"check whether files were written to it, then clusterctl deploy (or mount {share.path})"
        return f"{share.path} lies on {where}", expected, fix
    if found.type == "autofs":
        fix = f"see why: journalctl -b -u $(systemd-escape -p --suffix=mount {share.path}); showmount -e {share.server}"
        return f"{share.path} is to be mounted on first use, which fails", expected, fix
    source = found.source.rstrip("/") + share.path[len(found.target.rstrip("/")) :]
    if source not in share.sources:
        return (
            f"{share.path} comes from {source}",
            expected,
            f"umount {found.target}, then clusterctl deploy (or mount {share.path})",
        )
    return None


def _usual(tables: Mapping[str, tuple[Mount, ...]]) -> tuple[Share, ...]:
    """What more than half of at least three nodes mount over NFS, as if the inventory named it."""
    count = Counter(
        pair
        for table in tables.values()
        for pair in {(mount.source, mount.target) for mount in table if mount.type in _NFS}
    )
    often = [pair for pair, number in count.items() if len(tables) >= 3 and 2 * number > len(tables)]
    return tuple(Share(source.rpartition(":/")[0], path, (source,)) for source, path in sorted(often))
