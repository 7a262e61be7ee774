"""chrony: one clock for the cluster. The head serves its own time, or that of the site's servers, to the other nodes.

The head has ``local stratum 10`` without ``orphan``: there is one head, and in orphan mode chrony 4.7 and
later would look unsynchronised for 300 s after its start (chrony.conf(5), ``waitunsynced``). ``makestep 1.0 3`` steps
the clock only in the first three updates after a start. Later updates slew it: time must not go backwards during a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field

from provision.inventory.names import check_address
from provision.inventory.schema import Section, Text, as_text
from provision.model import Step
from provision.render import quote, render
from provision.services.kit.changes import Sh, require, start_unit, stop_units, write_file
from provision.services.kit.plans import NodeSteps

if TYPE_CHECKING:
    from provision.model import Inventory, Node

ABOUT = "one clock: the head serves the time, all other nodes follow"
AFTER = ("hosts", "os_packages")

# Other programs that set the clock: the names of their units on Debian, Ubuntu and Red Hat.
OTHERS = ("systemd-timesyncd.service", "ntp.service", "ntpd.service", "ntpsec.service", "openntpd.service")
CLOSE = 0.05  # seconds; a node that differs less from the head counts as synchronised. Checks warn at 50 ms


def _address(value: object) -> str:
    text = as_text(value)
    check_address(text)
    return text


class Options(Section):
    """``services: chrony:``."""

    head: Text | None = None  # the node that serves the time; None: the first
    servers: tuple[Annotated[str, BeforeValidator(_address)], ...] = Field(default=(), max_length=16)


def problems(options: Options, inventory: Inventory) -> Iterator[tuple[str, str]]:
    """A head that is not a node."""
    if options.head is not None and options.head not in {node.name for node in inventory.nodes}:
        yield "head", f"no node is called {options.head}"


def plan(options: Options, inventory: Inventory) -> Iterator[NodeSteps]:
    """The steps of the head in stage ``serve``, of all other nodes in ``follow``."""
    head = _head(options, inventory)
    for node in inventory.nodes:
        text = _head_text(options, inventory, head) if node is head else _follower_text(head)
        steps = (_check_installed(), stop_units("no other clock daemon", OTHERS), _configure(text), _start())
        yield NodeSteps(
            node.name, "serve" if node is head else "follow", (*steps, *(() if node is head else (_wait(),)))
        )


def verify(options: Options, inventory: Inventory) -> Iterator[NodeSteps]:
    """Check with ``chronyc -n tracking`` that every node is synchronised, and to the head."""
    head = _head(options, inventory)
    query = "cc_t=$(chronyc -n tracking 2>&1)"
    why = f'{query}\nprintf "%s\\n" "$cc_t" | grep -E "^(Stratum|System time|Leap status|506)"'
    for node in inventory.nodes:
        normal = f'{query}\nprintf "%s\\n" "$cc_t" | grep -q "^Leap status *: Normal"'
        if node is head:
            yield NodeSteps(node.name, "serve", (require("serves the time", normal, why),))
        else:
            near = render("services/chrony/near.sh.j2", seconds=CLOSE)
            yield NodeSteps(node.name, "follow", (require("follows the head", f"{normal}\n{near}", why),))


def _head(options: Options, inventory: Inventory) -> Node:
    return next(node for node in inventory.nodes if options.head in (None, node.name))


def _head_text(options: Options, inventory: Inventory, head: Node) -> str:
    addresses = [node.train_address for node in inventory.nodes if node is not head]
    return render("services/chrony/head.conf.j2", servers=options.servers, clients=addresses)


def _follower_text(head: Node) -> str:
    return render("services/chrony/follower.conf.j2", head=head.train_address)


def _find() -> str:
    """Sh that sets ``$cc_unit`` and ``$cc_conf``."""
    return render("services/chrony/find.sh.j2")


def _check_installed() -> Step:
    return Step(
        "installed",
        unless="command -v chronyd",
        do='cc_say "chronyd is not installed: add it with services: os_packages:, or by hand"\nfalse',
    )


def _configure(text: str) -> Step:
    return write_file(
        "configuration",
        Sh('"$cc_conf"'),
        Sh('"$cc_text"'),
        before=f"{_find()}cc_text={quote(text)}",
        check='chronyd -p -f "$cc_new" >/dev/null',
        then='cc_restart "$cc_unit"',
        unit=Sh('"$cc_unit"'),
    )


def _start() -> Step:
    return start_unit("running", Sh('"$cc_unit"'), before=_find())


def _wait() -> Step:
    near = render("services/chrony/near.sh.j2", seconds=CLOSE)
    return Step("synchronised", unless=near, do=_find() + render("services/chrony/wait.sh.j2", seconds=CLOSE))
