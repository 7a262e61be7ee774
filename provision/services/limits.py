"""limits: locked memory, open files and, where asked for, the size of /dev/shm.

RDMA registers (locks) the buffers it sends from, and the usual limit of 64 KiB to 8 MiB makes ``ibv_reg_mr`` fail; data
loaders keep a file open for each worker and shard. pam_limits reads limits.d at every login, so that no daemon needs a
restart and running sessions stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, WithJsonSchema

from provision.inventory.document import shown
from provision.inventory.schema import Section
from provision.model import Step
from provision.render import quote
from provision.services.kit.changes import block, file, must
from provision.services.kit.plans import Duty

if TYPE_CHECKING:
    from provision.model import Inventory

ABOUT = "memlock and nofile for every login, and the size of /dev/shm"
AFTER = ("os_packages",)
PATH = "/etc/security/limits.d/90-clusterctl.conf"
_SHIFTS = {"k": 10, "m": 20, "g": 30}


def _size(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"([1-9][0-9]?|100)%|[1-9][0-9]{0,9}[kmgKMG]", value):
        size = value.lower()
        if size.endswith("%") or 1 << 20 <= int(size[:-1]) << _SHIFTS[size[-1]] <= 1 << 50:
            return size
    raise ValueError(f"{shown(repr(value))} is no size of a tmpfs: write 64G, or 50% of the memory")


def _files(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1024 <= value <= 1 << 30:
        return value
    raise ValueError(f"{shown(repr(value))} is no number of open files (1024 to 1073741824)")


def _memory(value: object) -> str:
    if value == "unlimited" or (isinstance(value, int) and not isinstance(value, bool) and 64 <= value <= 1 << 40):
        return str(value)
    raise ValueError(
        f"{shown(repr(value))} is no limit of locked memory: write unlimited, or KiB (64 to 1099511627776)"
    )


_MEMORY = WithJsonSchema({"anyOf": [{"const": "unlimited"}, {"type": "integer", "minimum": 64, "maximum": 1 << 40}]})
_FILES = WithJsonSchema({"type": "integer", "minimum": 1024, "maximum": 1 << 30})


class Options(Section):
    """``services: limits:``."""

    memlock: Annotated[str, BeforeValidator(_memory), _MEMORY] = "unlimited"  # in KiB, as `ulimit -l` counts
    nofile: Annotated[int, BeforeValidator(_files), _FILES] = 1048576
    shm: Annotated[str, BeforeValidator(_size)] | None = None


def problems(_options: Options, _inventory: Inventory) -> Iterator[tuple[str, str]]:
    """Nothing that the options alone do not show."""
    yield from ()


def plan(options: Options, inventory: Inventory) -> Iterator[Duty]:
    """The same file on every node."""
    steps = [file("limits of a login", PATH, _text(options))]
    if options.shm:
        steps += _shm(options.shm)
    for node in inventory.nodes:
        yield Duty(node.name, "base", tuple(steps))


def verify(options: Options, inventory: Inventory) -> Iterator[Duty]:
    """A login has the limits: asked of pam where ``su`` is there, which every distribution's login programs share."""
    wanted = f"{options.memlock} {options.nofile}"
    ask = "cc_l=$(su -s /bin/sh root -c 'ulimit -l; ulimit -n' 2>/dev/null | tr '\\n' ' ')"
    test = f'{ask}\n[ "${{cc_l% }}" = {quote(wanted)} ]'
    said = f"a login has memlock and nofile ${{cc_l% }}, not {wanted}: may it raise them, does pam read limits.d?"
    why = f'{ask}\necho "{said}"'
    for node in inventory.nodes:
        yield Duty(node.name, "base", (must("a login has the limits", test, why),))


def _text(options: Options) -> str:
    # `*` does not stand for root, which therefore has lines of its own: limits.conf(5).
    lines = [
        f"{who} - {item} {value}"
        for who in ("*", "root")
        for item, value in (("memlock", options.memlock), ("nofile", options.nofile))
    ]
    return "# Written by clusterctl; `clusterctl services undo limits` removes it.\n" + "\n".join(lines) + "\n"


def _shm(size: str) -> list[Step]:
    line = f"tmpfs /dev/shm tmpfs rw,nosuid,nodev,size={size} 0 0\n"
    # How large it is now, in bytes; and how large it would be, which the kernel rounds to pages.
    now = 'cc_now=$(($(stat -f -c "%b * %S" /dev/shm)))'
    memory = "cc_kib=$(sed -n 's/^MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo)"
    if size.endswith("%"):
        wanted = f"{memory}\ncc_wanted=$((cc_kib * 1024 / 100 * {int(size[:-1])}))"
    else:
        wanted = f"cc_wanted={int(size[:-1]) << _SHIFTS[size[-1]]}"
    close = "cc_off=$(((cc_now - cc_wanted) / 1048576))\n[ $cc_off -ge -1 ] && [ $cc_off -le 1 ]"
    return [
        block("size of shared memory after a reboot", "/etc/fstab", line, mark="shm"),
        Step(
            "size of shared memory now",
            do=f'{now}\ncc_journal "/dev/shm" mount -o remount,size="$cc_now" /dev/shm\n'
            f"mount -o remount,size={quote(size)} /dev/shm",
            unless=f"{now}\n{wanted}\n{close}",
        ),
    ]
