"""File systems: the simple checks."""

from collections.abc import Mapping

from provision.checks.kit import (
    GIB,
    Answer,
    Answers,
    Judgement,
    Judgements,
    Plan,
    df,
    each_node,
    fail,
    human,
    many,
    ok,
    pairs,
    unread,
    warn,
)
from provision.checks.kit.mounts import NETWORK, folders, lies, mount_of, mounts, nearest, plain
from provision.render import quote

# On a healthy node this takes one grep. A busy disk makes a process wait for a second or two.
_DSTATE_PROBE = """\
hung() {
    grep -hs '^[0-9]* (.*) D ' /proc/[0-9]*/stat
}
same=$(hung)
for _ in 1 2 3 4; do
    [ -n "$same" ] || break
    sleep 1
    # Equal to the last figure: it has not run in between, as a process of a busy node may have.
    same=$(hung | while IFS= read -r line; do
        case "
$same
" in *"
$line
"*) printf "%s\\n" "$line" ;; esac
    done)
done
[ -z "$same" ] || printf "%s\\n" "$same" | while IFS= read -r line; do
    pid=${line%% *}
    parent=${line##*) D }
    parent=${parent%% *}
    line=${line#* }
    [ "$parent" = 2 ] || echo "hung $pid $(cat "/proc/$pid/wchan" 2>/dev/null || echo 0) ${line% D *}"
done
echo looked
"""
_NETWORK = ("nfs", "rpc", "ceph", "cifs", "lustre", "fuse")


@each_node(
    "fs.dstate",
    "no process hangs in the kernel",
    probe=_DSTATE_PROBE,
    why=(
        "Who waits for a dead NFS server or a broken disk cannot be killed; the next rank that goes "
        "there hangs as well."
    ),
)
def dstate(answer: Answer) -> Judgement:
    """FAIL with the processes and, if known, the kernel function in which they wait.

    State D in /proc/PID/stat (proc_pid_stat(5)): a wait that no signal ends, usually for a disk or a server. It is
    normal for a moment, so such a process counts after four seconds in which it did not run. Kernel threads (parent 2)
    are skipped. ``wchan`` names the function that waits; it is 0 without the right to see it.
    """
    if "looked" not in answer.lines:
        return unread(answer)
    hung = [line.split(None, 3)[1:] for line in answer.lines if line.startswith("hung ") and len(line.split()) > 3]
    if not hung:
        return ok("none hangs")
    programs = ", ".join(f"{program.strip('()')} ({pid})" for pid, _, program in hung[:5])
    waits = sorted({function for _, function, _ in hung if function != "0"})
    network = any(function.startswith(_NETWORK) for function in waits)
    observed = f"{len(hung)} in state D: {programs}" + (f", waiting in {', '.join(waits)}" if waits else "")
    fix = "bring the NFS server back, or umount -f -l the mount that hangs" if network else ""
    advice = "look at `clusterctl check --only fs.stale` and at dmesg for a disk; only a reboot ends what stays"
    return fail(observed, expected="none", fix=fix or advice)


@each_node(
    "fs.fstab",
    "what is mounted over NFS is mounted again after a reboot",
    probe=folders,
    why="A share mounted by hand is missing after the next boot, and training writes to the empty directory below.",
)
def fstab(answer: Answer) -> Judgement:
    """WARN with the first folder that nothing mounts at boot.

    A mount belongs to the boot when /etc/fstab names its folder or a systemd unit file does (systemd.mount(5)). Units
    that systemd makes of fstab lie under /run, and do not count. autofs(8) has its own files, which are not read.
    """
    table = mounts(answer)
    if mount_of(table, "/") is None:
        return unread(answer)
    fields = [line.split() for line in answer.lines if line.startswith(("fstab ", "unit "))]
    boot = {plain(each[2 if each[0] == "fstab" else 1]).rstrip("/") for each in fields if len(each) > 1}
    nfs = [mount for mount in table if mount.type in {"nfs", "nfs4"}]
    hand = [mount for mount in nfs if mount.target not in boot]
    if not hand or "automounter" in answer.lines:
        return ok(f"{many(len(nfs), 'NFS mount')}, all of the boot" if nfs else "no NFS mounts")
    fix = f"name it under services.nfs and `clusterctl deploy`, or a line for {hand[0].target} in /etc/fstab"
    return warn(f"{hand[0].target} was mounted by hand", expected="a line in /etc/fstab", fix=fix)


@each_node(
    "fs.home",
    "the home folder is local and takes files",
    probe=folders,
    why="Ranks that compile wait for one another's locks over the network, or fail without a home directory.",
)
def home(answer: Answer, plan: Plan) -> Judgement:
    """FAIL where it is missing or read-only, WARN where it lies on a network file system.

    Caches that programs keep below ~ (Triton, Inductor, torch extensions) are locked with flock(2), which waits or
    fails over a network. ``clusterctl train`` keeps them on the local disk; other jobs do not.
    """
    facts = pairs(answer)
    home, user = facts.get("home"), plan.user or "USER"
    mount = lies(answer, home)
    if home is None:
        return unread(answer)
    if mount is None:
        fix = f"as root: mkdir -m 700 {home} && chown {user} {home}"
        return fail(f"{home} does not exist", expected="a home folder", fix=fix)
    if "writes" not in facts:
        return fail(f"{home} takes no files", expected="it does", fix=f"as root: chown {user} {home}")
    if mount.type in NETWORK:
        fix = "for jobs that you start by hand: export TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR to a local disk"
        return warn(f"{home} lies on {mount.type} of {mount.source}", expected="a local disk", fix=fix)
    return ok(f"{home} on {mount.type}")


def _probe_inodes(plan: Plan) -> str:
    """The free inodes at the releases' folder."""
    return nearest(plan.inventory.root) + 'echo "at $at"\ndf -Pi "$at"\n'


@each_node(
    "fs.inodes",
    "the disk of the releases has room for many files",
    probe=_probe_inodes,
    limits={"free_percent": 10, "files": 200_000},
    why="'No space left on device' although df shows plenty: a deploy or a cache of small files fails.",
)
def inodes(answer: Answer, plan: Plan) -> Judgement:
    """FAIL where an environment does not fit, WARN where few are left.

    ``df -Pi`` shows how many files ext4 and others can still hold; file systems without a fixed number (btrfs) show
    none or 0. An environment with torch and transformers has more than 50,000 files.
    """
    room = df(answer)
    if room is None:
        return unread(answer)
    total, free = room
    if total == 0:
        return ok("no fixed number of files")
    share = 100 * free / total
    observed = f"{free} of {total} inodes free ({share:.0f} %)"
    fix = f"see who has them: du --inodes -xd1 {plan.inventory.root} | sort -n; clusterctl prune"
    if free < plan.limits["files"]:
        return fail(observed, expected=f"at least {plan.limits['files']:.0f} free", fix=fix)
    if share < plan.limits["free_percent"]:
        return warn(observed, expected=f"at least {plan.limits['free_percent']:g} % free", fix=fix)
    return ok(observed)


_MEMORY = frozenset({"tmpfs", "ramfs"})


@each_node(
    "fs.localenv",
    "the releases lie on a local disk",
    probe=folders,
    why=(
        "All ranks read thousands of small files from one server: a start takes minutes, and a slow server stops them "
        "all."
    ),
)
def localenv(answer: Answer, plan: Plan) -> Judgement:
    """WARN for a network file system, and for one in memory.

    The type of the file system in /proc/self/mounts. A cold ``import torch`` opens some thousand small files, and every
    rank of every node does it at the same moment.
    """
    mount = lies(answer, pairs(answer).get("at"))
    if mount is None:
        return unread(answer)
    if mount.type in NETWORK:
        observed = f"{plan.inventory.root} lies on {mount.type} of {mount.source}"
        fix = "choose a `prefix` on a local disk: clusterctl copies the environment to every node"
        return warn(observed, expected="a local disk", fix=fix)
    if mount.type in _MEMORY:
        observed = f"{plan.inventory.root} is in memory ({mount.type})"
        fix = "choose a `prefix` on a disk: files in memory use RAM and are lost at a reboot"
        return warn(observed, expected="a local disk", fix=fix)
    return ok(f"{mount.type} of {mount.source}")


@each_node(
    "fs.noexec",
    "programs may run where the releases lie",
    probe=folders,
    why="The environment's Python cannot start: 'Permission denied' for a file that has all its mode bits.",
)
def noexec(answer: Answer) -> Judgement:
    """FAIL for a mount with noexec.

    A file system mounted ``noexec`` refuses to execute a file and to map its code (mount(8)): neither Python nor its
    libraries start.
    """
    mount = lies(answer, pairs(answer).get("at"))
    if mount is None:
        return unread(answer)
    if "noexec" in mount.options:
        fix = f"mount -o remount,exec {mount.target}, and take noexec out of its line in /etc/fstab"
        return fail(f"{mount.target} is mounted noexec", expected="exec", fix=fix)
    return ok(f"{mount.target} allows it")


_LOCKED = frozenset({"ro", "emergency_ro", "shutdown"})
_DISK = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"})


@each_node(
    "fs.readonly",
    "no disk was switched to read-only, and none has recorded errors",
    probe=folders,
    why="Checkpoints and logs cannot be written any more, and what the disk holds may be damaged.",
)
def readonly(answer: Answer) -> Judgement:
    """FAIL for a disk that is read-only, WARN for errors.

    ext4 mounted with ``errors=remount-ro`` shows ``ro`` in the mount table after an error (ext4(5)), with a new kernel
    ``emergency_ro`` (seen with 6.18), and counts errors in ``/sys/fs/ext4/DEVICE/errors_count`` until a file system
    check clears them. What /etc/fstab mounts ``ro`` is meant so.
    """
    table = mounts(answer)
    used = [line.rpartition(" ")[2] for line in answer.lines if line.startswith("lies ")]
    below = [mount for path in used if (mount := mount_of(table, path))]
    boot = (line.split() for line in answer.lines if line.startswith("fstab "))
    meant = {plain(each[2]) for each in boot if len(each) > 4 and "ro" in each[4].split(",")}
    if not below:
        return unread(answer)
    locked = [each for each in below if each.type in _DISK and _LOCKED & {*each.options} and each.target not in meant]
    counts = [line.split() for line in answer.lines if line.startswith("errors ")]
    wrong = [
        (device, count)
        for _, device, count in (each for each in counts if len(each) == 3)
        if count.isdecimal() and count != "0"
    ]
    if locked:
        mount = locked[0]
        fix = f"see dmesg and smartctl -a {mount.source}; fsck it unmounted, replace a failing disk"
        return fail(f"{mount.target} ({mount.source}) is read-only", expected="writable", fix=fix)
    if wrong:
        observed = ", ".join(f"{many(int(count), 'error')} on {device}" for device, count in wrong)
        fix = f"see dmesg and smartctl -a /dev/{wrong[0][0]}; fsck -f it unmounted"
        return warn(observed, expected="none", fix=fix)
    return ok("all writable, no errors")


_STALE_PROBE = """\
while read -r source target type rest; do
    case $type in
        nfs | nfs4 | cifs | smb3 | ceph | lustre | fuse.glusterfs | fuse.sshfs)
            target=$(printf '%b' "$target")
            {
                output=$(timeout -k 1 4 stat -f "$target" 2>&1 >/dev/null)
                echo "mount $? $source $target $output"
            } &
            ;;
    esac
done </proc/self/mounts
wait
echo looked
"""


@each_node(
    "fs.stale",
    "every network mount answers",
    probe=_STALE_PROBE,
    timeout=15,
    hung="FAIL",
    hung_fix="umount -f -l of the NFS mounts in /proc/self/mounts, then mount -a",
    why="A process that touches it hangs and cannot be killed: loading data or saving a checkpoint never ends.",
)
def stale(answer: Answer) -> Judgement:
    """FAIL for the first mount that hangs or is stale, WARN for one that this user may not look at.

    ``stat -f`` asks the server (statfs(2) is never answered from a cache of NFS). A mount whose server does not answer
    blocks every process that touches it; one whose export was recreated reports 'Stale file handle'. timeout(1) ends
    with 124, or with 137 where SIGKILL was needed.
    """
    if "looked" not in answer.lines:
        return unread(answer)
    found = [line.split(" ", 4)[1:] for line in answer.lines if line.startswith("mount ")]
    bad = [each for each in found if each[0] != "0" and len(each) > 2]
    if not bad:
        return ok(f"{len(found)} of {len(found)} answer" if found else "no network mounts")
    refused = [each for each in bad if each[-1].endswith("Permission denied")]
    rc, source, target = next((each for each in bad if each not in refused), bad[0])[:3]
    message = next((each[3] for each in bad if each[2] == target and len(each) > 3), f"exit code {rc}")
    if len(refused) == len(bad):
        fix = f"look at the export on the server (exportfs -v), and at the folders above {target}"
        return warn(f"{target}: {message}", expected="an answer", fix=fix)
    observed = f"{target} of {source} did not answer within 4 s" if rc in {"124", "137"} else f"{target}: {message}"
    fix = f"is the server up? then umount -f -l {target} && mount {target}; on the server: exportfs -ra"
    return fail(observed, expected="an answer", fix=fix)


_TMP_PROBE = """\
at=${TMPDIR:-/tmp}
echo "at $at"
if file=$(mktemp "$at/clusterctl-check.XXXXXX" 2>&1); then
    rm -f "$file"
    echo "writable yes"
else
    echo "refused $file"
fi
df -Pk "$at" 2>/dev/null
"""


@each_node(
    "fs.tmp",
    "the folder for temporary files takes files and has room",
    probe=_TMP_PROBE,
    limits={"free_gib": 2},
    why="Python, data loaders and compilers keep files there: 'No usable temporary directory' when a rank starts.",
)
def tmp(answer: Answer, limits: Mapping[str, float]) -> Judgement:
    """FAIL where no file can be made, WARN where it is nearly full.

    ``$TMPDIR``, else /tmp (environ(7)). Python, torch and the compilers put files there; where it is a tmpfs it is
    memory.
    """
    facts = pairs(answer)
    at, room = facts.get("at", ""), df(answer)
    if "refused" in facts:
        fix = f"free {at}, or make it again: mkdir -p {at} && chmod 1777 {at}"
        return fail(f"{at}: {facts['refused'].rpartition(': ')[2]}", expected="it takes files", fix=fix)
    if "writable" not in facts or room is None:
        return unread(answer)
    if room[1] * 1024 < limits["free_gib"] * GIB:
        observed = f"{human(room[1] * 1024)} free in {at}"
        fix = f"see what fills it: du -xhd1 {at}; or set TMPDIR to a larger disk"
        return warn(observed, expected=f"at least {limits['free_gib']:g} GiB", fix=fix)
    return ok(f"{human(room[1] * 1024)} free in {at}")


def _space_probe(plan: Plan) -> str:
    """What is free, and whether the bundle's release is there already."""
    script = nearest(plan.inventory.root) + 'echo "at $at"\ndf -Pk "$at"\n'
    if plan.manifest is None:
        return script
    release = plan.inventory.root / "releases" / plan.manifest.release_id
    return script + f"if [ -d {quote(release)} ]; then echo deployed; fi\n"


@each_node(
    "fs.space",
    "the disk of the releases has room",
    probe=_space_probe,
    limits={"free_gib": 20, "releases": 2.2},
    why="A deploy stops half way, or a checkpoint is cut short: 'No space left on device' after hours of training.",
)
def space(plan: Plan, answers: Answers) -> Judgements:
    """FAIL below the larger of the limit and what the bundle needs.

    ``df -P`` (POSIX) of the folder above the inventory's prefix, or of the nearest one that exists. The previous
    release stays, and a transfer needs a part of its size again: 2.2 times the unpacked size of the bundle.
    """
    size = sum(entry.size for entry in plan.manifest.files) if plan.manifest else 0
    for name, answer in answers.items():
        room = df(answer)
        if room is None:
            yield name, unread(answer)
            continue
        needed = 0 if "deployed" in answer.lines else size * plan.limits["releases"]
        wanted = max(needed, plan.limits["free_gib"] * GIB)
        free = room[1] * 1024
        observed = f"{human(free)} free at {next((line[3:] for line in answer.lines if line.startswith('at ')), '?')}"
        if free >= wanted:
            yield name, ok(observed)
        else:
            fix = "clusterctl prune; see what fills it: du -xhd1 " + str(plan.inventory.root)
            expected = f"at least {human(wanted)}" + (" for this bundle" if needed == wanted else "")
            yield name, fail(observed, expected=expected, fix=fix)
