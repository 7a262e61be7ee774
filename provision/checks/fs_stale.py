"""fs.stale: every network mount answers.

``stat -f`` asks the server (statfs(2) is never answered from a cache of NFS). A mount whose server is gone blocks every
process that touches it; one whose export was made anew says 'Stale file handle'. timeout(1) ends with 124, or with 137
where SIGKILL was needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, warn
from provision.checks._host import unread
from provision.model import Finding

ID = "fs.stale"
LEVEL = 0
TITLE = "every network mount answers"
TIMEOUT = 15
HUNG = "FAIL"
HUNG_FIX = "umount -f -l of the NFS mounts in /proc/self/mounts, then mount -a"
PROBE = """\
while read -r source target type rest; do
    case $type in
        nfs | nfs4 | cifs | smb3 | ceph | lustre | fuse.glusterfs | fuse.sshfs)
            target=$(printf '%b' "$target")
            {
                said=$(timeout -k 1 4 stat -f "$target" 2>&1 >/dev/null)
                echo "mount $? $source $target $said"
            } &
            ;;
    esac
done </proc/self/mounts
wait
echo looked
"""
WHY = "A process that touches it hangs and cannot be killed: loading data or saving a checkpoint never ends."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """FAIL for the first mount that hangs or is stale, WARN for one that this user may not look at."""
    for name, answer in answers.items():
        if "looked" not in answer.lines:
            yield unread(ID, name, answer)
            continue
        found = [line.split(" ", 4)[1:] for line in answer.lines if line.startswith("mount ")]
        bad = [each for each in found if each[0] != "0" and len(each) > 2]
        if not bad:
            yield ok(ID, name, f"{len(found)} of {len(found)} answer" if found else "no network mounts")
            continue
        refused = [each for each in bad if each[-1].endswith("Permission denied")]
        rc, source, target = next((each for each in bad if each not in refused), bad[0])[:3]
        said = next((each[3] for each in bad if each[2] == target and len(each) > 3), f"exit code {rc}")
        if len(refused) == len(bad):
            fix = f"look at the export on the server (exportfs -v), and at the folders above {target}"
            yield warn(ID, name, f"{target}: {said}", expected="an answer", fix=fix)
            continue
        observed = f"{target} of {source} did not answer within 4 s" if rc in {"124", "137"} else f"{target}: {said}"
        fix = f"is the server up? then umount -f -l {target} && mount {target}; on the server: exportfs -ra"
        yield fail(ID, name, observed, expected="an answer", fix=fix)
