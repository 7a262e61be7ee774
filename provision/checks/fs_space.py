"""fs.space: the disk of the releases has room.

``df -P`` (POSIX) of the folder above the inventory's prefix, or of the nearest one that exists. The previous
release stays, and a transfer needs a part of its size again: 2.2 times the unpacked size of the bundle.
"""

from provision.checks.kit import GIB, Answers, Judgements, Plan, df, fail, human, ok, unread
from provision.checks.kit.mounts import nearest
from provision.render import quote

TITLE = "the disk of the releases has room"
LIMITS = {"free_gib": 20, "releases": 2.2}
WHY = "A deploy stops half way, or a checkpoint is cut short: 'No space left on device' after hours of training."


def probe(seen: Plan) -> str:
    """What is free, and whether the bundle's release is there already."""
    script = nearest(seen.inventory.root) + 'echo "at $at"\ndf -Pk "$at"\n'
    if seen.manifest is None:
        return script
    release = seen.inventory.root / "releases" / seen.manifest.release_id
    return script + f"if [ -d {quote(release)} ]; then echo deployed; fi\n"


def judge(seen: Plan, answers: Answers) -> Judgements:
    """FAIL below the larger of the limit and what the bundle needs."""
    size = sum(entry.size for entry in seen.manifest.files) if seen.manifest else 0
    for name, answer in answers.items():
        room = df(answer)
        if room is None:
            yield name, unread(answer)
            continue
        needed = 0 if "deployed" in answer.lines else size * seen.limits["releases"]
        wanted = max(needed, seen.limits["free_gib"] * GIB)
        free = room[1] * 1024
        observed = f"{human(free)} free at {next((line[3:] for line in answer.lines if line.startswith('at ')), '?')}"
        if free >= wanted:
            yield name, ok(observed)
        else:
            fix = "clusterctl prune; see what fills it: du -xhd1 " + str(seen.inventory.root)
            expected = f"at least {human(wanted)}" + (" for this bundle" if needed == wanted else "")
            yield name, fail(observed, expected=expected, fix=fix)
