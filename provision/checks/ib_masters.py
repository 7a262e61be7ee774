"""ib.masters: a fabric has one master subnet manager, and all nodes know the same one.

``saquery SMIR`` (infiniband-diags, needs root) asks the master for the subnet managers that it knows. SMState is 3 of a
master and 2 of one in STANDBY, which is right: it takes over when the master dies (InfiniBand Architecture
Specification 1, 14.4.1).
"""

import re
from collections.abc import Iterator, Mapping

from provision.checks.kit import Answers, Judgements, groups, majority
from provision.checks.kit.infiniband import ACTIVE, ASK, PORTS, Fault, fabric, sections, worst
from provision.inventory import fold

ROOT = True
TITLE = "one master subnet manager"
WHY = "Two masters overwrite each other's routes: links reset in the middle of a training, and NCCL times out."
PROBE = PORTS + ASK.format(mark="managers", command='saquery -C "${device##*/}" -P "${port##*/}" SMIR')
TIMEOUT = 30

_MANAGER = re.compile(r"\bGUID\.+(0x[0-9a-f]+)$.*?\bSMState\.+(\d+)$", re.MULTILINE | re.DOTALL)
_MASTER = 3
_FIX = (
    "stop all but one: systemctl disable --now opensm (opensmd with OFED) on the others, "
    "or switch the switch's own subnet manager off"
)


_Managers = tuple[tuple[str, int], ...]  # port GUID and SMState


def judge(answers: Answers) -> Judgements:
    """Name two masters of one fabric, and a node whose port has another master than similar ports."""
    cluster, others = fabric(answers)
    yield from others
    known: dict[str, dict[str, _Managers]] = {}
    for name, ports in cluster.items():
        observed = {
            f"{device} port {number}": text
            for (device, number), text in sections(answers[name].out, "managers", words=2)
        }
        active = [port.name for port in ports if port.state == ACTIVE]
        known[name] = {at: _managers(observed.get(at, "")) for at in active}
    for name, managers in known.items():
        masters = {at: tuple(guid for guid, state in each if state == _MASTER) for at, each in managers.items()}
        standby = {guid for each in managers.values() for guid, state in each if state != _MASTER}
        fine = f"master {', '.join(sorted({guid for each in masters.values() for guid in each}))}"
        fine += f", in reserve {', '.join(sorted(standby))}" if standby else ""
        yield name, worst(_faults(masters, known), fine if masters else "no port is Active")


def _faults(masters: Mapping[str, tuple[str, ...]], known: Mapping[str, Mapping[str, _Managers]]) -> Iterator[Fault]:
    for at, guids in masters.items():
        if not guids:
            yield Fault("UNKNOWN", f"{at}: no list of subnet managers", "saquery SMIR", "as root, see ib.sm")
        elif len(guids) > 1:
            yield Fault("FAIL", f"{at}: {len(guids)} masters, {' and '.join(guids)}", "one master", _FIX)
        else:
            every = {name: guid for name, each in known.items() if (guid := _master(each.get(at, ())))}
            common = majority(every)
            if common is None:
                observed = ", ".join(f"{fold(names)} {guid}" for guid, names in groups(every).items())
                yield Fault("FAIL", f"{at}: two masters, {observed}", "one master for all nodes", _FIX)
            elif guids[0] != common:
                observed = f"{at} has the master {guids[0]}, most nodes have {common}"
                yield Fault("FAIL", observed, f"master {common}", f"{_FIX}; is it cabled to another fabric?")


def _managers(text: str) -> _Managers:
    return tuple((hex(int(guid, 16)), int(state)) for guid, state in _MANAGER.findall(text))


def _master(managers: _Managers) -> str | None:
    guids = [guid for guid, state in managers if state == _MASTER]
    return guids[0] if len(guids) == 1 else None
