"""svc.oomd: no daemon ends processes before the memory is used up.

``systemd-oomd`` kills whole control groups, such as a user's session, by memory pressure (systemd-oomd.service(8));
``earlyoom`` and ``nohang`` kill the largest process. ``pgrep`` may be absent, so the names are read from /proc.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._host import unread
from provision.model import Finding

ID = "svc.oomd"
LEVEL = 0
TITLE = "no daemon ends processes before the memory is used up"
PROBE = "grep -hsxE 'systemd-oomd|earlyoom|nohang' /proc/[0-9]*/comm\necho looked\n"
WHY = "Reading data or saving a checkpoint looks like memory pressure: the daemon kills the training, not the kernel."


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN with its name."""
    for name, answer in answers.items():
        if "looked" not in answer.lines:
            yield unread(ID, name, answer)
            continue
        found = sorted({*answer.lines} - {"looked"})
        if found:
            fix = f"systemctl disable --now {' '.join(found)}"
            yield warn(ID, name, f"{', '.join(found)} runs", expected="none runs", fix=fix)
        else:
            yield ok(ID, name, "none runs")
