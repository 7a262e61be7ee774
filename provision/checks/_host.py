"""What the judges of the host share: lines of answers, sizes, limits. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

from provision.checks import Answer, unknown
from provision.checks._judging import odd
from provision.model import Finding

T = TypeVar("T", bound=Hashable)

GIB = 1 << 30


# --- lines ---------------------------------------------------------------------------------------


def pairs(answer: Answer) -> dict[str, str]:
    """Lines of ``key value`` as a mapping; ``key: value`` as well. Of equal keys the last one counts."""
    split = (line.replace("\t", " ").partition(" ") for line in answer.lines)
    return {key.removesuffix(":"): value.strip() for key, _, value in split}


def number(text: str | None) -> int | None:
    """A whole number, or None."""
    return int(text) if text is not None and re.fullmatch(r"-?[0-9]{1,20}", text) else None


def kib(text: str | None) -> int | None:
    """The bytes of a ``/proc/meminfo`` value such as ``24684084 kB``, or None."""
    amount = number((text or "").removesuffix("kB").strip())
    return None if amount is None else amount * 1024


def human(size: float) -> str:
    """Bytes as text: ``25.3 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def many(count: int, one: str, several: str = "") -> str:
    """A count with its noun: ``1 file``, ``3 files``."""
    return f"{count} {one if count == 1 else several or one + 's'}"


def cpus(text: str | None) -> int | None:
    """How many there are in a kernel's list such as ``0-31,64``, or None."""
    if text is None or not re.fullmatch(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*", text):
        return None
    ends = ((part.split("-")[0], part.split("-")[-1]) for part in text.split(","))
    return sum(int(last) - int(first) + 1 for first, last in ends)


def df(answer: Answer) -> tuple[int, int] | None:
    """Size and what is free in the output of ``df -P`` (POSIX) for one folder, in its units; None where it has none."""
    found = re.search(r"^\S.* ([0-9]{1,20}) +[0-9]+ +([0-9]{1,20}) +(?:-|[0-9]+%) +/", answer.out, re.MULTILINE)
    return (int(found[1]), int(found[2])) if found else None


def soft_limit(answer: Answer, name: str) -> str | None:
    """The soft limit in a line of ``/proc/self/limits``: ``unlimited``, a whole number, or None."""
    found = re.search(rf"^Max {name} +(unlimited|[0-9]{{1,20}}) ", answer.out, re.MULTILINE)
    return found[1] if found else None


def may(answer: Answer, capability: int) -> bool:
    """Whether the ``CapEff`` line has a capability; ``<linux/capability.h>`` has their numbers."""
    found = re.search(r"^CapEff:\s*([0-9a-f]{1,16})$", answer.out, re.MULTILINE)
    return bool(found and int(found[1], 16) >> capability & 1)


def unread(check: str, node: str, answer: Answer) -> Finding:
    """UNKNOWN, with what the node said instead."""
    said = (answer.err.strip() or answer.out.strip() or "nothing").splitlines()[0][:120]
    return unknown(check, node, f"the answer cannot be read: {said}")


def compared(
    check: str, answers: Mapping[str, Answer], read: Callable[[Answer], T | None], **given: Any
) -> Iterator[Finding]:
    """``odd`` over what ``read`` makes of every answer; UNKNOWN where that is None."""
    values: dict[str, T] = {}
    for name, answer in answers.items():
        value = read(answer)
        if value is None:
            yield unread(check, name, answer)
        else:
            values[name] = value
    yield from odd(check, values, **given)


def tightest(answer: Answer) -> tuple[str, int] | None:
    """The control group with the lowest limit, and that limit; None where nothing is limited."""
    fields = (line.split() for line in answer.lines if line.startswith("at "))
    found = [(each[1], int(each[2])) for each in fields if len(each) == 3 and each[2].isdecimal()]  # not "max"
    return min(found, key=lambda limit: limit[1], default=None)
