"""os.reboot: no other kernel waits for the next boot.

The newest ``/boot/vmlinuz-RELEASE`` is what boot loaders start by default; packages of Debian and Ubuntu that want a
reboot touch ``/run/reboot-required``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._facts import SYSTEM
from provision.checks._host import pairs, unread
from provision.model import Finding

ID = "os.reboot"
LEVEL = 0
TITLE = "no other kernel waits for the next boot"
PROBE = SYSTEM
WHY = (
    "A node that restarts during a run comes back with another kernel, perhaps without its GPU and InfiniBand drivers."
)


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001
    """WARN where a newer kernel is installed than runs, or a package asks for a reboot."""
    for name, answer in answers.items():
        told = pairs(answer)
        running = told.get("kernel")
        if not running:
            yield unread(ID, name, answer)
            continue
        installed = [line.removeprefix("installed ") for line in answer.lines if line.startswith("installed ")]
        newest = max(installed, key=_natural, default=running)
        fix = "reboot it between two runs, and check again"
        if _natural(newest) > _natural(running):
            yield warn(
                ID, name, f"{running} runs, {newest} is installed", expected="the running one is the newest", fix=fix
            )
        elif "reboot" in told:
            yield warn(ID, name, "an upgraded package asks for a reboot", expected="none asks", fix=fix)
        else:
            yield ok(ID, name, running)


def _natural(release: str) -> tuple[tuple[int, str], ...]:
    """``6.1.0-9`` before ``6.1.0-26``."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"[0-9]+|[a-z]+", release))
