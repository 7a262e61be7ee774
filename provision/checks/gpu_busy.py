"""gpu.busy: no process uses a GPU before the run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok
from provision.checks._nvidia import SMI, unanswered
from provision.model import Finding

ID = "gpu.busy"
LEVEL = 0
TITLE = "no process uses a GPU"
TOOL = SMI
TIMEOUT = 20.0
# A line for each process and GPU, with the login name of its owner before it.
PROBE = """\
out=$(nvidia-smi --query-compute-apps=pid,used_memory,process_name --format=csv,noheader)
rc=$?
printf '%s\\n' "$out" | while IFS= read -r line; do
    pid=${line%%,*}
    case $pid in '' | *[!0-9]*) printf '%s\\n' "$line" ;; *)
        owner=$(stat -c %U "/proc/$pid" 2>/dev/null) || owner=
        printf 'process %s, %s\\n' "${owner:-somebody}" "$line" ;;
    esac
done
echo asked
exit $rc
"""
WHY = "Two programs on one GPU share its memory and time: the run is slow, or ends with 'out of memory'."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """FAIL, and name the processes with their owners."""
    for node, answer in answers.items():
        found = re.findall(r"^process (.*?), (\d+), (.*?), (.*)$", answer.out, flags=re.MULTILINE)
        if "asked" not in answer.lines or answer.rc:
            yield unanswered(ID, node, answer)
        elif found:
            owners = {pid: f"{pid} {name.rsplit('/', 1)[-1]} of {owner}" for owner, pid, _, name in found}
            told = [*list(owners.values())[:8], *(["..."] if len(owners) > 8 else [])]
            fix = f"wait for it or ask its owner; ps -fp {','.join(list(owners)[:8])} on {node} tells what it is"
            yield fail(ID, node, f"in use by {', '.join(told)}", expected="no process", fix=fix)
        else:
            yield ok(ID, node, "no process")
