"""mem.shmleft: no training that crashed left its shared memory behind.

NCCL names its segments ``/dev/shm/nccl-XXXXXX`` (``src/misc/shmutils.cc``), PyTorch ``torch_<pid>_<random>_<n>``
(``aten/src/ATen/MapAllocator.cpp``), Python's multiprocessing ``psm_XXXXXXXX``. All are removed by the process that
made them, unless it was killed. One that a process has mapped is in use; a young one may be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._host import human, many, unread
from provision.model import Finding

ID = "mem.shmleft"
LEVEL = 0
TITLE = "no training that crashed left its shared memory behind"
TOOL = "find"
# du tells what a file takes, whatever its size says; a map is read only when there is something to ask about.
PROBE = """\
left=$(find /dev/shm -maxdepth 1 -type f \\( -name 'nccl-*' -o -name 'torch_*' -o -name 'psm_*' \\) -mmin +10 \\
    -exec du -k {} + 2>/dev/null)
if [ -n "$left" ]; then
    printf '%s\\n' "$left"
    grep -hs -o ' /dev/shm/[^ ]*' /proc/[0-9]*/maps | sort -u
fi
echo looked
"""
WHY = "What is left behind is memory that nobody uses, and it fills /dev/shm until the next job dies of 'Bus error'."

_SHM = "/dev/shm/"  # noqa: S108 - it is looked at, nothing is put there


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN with how many there are and what they hold."""
    for name, answer in answers.items():
        if "looked" not in answer.lines:
            yield unread(ID, name, answer)
            continue
        mapped = {line for line in answer.lines if line.startswith(_SHM)}
        sizes = (re.fullmatch(r"([0-9]{1,12})\s+(/.*)", line) for line in answer.lines)
        left = {found[2]: int(found[1]) * 1024 for found in sizes if found and found[2] not in mapped}
        if not left:
            yield ok(ID, name, f"{len(mapped)} in use, none left behind" if mapped else "none left behind")
            continue
        said = f"{many(len(left), 'file')} of {human(sum(left.values()))}, such as {min(left)}"
        fix = "when no training runs there: rm -f /dev/shm/nccl-* /dev/shm/torch_* /dev/shm/psm_*"
        yield warn(ID, name, said, expected="none", fix=fix)
