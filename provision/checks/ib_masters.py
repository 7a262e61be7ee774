"""ib.masters: a fabric has one master subnet manager, and all nodes know the same one.

``saquery SMIR`` lists the subnet managers that the master knows, and ``sminfo LID`` asks each for its state; both are
of infiniband-diags and need root. Others in state STANDBY are right: they take over when the master dies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan
from provision.checks._infiniband import ACTIVE, ASK, PORTS, Fault, fabric, sections, told
from provision.checks._judging import groups, majority
from provision.inventory import fold
from provision.model import Finding

ID = "ib.masters"
LEVEL = 0
ROOT = True
TITLE = "one master subnet manager"
WHY = "Two masters overwrite each other's routes: links reset in the middle of a training, and NCCL times out."
_LIST = """\
said=$(saquery -C "${device##*/}" -P "${port##*/}" SMIR 2>&1)
    for lid in $(printf '%s\\n' "$said" | sed -n 's/^[[:space:]]*LID\\.*\\([0-9][0-9]*\\)$/\\1/p' | sort -u); do
      echo "at $lid"
      sminfo -C "${device##*/}" -P "${port##*/}" -t 500 "$lid"
    done
    [ -n "$said" ]"""
PROBE = PORTS + ASK.format(mark="managers", command=_LIST)
TIMEOUT = 30

_SAID = re.compile(r"sm lid (\d+) sm guid (0x[0-9a-f]+), activity count \d+ priority (\d+) state \d+ SMINFO_(\w+)")
_FIX = (
    "stop all but one: systemctl disable --now opensm (opensmd with OFED) on the others, "
    "or switch the switch's own subnet manager off"
)


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """Name two masters of one fabric, and a node whose port has another master than its like."""
    cluster, others = fabric(ID, answers)
    yield from others
    known: dict[str, dict[str, tuple[tuple[str, str], ...]]] = {}
    for name, ports in cluster.items():
        said = {f"{device} port {number}": text for (device, number), text in sections(answers[name].out, "managers")}
        active = [port.name for port in ports if port.state == ACTIVE]
        known[name] = {at: tuple((f[2], f[4]) for f in _SAID.finditer(said.get(at, ""))) for at in active}
    for name, managers in known.items():
        masters = {at: tuple(guid for guid, state in each if state == "MASTER") for at, each in managers.items()}
        standby = {guid for each in managers.values() for guid, state in each if state != "MASTER"}
        fine = f"master {', '.join(sorted({guid for each in masters.values() for guid in each}))}"
        fine += f", in reserve {', '.join(sorted(standby))}" if standby else ""
        yield told(ID, name, _faults(masters, known), fine if masters else "no port is Active")


def _faults(
    masters: Mapping[str, tuple[str, ...]], known: Mapping[str, Mapping[str, tuple[tuple[str, str], ...]]]
) -> Iterator[Fault]:
    for at, guids in masters.items():
        if not guids:
            yield Fault("UNKNOWN", f"{at}: no list of subnet managers", "saquery SMIR", "as root, see ib.sm")
        elif len(guids) > 1:
            yield Fault("FAIL", f"{at}: {len(guids)} masters, {' and '.join(guids)}", "one master", _FIX)
        else:
            every = {name: guid for name, each in known.items() if (guid := _master(each.get(at, ())))}
            common = majority(every)
            if common is None:
                said = ", ".join(f"{fold(names)} {guid}" for guid, names in groups(every).items())
                yield Fault("FAIL", f"{at}: two masters, {said}", "one master for all nodes", _FIX)
            elif guids[0] != common:
                said = f"{at} has the master {guids[0]}, most nodes have {common}"
                yield Fault("FAIL", said, f"master {common}", f"{_FIX}; is it cabled to another fabric?")


def _master(managers: tuple[tuple[str, str], ...]) -> str | None:
    guids = [guid for guid, state in managers if state == "MASTER"]
    return guids[0] if len(guids) == 1 else None
