"""mem.ecc: the memory modules have had no errors that ECC could not correct.

``ue_count`` and ``ce_count`` of ``/sys/devices/system/edac/mc/mc*`` (Documentation/admin-guide/RAS/main.rst) count
uncorrected and corrected errors since the driver was loaded. Virtual machines have none of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, unknown, warn
from provision.checks._facts import MEMORY
from provision.checks._host import many, pairs, unread
from provision.model import Finding

ID = "mem.ecc"
LEVEL = 0
TITLE = "the memory modules have no errors that ECC could not correct"
PROBE = MEMORY
LIMITS = {"corrected": 1000}
WHY = "A failing module ends in a crash of the node, or of the process that held the page, in the middle of a run."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """FAIL for uncorrected errors, WARN for many corrected ones."""
    for name, answer in answers.items():
        counts = [line.split()[1:] for line in answer.lines if line.startswith("edac ")]
        if "MemTotal" not in pairs(answer) or not all(len(each) == 2 and each[1].isdecimal() for each in counts):
            yield unread(ID, name, answer)
            continue
        lost = sum(int(count) for file, count in counts if file.endswith("ue_count"))
        mended = sum(int(count) for file, count in counts if file.endswith("ce_count"))
        where = ", ".join(sorted({file.partition("/")[0] for file, count in counts if count != "0"}))
        fix = "see which module: grep -H . /sys/devices/system/edac/mc/mc*/dimm*/dimm_*e_count; replace it"
        if not counts and "virtual" in answer.lines:
            yield ok(ID, name, "a virtual machine")
        elif not counts:
            yield unknown(
                ID, name, "the kernel watches no memory controller", fix="load the EDAC driver of the chipset"
            )
        elif lost:
            yield fail(ID, name, f"{many(lost, 'uncorrected error')} at {where}", expected="none", fix=fix)
        elif mended > seen.limits["corrected"]:
            expected = f"at most {seen.limits['corrected']:g}"
            yield warn(ID, name, f"{many(mended, 'corrected error')} at {where}", expected=expected, fix=fix)
        else:
            yield ok(ID, name, many(mended, "corrected error"))
