"""os.reboot: no other kernel waits for the next boot.

The newest ``/boot/vmlinuz-RELEASE`` is what boot loaders start by default; packages of Debian and Ubuntu that want a
reboot touch ``/run/reboot-required``.
"""

import re

from provision.checks.kit import SYSTEM, Answer, Judgement, ok, pairs, unread, warn

TITLE = "no other kernel waits for the next boot"
PROBE = SYSTEM
WHY = (
    "A node that restarts during a run comes back with another kernel, perhaps without its GPU and InfiniBand drivers."
)


def judge(answer: Answer) -> Judgement:
    """WARN where a newer kernel is installed than runs, or a package asks for a reboot."""
    facts = pairs(answer)
    running = facts.get("kernel")
    if not running:
        return unread(answer)
    installed = [line.removeprefix("installed ") for line in answer.lines if line.startswith("installed ")]
    newest = max(installed, key=_natural, default=running)
    fix = "reboot it between two runs, and check again"
    if _natural(newest) > _natural(running):
        return warn(f"{running} runs, {newest} is installed", expected="the running one is the newest", fix=fix)
    if "reboot" in facts:
        return warn("an upgraded package asks for a reboot", expected="none asks", fix=fix)
    return ok(running)


def _natural(release: str) -> tuple[tuple[int, str], ...]:
    """``6.1.0-9`` before ``6.1.0-26``."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"[0-9]+|[a-z]+", release))
