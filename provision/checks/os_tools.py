"""os.tools: the programs that clusterctl runs on a node are there.

sh, tar and the coreutils are what its scripts use; zstd is used where it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok
from provision.checks._host import unread
from provision.model import Finding

ID = "os.tools"
LEVEL = 0
TITLE = "the programs that clusterctl runs on a node are there"
PROBE = """\
for program in tar gzip grep sed cat chmod cp cut date dd df dirname du env head id ln ls mkdir mktemp mv od \\
    readlink rm sha256sum sort stat tail touch tr uname wc zstd; do
    command -v "$program" >/dev/null 2>&1 || echo "missing $program"
done
echo looked
"""
WHY = "Without them nothing can be unpacked or verified on the node; without zstd the environment travels uncompressed."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """FAIL for what must be there."""
    for name, answer in answers.items():
        if "looked" not in answer.lines:
            yield unread(ID, name, answer)
            continue
        missing = [line.removeprefix("missing ") for line in answer.lines if line.startswith("missing ")]
        needed = [program for program in missing if program != "zstd"]
        if needed:
            fix = "install tar, gzip, grep, sed and coreutils"
            yield fail(ID, name, f"no {', '.join(needed)}", expected="all of them", fix=fix)
        else:
            yield ok(ID, name, "all, but for zstd: data travels uncompressed" if missing else "all, and zstd")
