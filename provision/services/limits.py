"""limits: locked memory, open files and optionally the size of /dev/shm.

RDMA registers (locks) its buffers, and ``ibv_reg_mr`` fails with the usual limit of 64 KiB to 8 MiB. Data loaders keep
a file open for each worker and shard. pam_limits reads limits.d at every login, so no daemon needs a restart, and
running sessions do not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, WithJsonSchema

from provision.inventory.document import shown
from provision.inventory.schema import Section
from provision.render import quote
from provision.services.kit.changes import require, write_block, write_file
from provision.services.kit.plans import NodeSteps
from provision.services.kit.ram import as_size, resize

if TYPE_CHECKING:
    from provision.model import Inventory

ABOUT = "memlock and nofile for every login, and the size of /dev/shm"
AFTER = ("os_packages",)
PATH = "/etc/security/limits.d/90-clusterctl.conf"


def _files(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1024 <= value <= 1 << 30:
        return value
    raise ValueError(f"{shown(repr(value))} is not a number of open files (1024 to 1073741824)")


def _memory(value: object) -> str:
    if value == "unlimited" or (isinstance(value, int) and not isinstance(value, bool) and 64 <= value <= 1 << 40):
        return str(value)
    raise ValueError(
        f"{shown(repr(value))} is not a limit of locked memory: write unlimited, or KiB (64 to 1099511627776)"
    )


_MEMORY = WithJsonSchema({"anyOf": [{"const": "unlimited"}, {"type": "integer", "minimum": 64, "maximum": 1 << 40}]})
_FILES = WithJsonSchema({"type": "integer", "minimum": 1024, "maximum": 1 << 30})


class Options(Section):
    """``services: limits:``."""

    memlock: Annotated[str, BeforeValidator(_memory), _MEMORY] = "unlimited"  # in KiB, as `ulimit -l` counts
    nofile: Annotated[int, BeforeValidator(_files), _FILES] = 1048576
    shm: Annotated[str, BeforeValidator(as_size)] | None = None


def problems(_options: Options, _inventory: Inventory) -> Iterator[tuple[str, str]]:
    """No problems beyond the options' own validation."""
    yield from ()


def plan(options: Options, inventory: Inventory) -> Iterator[NodeSteps]:
    """The same file on every node."""
    steps = [write_file("limits of a login", PATH, _text(options))]
    if options.shm:
        line = f"tmpfs /dev/shm tmpfs rw,nosuid,nodev,size={options.shm} 0 0\n"
        steps.append(write_block("size of shared memory after a reboot", "/etc/fstab", line, mark="shm"))
        steps.append(resize("size of shared memory now", "/dev/shm", options.shm))  # noqa: S108 - no file
    for node in inventory.nodes:
        yield NodeSteps(node.name, "base", tuple(steps))


def verify(options: Options, inventory: Inventory) -> Iterator[NodeSteps]:
    """Check the limits of a login through ``su``, which uses pam like all login programs."""
    wanted = f"{options.memlock} {options.nofile}"
    ask = "cc_l=$(su -s /bin/sh root -c 'ulimit -l; ulimit -n' 2>/dev/null | tr '\\n' ' ')"
    test = f'{ask}\n[ "${{cc_l% }}" = {quote(wanted)} ]'
    problem = f"a login has memlock and nofile ${{cc_l% }}, expected {wanted}: check that pam reads limits.d"
    why = f'{ask}\necho "{problem}"'
    for node in inventory.nodes:
        yield NodeSteps(node.name, "base", (require("a login has the limits", test, why),))


def _text(options: Options) -> str:
    # `*` does not include root, so root has separate lines: limits.conf(5).
    lines = [
        f"{who} - {item} {value}"
        for who in ("*", "root")
        for item, value in (("memlock", options.memlock), ("nofile", options.nofile))
    ]
    return "# Written by clusterctl; `clusterctl services undo limits` removes it.\n" + "\n".join(lines) + "\n"
