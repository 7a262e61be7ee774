"""opensm: one subnet manager for the InfiniBand fabric, on the node that the inventory names.

Ports are Initializing until a subnet manager configures them, and a fabric whose manager has died goes on working until
the next node restarts. So the manager is enabled, and it is asked (``sminfo``), since its unit alone tells nothing:
that of Debian and Ubuntu is a oneshot that stays active when the ``opensm@GUID`` it has started is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from provision.inventory.schema import Section, Text
from provision.model import Step
from provision.render import quote, render
from provision.services.kit.changes import must, stopped
from provision.services.kit.plans import Duty

if TYPE_CHECKING:
    from provision.model import Inventory, Node

ABOUT = "one InfiniBand subnet manager"
AFTER = ("limits", "os_packages")
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
            _none("ports with a link are Active", "waiting"),
            _none("cables carry a signal", "loose"),
            _none("the subnet manager answers", "silent"),
        ]
        if node is chosen:
            steps += [
                _tools(),
                _none("one master", "masters"),
                _none("links run at full rate", "slow"),
                _none("links have no errors", "errors"),
            ]
        else:
            running = f'for cc_u in {" ".join(UNITS)}; do ! systemctl is-active -q "$cc_u" || exit 1; done'
            said = f'cc_say "a subnet manager runs here too; that of {chosen.name} is enough"'
            steps.append(must("no other subnet manager", running, said))
        yield Duty(node.name, "serve" if node is chosen else "follow", tuple(steps))


def _chosen(options: Options, inventory: Inventory) -> Node:
    return next(node for node in inventory.nodes if options.node in (None, node.name))


def _sh(*names: str) -> str:
    """The sh of ``templates/services/opensm``: each file has the function ``cc_NAME``, or finds out ``$cc_NAME``."""
    return "".join(render(f"services/opensm/{name}.sh.j2") for name in names)


def _none(name: str, what: str) -> Step:
    """A step of ``verify`` that fails with what the function ``what`` prints, and is fine when that is nothing."""
    found = _sh("ports", what)
    return must(name, f'{found}[ -z "$(cc_{what})" ]', f"{found}cc_{what}")


def _tools() -> Step:
    """What the steps after it ask with: where it is missing, they print nothing and know nothing."""
    missing = "infiniband-diags is not installed: nobody can ask the fabric; add it with services: os_packages:"
    test = f"{_sh('ports')}command -v sminfo && command -v iblinkinfo && command -v ibqueryerrors"
    return must("infiniband-diags is there", test, f'cc_say "{missing}"')


def _port() -> Step:
    missing = "this node has no InfiniBand port: name one that has with services: opensm: node:"
    return Step("InfiniBand", unless=f'{_sh("ports")}[ -n "$(cc_ports)" ]', do=f'cc_say "{missing}"\nfalse')


def _installed() -> Step:
    missing = "opensm is not installed: add it with services: os_packages:, or by hand"
    test = f'{_sh("unit")}command -v opensm && cc_has_unit "$cc_unit"'
    return Step("installed", unless=test, do=f'cc_say "{missing}"\nfalse')


def _umad() -> Step:
    """The module that opensm speaks through; its unit is skipped without it. What loads it at boot is rdma-core."""
    there = "cat /sys/class/infiniband_mad/abi_version"
    return Step("module ib_umad", unless=there, do=f"modprobe ib_umad\n{there} >/dev/null")


def _running() -> Step:
    ended = "$cc_unit ended at once; with PORTS=NONE in /etc/default/opensm it starts nothing"
    do = f"""\
{_sh("unit", *_FABRIC, "wait")}
cc_start "$cc_unit"
if ! cc_on "$cc_unit"; then
  cc_say "{ended}"
  cc_why "$cc_unit"
fi
cc_wait {SOON} {_ask(_FABRIC)} || :"""
    return Step("running", unless=f'{_sh("unit")}cc_on "$cc_unit"', do=do)


def _answers() -> Step:
    """Ports anywhere that wait, or a manager that does not answer: it is restarted, and waited for."""
    hint = "see /var/log/opensm*.log; a port of another fabric needs a subnet manager of its own"
    step = _settled("answers", _FABRIC, hint)
    return replace(step, do=f'{_sh("unit")}cc_restart "$cc_unit"\n{step.do}')


def _active() -> Step:
    hint = "the subnet manager does not see this node: is it cabled to the same fabric?"
    return _settled("ports are Active", _NODE, hint)


# What is looked at: the node's own ports, and from the manager's node the others' as well.
_NODE = ("ports", "waiting", "silent")
_FABRIC = (*_NODE, "joining")


def _settled(name: str, what: tuple[str, ...], hint: str) -> Step:
    """A step that waits until ``what`` prints nothing; when that takes too long it says what is left, and ``hint``."""
    wait = f'cc_wait {PATIENCE} {_ask(what)} || {{ cc_say "$cc_left"; cc_say {quote(hint)}; false; }}'
    return Step(name, unless=f'{_sh(*what)}[ -z "$(eval {_ask(what)})" ]', do=f"{_sh(*what, 'wait')}{wait}")


def _ask(what: tuple[str, ...]) -> str:
    """The functions of ``what`` after ``ports``, which they all read, as one word of sh."""
    return quote("; ".join(f"cc_{name}" for name in what if name != "ports"))
