"""fs.dstate: no process hangs in the kernel.

State D in /proc/PID/stat (proc_pid_stat(5)): a wait that no signal ends, as a rule for a disk or a server. It is usual
for a moment, so whoever is in it is asked again a second later. Kernel threads (parent 2) are left out. ``wchan`` names
the function that waits; it is 0 without the right to see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok
from provision.checks._host import unread
from provision.model import Finding

ID = "fs.dstate"
LEVEL = 0
TITLE = "no process hangs in the kernel"
# On a healthy node this takes one grep.
PROBE = """\
hung() {
    grep -hs '^[0-9]* (.*) D ' /proc/[0-9]*/stat
}
first=$(hung)
if [ -n "$first" ]; then
    sleep 1
    hung | while IFS= read -r line; do
        # Equal to the last figure: it has not run in between, as a process of a busy node may have.
        case "
$first
" in *"
$line
"*) ;; *) continue ;; esac
        pid=${line%% *}
        parent=${line##*) D }
        parent=${parent%% *}
        line=${line#* }
        [ "$parent" = 2 ] || echo "hung $pid $(cat "/proc/$pid/wchan" 2>/dev/null || echo 0) ${line% D *}"
    done
fi
echo looked
"""
WHY = "Who waits for a dead NFS server or a broken disk cannot be killed; the next rank that goes there hangs as well."

_NETWORK = ("nfs", "rpc", "ceph", "cifs", "lustre", "fuse")


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """FAIL with the processes, and with what they wait for where that is known."""
    for name, answer in answers.items():
        if "looked" not in answer.lines:
            yield unread(ID, name, answer)
            continue
        hung = [line.split(None, 3)[1:] for line in answer.lines if line.startswith("hung ") and len(line.split()) > 3]
        if not hung:
            yield ok(ID, name, "none hangs")
            continue
        shown = ", ".join(f"{program.strip('()')} ({pid})" for pid, _, program in hung[:5])
        waits = sorted({function for _, function, _ in hung if function != "0"})
        network = any(function.startswith(_NETWORK) for function in waits)
        said = f"{len(hung)} in state D: {shown}" + (f", waiting in {', '.join(waits)}" if waits else "")
        fix = "bring the NFS server back, or umount -f -l the mount that hangs" if network else ""
        advice = "look at `clusterctl check --only fs.stale` and at dmesg for a disk; only a reboot ends what stays"
        yield fail(ID, name, said, expected="none", fix=fix or advice)
