"""opensm: one subnet manager for the InfiniBand fabric, on the node that the inventory names.

Ports are Initializing until a subnet manager configures them. A fabric whose manager died works until the next node
restarts. So the unit is enabled, and the manager is queried with ``sminfo``. The state of the unit is not enough: on
Debian and Ubuntu it is a oneshot that stays active after the ``opensm@GUID`` that it started has exited.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from provision.inventory.schema import Section, Text
from provision.model import Step
from provision.render import quote, render
from provision.services.kit.changes import require, stop_units
from provision.services.kit.plans import NodeSteps

if TYPE_CHECKING:
    from provision.model import Inventory, Node

ABOUT = "one InfiniBand subnet manager"
AFTER = ("limits", "os_packages")
UNITS = ("opensmd.service", "opensm.service")  # with OFED; of distributions
START_SECONDS = 20  # for a started manager to answer, before it is restarted
ACTIVE_SECONDS = 60  # for ports to become Active; opensm configures a fabric of 64 nodes within one second


class Options(Section):
    """``services: opensm:``."""

    node: Text | None = None  # runs the subnet manager; None: the first


def problems(options: Options, inventory: Inventory) -> Iterator[tuple[str, str]]:
    """A node that does not exist."""
    if options.node is not None and options.node not in {node.name for node in inventory.nodes}:
        yield "node", f"no node is called {options.node}"


def plan(options: Options, inventory: Inventory) -> Iterator[NodeSteps]:
    """The steps of the manager's node in stage ``serve``, of all other nodes in ``follow``, which start nothing."""
    chosen = _manager(options, inventory)
    for node in inventory.nodes:
        if node is chosen:
            steps = (_check_port(), _check_installed(), _load_umad(), _start(), _wait_for_fabric())
            yield NodeSteps(node.name, "serve", steps)
        else:
            yield NodeSteps(node.name, "follow", (stop_units("no other subnet manager", UNITS), _wait_for_ports()))


def verify(options: Options, inventory: Inventory) -> Iterator[NodeSteps]:
    """Check ports, managers and cables; the manager's node checks the whole fabric."""
    chosen = _manager(options, inventory)
    for node in inventory.nodes:
        steps = [
            _require_none("ports with a link are Active", "waiting"),
            _require_none("cables carry a signal", "loose"),
            _require_none("the subnet manager answers", "silent"),
        ]
        if node is chosen:
            steps += [
                _check_tools(),
                _require_none("one master", "masters"),
                _require_none("links run at full rate", "slow"),
                _require_none("links have no errors", "errors"),
            ]
        else:
            test = f'for cc_u in {" ".join(UNITS)}; do ! systemctl is-active -q "$cc_u" || exit 1; done'
            problem = f'cc_say "a second subnet manager is running here; the one on {chosen.name} is enough"'
            steps.append(require("no other subnet manager", test, problem))
        yield NodeSteps(node.name, "serve" if node is chosen else "follow", tuple(steps))


def _manager(options: Options, inventory: Inventory) -> Node:
    return next(node for node in inventory.nodes if options.node in (None, node.name))


def _sh(*names: str) -> str:
    """The sh of ``templates/services/opensm``: each file defines the function ``cc_NAME``, or sets ``$cc_NAME``."""
    return "".join(render(f"services/opensm/{name}.sh.j2") for name in names)


def _require_none(name: str, what: str) -> Step:
    """A step of ``verify`` that fails if the function ``what`` prints anything, and shows it."""
    functions = _sh("ports", what)
    return require(name, f'{functions}[ -z "$(cc_{what})" ]', f"{functions}cc_{what}")


def _check_tools() -> Step:
    """Check the tools of the following steps, which print nothing without them."""
    missing = "infiniband-diags is not installed: the fabric cannot be queried; add it with services: os_packages:"
    test = f"{_sh('ports')}command -v sminfo && command -v iblinkinfo && command -v ibqueryerrors"
    return require("infiniband-diags is installed", test, f'cc_say "{missing}"')


def _check_port() -> Step:
    missing = "this node has no InfiniBand port: name a node that has one with services: opensm: node:"
    return Step("InfiniBand", unless=f'{_sh("ports")}[ -n "$(cc_ports)" ]', do=f'cc_say "{missing}"\nfalse')


def _check_installed() -> Step:
    missing = "opensm is not installed: add it with services: os_packages:, or by hand"
    test = f'{_sh("unit")}command -v opensm && cc_has_unit "$cc_unit"'
    return Step("installed", unless=test, do=f'cc_say "{missing}"\nfalse')


def _load_umad() -> Step:
    """Load the module that opensm needs; without it, systemd skips the unit. At boot, rdma-core loads it."""
    test = "cat /sys/class/infiniband_mad/abi_version"
    return Step("module ib_umad", unless=test, do=f"modprobe ib_umad\n{test} >/dev/null")


def _start() -> Step:
    problem = "$cc_unit exited at once; with PORTS=NONE in /etc/default/opensm it starts nothing"
    do = f"""\
{_sh("unit", *_FABRIC, "wait")}
cc_start "$cc_unit"
if ! cc_on "$cc_unit"; then
  cc_say "{problem}"
  cc_why "$cc_unit"
fi
cc_wait {START_SECONDS} {_ask(_FABRIC)} || :"""
    return Step("running", unless=f'{_sh("unit")}cc_on "$cc_unit"', do=do)


def _wait_for_fabric() -> Step:
    """Restart the manager if a port in the fabric is waiting or the manager does not answer, and wait."""
    hint = "see /var/log/opensm*.log; a port of another fabric needs another subnet manager"
    step = _wait("answers", _FABRIC, hint)
    return replace(step, do=f'{_sh("unit")}cc_restart "$cc_unit"\n{step.do}')


def _wait_for_ports() -> Step:
    hint = "the subnet manager does not see this node: check that it is cabled to the same fabric"
    return _wait("ports are Active", _NODE, hint)


# The functions that query a node's own ports, and from the manager's node all ports of the fabric.
_NODE = ("ports", "waiting", "silent")
_FABRIC = (*_NODE, "joining")


def _wait(name: str, what: tuple[str, ...], hint: str) -> Step:
    """A step that waits until ``what`` prints nothing. On a timeout it shows the rest, and ``hint``."""
    wait = f'cc_wait {ACTIVE_SECONDS} {_ask(what)} || {{ cc_say "$cc_left"; cc_say {quote(hint)}; false; }}'
    return Step(name, unless=f'{_sh(*what)}[ -z "$(eval {_ask(what)})" ]', do=f"{_sh(*what, 'wait')}{wait}")


def _ask(what: tuple[str, ...]) -> str:
    """Calls of the functions ``what`` except ``ports``, which all of them use, as one word of sh."""
    return quote("; ".join(f"cc_{name}" for name in what if name != "ports"))
