"""opensm: one subnet manager for the InfiniBand fabric, on the node that the inventory names.

Ports are Initializing until a subnet manager configures them, and a fabric whose manager has died goes on working until
the next node restarts. So the manager is enabled, and it is asked (``sminfo``), since its unit alone tells nothing:
that of Debian and Ubuntu is a oneshot that stays active when the ``opensm@GUID`` it has started is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from provision.inventory.schema import Section, Text
from provision.model import Step
from provision.render import quote, render
from provision.services.changes import must, stopped
from provision.services.plans import Duty

if TYPE_CHECKING:
    from provision.model import Inventory, Node

ABOUT = "one InfiniBand subnet manager"
UNITS = ("opensmd.service", "opensm.service")  # with OFED; of distributions
SOON = 20  # seconds that a manager that has just been started is given before it is restarted
PATIENCE = 60  # seconds for ports to become Active; opensm configures a fabric of 64 nodes within one


class Options(Section):
    """``services: opensm:``."""

    node: Text | None = None  # that runs the subnet manager; None: the first


def problems(options: Options, inventory: Inventory) -> Iterator[tuple[str, str]]:
    """A node that there is not."""
    if options.node is not None and options.node not in {node.name for node in inventory.nodes}:
        yield "node", f"no node is called {options.node}"


def plan(options: Options, inventory: Inventory) -> Iterator[Duty]:
    """The manager's node in stage ``serve``; the others in ``follow``, where nothing is started."""
    chosen = _chosen(options, inventory)
    for node in inventory.nodes:
        if node is chosen:
            yield Duty(node.name, "serve", (_port(), _installed(), _umad(), _running(), _answers()))
        else:
            yield Duty(node.name, "follow", (stopped("no other subnet manager", UNITS), _active()))


def verify(options: Options, inventory: Inventory) -> Iterator[Duty]:
    """What is wrong with ports, managers and cables; the manager's node looks at the whole fabric."""
    chosen = _chosen(options, inventory)
    for node in inventory.nodes:
        steps = [
            _none("ports with a link are Active", "cc_waiting"),
            _none("cables carry a signal", "cc_loose"),
            _none("the subnet manager answers", "cc_silent"),
        ]
        if node is chosen:
            steps += [
                _none("one master", "cc_masters", "masters"),
                _none("links run at full rate", "cc_slow", "links"),
                _none("links have no errors", "cc_errors", "errors"),
            ]
        else:
            running = f'for cc_u in {" ".join(UNITS)}; do ! systemctl is-active -q "$cc_u" || exit 1; done'
            said = f'cc_say "a subnet manager runs here too; that of {chosen.name} is enough"'
            steps.append(must("no other subnet manager", running, said))
        yield Duty(node.name, "serve" if node is chosen else "follow", tuple(steps))


def _chosen(options: Options, inventory: Inventory) -> Node:
    return next(node for node in inventory.nodes if options.node in (None, node.name))


def _find() -> str:
    return render("services/opensm/find.sh.j2")


def _none(name: str, what: str, template: str = "") -> Step:
    """A step of ``verify`` that fails with what the sh function ``what`` prints, and is fine when that is nothing."""
    found = f"{_find()}{render(f'services/opensm/{template}.sh.j2') if template else ''}"
    return must(name, f'{found}[ -z "$({what})" ]', f"{found}{what}")


def _port() -> Step:
    missing = "this node has no InfiniBand port: name one that has with services: opensm: node:"
    return Step("InfiniBand", unless=f'{_find()}[ -n "$(cc_ports)" ]', do=f'cc_say "{missing}"\nfalse')


def _installed() -> Step:
    missing = "opensm is not installed: add it with services: os_packages:, or by hand"
    test = f'{_find()}command -v opensm && cc_has_unit "$cc_unit"'
    return Step("installed", unless=test, do=f'cc_say "{missing}"\nfalse')


def _umad() -> Step:
    """The module that opensm speaks through; its unit is skipped without it. What loads it at boot is rdma-core."""
    there = "cat /sys/class/infiniband_mad/abi_version"
    return Step("module ib_umad", unless=there, do=f"modprobe ib_umad\n{there} >/dev/null")


def _running() -> Step:
    ended = "$cc_unit ended at once; with PORTS=NONE in /etc/default/opensm it starts nothing"
    do = f"""\
{_find()}cc_start "$cc_unit"
if ! cc_on "$cc_unit"; then
  cc_say "{ended}"
  cc_why "$cc_unit"
fi
cc_wait {SOON} cc_all || :"""
    return Step("running", unless=f'{_find()}cc_on "$cc_unit"', do=do)


def _answers() -> Step:
    """Ports anywhere that wait, or a manager that does not answer: it is restarted, and waited for."""
    hint = "see /var/log/opensm*.log; a port of another fabric needs a subnet manager of its own"
    do = f'{_find()}cc_restart "$cc_unit"\n{_wait("cc_all", hint)}'
    return Step("answers", unless=f'{_find()}[ -z "$(cc_all)" ]', do=do)


def _active() -> Step:
    hint = "the subnet manager does not see this node: is it cabled to the same fabric?"
    test = f'{_find()}[ -z "$(cc_here)" ]'
    return Step("ports are Active", unless=test, do=f"{_find()}{_wait('cc_here', hint)}")


def _wait(what: str, hint: str) -> str:
    return f'cc_wait {PATIENCE} {what} || {{ cc_say "$cc_left"; cc_say {quote(hint)}; false; }}'
