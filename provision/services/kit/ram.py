"""Sizes of file systems in RAM (tmpfs): the form of an option, and the step that changes a mounted one."""

from __future__ import annotations

import re

from provision.inventory.document import shown
from provision.model import Step
from provision.render import quote

_SHIFTS = {"k": 10, "m": 20, "g": 30}


def as_size(value: object) -> str:
    """A size from 1 MiB to 1 PiB, or a share of the memory up to 100 %, in lower case."""
    if isinstance(value, str) and re.fullmatch(r"([1-9][0-9]?|100)%|[1-9][0-9]{0,9}[kmgKMG]", value):
        size = value.lower()
        if size.endswith("%") or 1 << 20 <= int(size[:-1]) << _SHIFTS[size[-1]] <= 1 << 50:
            return size
    raise ValueError(f"{shown(repr(value))} is not a size of a tmpfs: write 64G, or 50% of the memory")


def resize(name: str, path: str, size: str) -> Step:
    """The step that gives a mounted tmpfs this size now; undo restores the old one."""
    where = quote(path)
    # The current size in bytes, and the wanted one. The kernel rounds sizes to pages.
    now = f'cc_now=$(($(stat -f -c "%b * %S" {where})))'
    memory = "cc_kib=$(sed -n 's/^MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo)"
    if size.endswith("%"):
        wanted = f"{memory}\ncc_wanted=$((cc_kib * 1024 / 100 * {int(size[:-1])}))"
    else:
        wanted = f"cc_wanted={int(size[:-1]) << _SHIFTS[size[-1]]}"
    close = "cc_off=$(((cc_now - cc_wanted) / 1048576))\n[ $cc_off -ge -1 ] && [ $cc_off -le 1 ]"
    return Step(
        name,
        do=f'{now}\ncc_journal {where} mount -o remount,size="$cc_now" {where}\n'
        f"mount -o remount,size={quote(size)} {where}",
        unless=f"{now}\n{wanted}\n{close}",
    )
