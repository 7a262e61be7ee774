"""chrony: one clock for the cluster. The head serves its own time, or the site's; every other node follows it.

The head says ``local stratum 10`` without ``orphan``: there is one head, and in orphan mode chrony 4.7 and later would
look unsynchronised for 300 s after its start (chrony.conf(5), ``waitunsynced``). ``makestep 1.0 3`` steps the clock in
the first three updates after a start only; later it is slewed, since a training must not see time go backwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field

from provision.inventory.names import check_address
from provision.inventory.schema import Section, Text, as_text
from provision.model import Step
from provision.render import quote, render
from provision.services.kit.changes import Sh, file, must, running, stopped
from provision.services.kit.plans import Duty

if TYPE_CHECKING:
    from provision.model import Inventory, Node

ABOUT = "one clock: the head serves the time, the others follow it"
AFTER = ("hosts", "os_packages")

# Every other program that would set the clock, under the names that Debian, Ubuntu and Red Hat give their units.
OTHERS = ("systemd-timesyncd.service", "ntp.service", "ntpd.service", "ntpsec.service", "openntpd.service")
CLOSE = 0.05  # seconds from the head's clock within which a node counts as following; CHECKS: a warning at 50 ms


def _address(value: object) -> str:
    text = as_text(value)
    check_address(text)
    return text


class Options(Section):
    """``services: chrony:``."""

    head: Text | None = None  # the node that serves the time; None: the first
    servers: tuple[Annotated[str, BeforeValidator(_address)], ...] = Field(default=(), max_length=16)


def problems(options: Options, inventory: Inventory) -> Iterator[tuple[str, str]]:
    """A head that is no node."""
    if options.head is not None and options.head not in {node.name for node in inventory.nodes}:
        yield "head", f"no node is called {options.head}"


def plan(options: Options, inventory: Inventory) -> Iterator[Duty]:
    """The head's steps in stage ``serve``, the others' in ``follow``."""
    head = _head(options, inventory)
    for node in inventory.nodes:
        text = _served(options, inventory, head) if node is head else _followed(head)
        steps = (_present(), stopped("no other clock daemon", OTHERS), _configuration(text), _running())
        yield Duty(node.name, "serve" if node is head else "follow", (*steps, *(() if node is head else (_close(),))))


def verify(options: Options, inventory: Inventory) -> Iterator[Duty]:
    """Synchronised, and to the head: what ``chronyc -n tracking`` says."""
    head = _head(options, inventory)
    asked = "cc_t=$(chronyc -n tracking 2>&1)"
    why = f'{asked}\nprintf "%s\\n" "$cc_t" | grep -E "^(Stratum|System time|Leap status|506)"'
    for node in inventory.nodes:
        normal = f'{asked}\nprintf "%s\\n" "$cc_t" | grep -q "^Leap status *: Normal"'
        if node is head:
            yield Duty(node.name, "serve", (must("serves the time", normal, why),))
        else:
            near = render("services/chrony/near.sh.j2", seconds=CLOSE)
            yield Duty(node.name, "follow", (must("follows the head", f"{normal}\n{near}", why),))


def _head(options: Options, inventory: Inventory) -> Node:
    return next(node for node in inventory.nodes if options.head in (None, node.name))


def _served(options: Options, inventory: Inventory, head: Node) -> str:
    addresses = [node.train_address for node in inventory.nodes if node is not head]
    return render("services/chrony/head.conf.j2", servers=options.servers, clients=addresses)


def _followed(head: Node) -> str:
    return render("services/chrony/follower.conf.j2", head=head.train_address)


def _before() -> str:
    return render("services/chrony/find.sh.j2")


def _present() -> Step:
    return Step(
        "installed",
        unless="command -v chronyd",
        do='cc_say "chronyd is not installed: add it with services: os_packages:, or by hand"\nfalse',
    )


def _configuration(text: str) -> Step:
    unit = Sh('"$cc_unit"')
    return file(
        "configuration",
        Sh('"$cc_conf"'),
        Sh('"$cc_text"'),
        before=f"{_before()}cc_text={quote(text)}",
        check='chronyd -p -f "$cc_new" >/dev/null',
        then='cc_restart "$cc_unit"',
        unit=unit,
    )


def _running() -> Step:
    return running("running", Sh('"$cc_unit"'), before=_before())


def _close() -> Step:
    near = render("services/chrony/near.sh.j2", seconds=CLOSE)
    return Step("synchronised", unless=near, do=_before() + render("services/chrony/wait.sh.j2", seconds=CLOSE))
