"""env.glibc: the node's C library is new enough for the bundle.

The bundle's manifest holds the highest GLIBC_x.y that any of its ELF files asks for; a node's own comes from
``getconf GNU_LIBC_VERSION``. conda environments bring no C library of their own.
"""

import re

from provision.checks.kit import Answers, Judgements, Plan, fail, ok, unknown

TITLE = "the node's glibc is new enough for the bundle"
PROBE = """\
getconf GNU_LIBC_VERSION 2>/dev/null || ldd --version 2>&1 | head -n 1
for file in /lib/ld-musl-*; do [ ! -e "$file" ] || echo "musl $file"; done
echo "machine $(uname -m)"
"""
BUNDLE = True
WHY = "Python or a library does not start: 'version GLIBC_2.34 not found'."


def judge(seen: Plan, answers: Answers) -> Judgements:
    """FAIL for an older one, and for musl."""
    assert seen.manifest is not None
    wanted = seen.manifest.glibc
    for node, answer in answers.items():
        found = re.search(r"^(?:glibc |ldd .*\s)(\d+\.\d+)\b", answer.out, flags=re.MULTILINE)
        fix = "pack the environment on a system as old as the node's, or update the node's"
        if not wanted:
            yield node, ok("nothing in the bundle asks for a version")
        elif found and _version(found[1]) >= _version(wanted):
            yield node, ok(f"glibc {found[1]}, the bundle needs {wanted}")
        elif found:
            yield node, fail(f"glibc {found[1]}", expected=f"glibc {wanted} or later", fix=fix)
        elif "musl " in answer.out:
            yield node, fail("musl instead of glibc", expected=f"glibc {wanted} or later", fix=fix)
        else:
            yield node, unknown("the node does not report its glibc")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
