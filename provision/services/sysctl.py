"""sysctl: kernel settings, now and at every boot.

A TCP connection of 100 Gbit/s with a round trip of 1 ms has 12.5 MB in flight, and the kernel's usual limit of a
socket's buffer is 6 MB or less. Automatic NUMA balancing unmaps pages to see who uses them, which makes steps
slower and uneven.

Only the keys in ``KEYS`` are accepted, each with bounds. A wrong value of another key can make a node unreachable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, WithJsonSchema

from provision.inventory.document import shown
from provision.inventory.schema import Section
from provision.model import Step
from provision.render import quote
from provision.services.kit.changes import require, write_file
from provision.services.kit.plans import NodeSteps

if TYPE_CHECKING:
    from provision.model import Inventory

ABOUT = "kernel settings: network buffers, memory overcommit, NUMA balancing"
AFTER = ("os_packages",)

# Files are read in the order of their names, and Debian links /etc/sysctl.conf as 99-sysctl.conf.
PATH = "/etc/sysctl.d/99-zz-clusterctl.conf"
_INT = (1 << 31) - 1
_BUFFER = (4096, _INT)

# The keys that may be set, each with the lowest and the highest value of each of its numbers.
KEYS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "kernel.numa_balancing": ((0, 2),),
    "net.core.netdev_max_backlog": ((1, 1 << 24),),
    "net.core.optmem_max": (_BUFFER,),
    "net.core.rmem_default": (_BUFFER,),
    "net.core.rmem_max": (_BUFFER,),
    "net.core.somaxconn": ((128, 65535),),
    "net.core.wmem_default": (_BUFFER,),
    "net.core.wmem_max": (_BUFFER,),
    "net.ipv4.tcp_mtu_probing": ((0, 2),),
    "net.ipv4.tcp_rmem": (_BUFFER,) * 3,
    "net.ipv4.tcp_slow_start_after_idle": ((0, 1),),
    "net.ipv4.tcp_wmem": (_BUFFER,) * 3,
    "vm.max_map_count": ((65530, _INT),),
    "vm.overcommit_memory": ((0, 1),),  # 2 refuses the address space that CUDA reserves
    "vm.swappiness": ((0, 100),),
    "vm.zone_reclaim_mode": ((0, 7),),
}
DEFAULTS = {
    "kernel.numa_balancing": "0",
    "net.core.rmem_max": "268435456",
    "net.core.wmem_max": "268435456",
    "net.ipv4.tcp_rmem": "4096 131072 268435456",
    "net.ipv4.tcp_wmem": "4096 65536 268435456",
}
# Settings that some kernels are built without. The value 0 is accepted there.
_OPTIONAL = frozenset(("kernel.numa_balancing", "vm.zone_reclaim_mode"))


def _settings(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not value:
        raise ValueError("must be a mapping of keys, such as {vm.overcommit_memory: 1}")
    wrong = [sentence for key, text in value.items() if (sentence := _wrong(key, text))]
    if wrong:
        raise ValueError("; ".join(wrong))
    return {key: " ".join(str(int(number)) for number in str(value[key]).split()) for key in sorted(value)}


def _wrong(key: object, value: object) -> str:
    """Why a setting is refused."""
    if not isinstance(key, str) or key not in KEYS:
        return f"{shown(str(key))} is not a setting that clusterctl changes (known: {', '.join(KEYS)})"
    bounds = KEYS[key]
    known = type(value) is int or (isinstance(value, str) and re.fullmatch(r"[0-9]{1,10}( +[0-9]{1,10}){0,2}", value))
    numbers = [int(number) for number in str(value).split()] if known else []
    if len(numbers) != len(bounds):
        count = "a whole number" if len(bounds) == 1 else f"{len(bounds)} whole numbers with blanks between them"
        return f"{key} must be {count}, not {shown(str(value))}"
    for number, (low, high) in zip(numbers, bounds, strict=True):
        if not low <= number <= high:
            return f"{key} must be between {low} and {high}, not {number}"
    if numbers != sorted(numbers):
        return f"{key} must be its minimum, default and maximum, in this order, not {value}"
    return ""


_SETTINGS = WithJsonSchema(
    {"type": "object", "minProperties": 1, "additionalProperties": {"type": ["integer", "string"]}}
)


class Options(Section):
    """``services: sysctl:``."""

    settings: Annotated[dict[str, str], BeforeValidator(_settings), _SETTINGS] = DEFAULTS  # replaces the defaults


def problems(_options: Options, _inventory: Inventory) -> Iterator[tuple[str, str]]:
    """No problems beyond the options' own validation."""
    yield from ()


def plan(options: Options, inventory: Inventory) -> Iterator[NodeSteps]:
    """Write the settings to a file for the next boot and to the kernel, on every node."""
    steps = (
        write_file("settings of every boot", PATH, _text(options)),
        *(_set_now(key, value) for key, value in options.settings.items()),
    )
    for node in inventory.nodes:
        yield NodeSteps(node.name, "base", steps)


def verify(options: Options, inventory: Inventory) -> Iterator[NodeSteps]:
    """Check every setting in the kernel."""
    steps = tuple(_check_now(key, value) for key, value in options.settings.items())
    for node in inventory.nodes:
        yield NodeSteps(node.name, "base", steps)


def _text(options: Options) -> str:
    # A line that begins with - is skipped without an error if the kernel lacks the key: sysctl.d(5).
    lines = (f"{'-' if _may_lack(*each) else ''}{each[0]} = {each[1]}\n" for each in options.settings.items())
    return "# Written by clusterctl; `clusterctl services undo sysctl` removes it.\n" + "".join(lines)


def _may_lack(key: str, value: str) -> bool:
    return key in _OPTIONAL and value == "0"


def _read(key: str) -> str:
    """Sh that sets ``$cc_now``. The kernel separates several numbers with tabs."""
    path = quote(_path(key))
    return f"cc_now=$(cat {path} 2>/dev/null | tr '\\t' ' ')"


def _is(key: str, value: str) -> str:
    test = f'{_read(key)}\n[ "$cc_now" = {quote(value)} ]'
    return f"{test} || [ ! -e {quote(_path(key))} ]" if _may_lack(key, value) else test


def _path(key: str) -> str:
    return "/proc/sys/" + key.replace(".", "/")


def _set_now(key: str, value: str) -> Step:
    path = quote(_path(key))
    # Undo skips a setting that the running kernel does not have.
    back = """[ ! -e "$2" ] || printf "%s\\n" "$1" >"$2\""""
    do = (
        f"{_read(key)}\n"
        f'[ -n "$cc_now" ] || {{ cc_say "this kernel has no {key}"; exit 1; }}\n'
        f'cc_journal {quote(f"now {key}")} sh -c {quote(back)} sh "$cc_now" {path}\n'
        f"printf '%s\\n' {quote(value)} >{path}\n"
        f'{_is(key, value)} || {{ cc_say "the kernel took $cc_now for {key}, not {value}"; exit 1; }}'
    )
    return Step(f"{key} now", do=do, unless=_is(key, value))


def _check_now(key: str, value: str) -> Step:
    why = f'{_read(key)}\ncc_say "{key} is ${{cc_now:-unknown to this kernel}}, not {value}: see sysctl --system"'
    return require(key, _is(key, value), why)
