"""What the checks of InfiniBand error counters share: reading them, twice where one is not zero, and the other end.

Counters of a port are files of ``counters/`` in sysfs, counted since the driver was loaded or the port was reset. Where
sysfs has none, ``perfquery`` asks the port. What is not zero is read again a second later: a counter that grows is a
fault of now. Then ``smpquery`` names the switch port at the other end of the cable, where it may.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from provision.checks import Answer, unknown
from provision.checks._infiniband import ASK, PORTS, Fault, Port, fabric, sections, told
from provision.model import Finding

# sysfs's name: perfquery's. Both are those of PortCounters (InfiniBand Architecture Specification 1, 16.1.3.5).
NAMES: Mapping[str, str] = {
    "symbol_error": "SymbolErrorCounter",
    "link_error_recovery": "LinkErrorRecoveryCounter",
    "link_downed": "LinkDownedCounter",
    "port_rcv_errors": "PortRcvErrors",
    "port_rcv_remote_physical_errors": "PortRcvRemotePhysicalErrors",
    "local_link_integrity_errors": "LocalLinkIntegrityErrors",
    "excessive_buffer_overrun_errors": "ExcessiveBufferOverrunErrors",
}
_PEER = (
    'smpquery -C "${device##*/}" -P "${port##*/}" -t 500 -D nodedesc 0,1 && '
    'smpquery -C "${device##*/}" -P "${port##*/}" -t 500 -D nodeinfo 0,1'
)
COUNTERS = f"""\
{PORTS}
counters() {{
  set -- /proc/version /proc/sys/kernel/ostype
  for port in /sys/class/infiniband/*/ports/*; do
    for file in {" ".join(NAMES)}; do set -- "$@" "$port/counters/$file"; done
  done
  said=$(head -n 1 "$@" 2>/dev/null)
  case $said in
    */counters/*) printf '%s\\n' "$said" ;;
    *) asked ;;
  esac
}}
asked() {{
  :
{ASK.format(mark="perfquery", command='perfquery -C "${device##*/}" -P "${port##*/}" -t 500')}
}}
first=$(counters)
printf '@first\\n%s\\n' "$first"
if printf '%s\\n' "$first" | grep -Eq '^([1-9]|({"|".join(NAMES.values())}):\\.*[1-9])'; then
  sleep 1
  printf '@second\\n'
  counters
{ASK.format(mark="peer", command=_PEER)}
fi
"""
_FILE = re.compile(r"^==> /sys/class/infiniband/([^/]+)/ports/(\d+)/counters/(\S+) <==\n(\d+)$", re.MULTILINE)
_SAID = re.compile(r"^(\w+):\.*(\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Count:
    """A counter of a port: its value, and by how much it grew within a second."""

    counter: str
    value: int
    grown: int


def counts(out: str) -> dict[tuple[str, int], tuple[Count, ...]]:
    """The counters of every port, by device and number."""
    before, after = out.partition("\n@second\n")[::2]
    first = _read(before.partition("\n@first\n")[2])
    second = _read(after)
    return {
        port: tuple(Count(name, now, now - values[name]) for name, now in {**values, **second.get(port, {})}.items())
        for port, values in first.items()
    }


def judged_counts(
    check: str, answers: Mapping[str, Answer], names: Sequence[str], allowed: float, fix: str
) -> Iterator[Finding]:
    """A finding for every node: FAIL where a counter grows, WARN where it stands above ``allowed``."""
    cluster, others = fabric(check, answers)
    yield from others
    for name, ports in cluster.items():
        every = counts(answers[name].out)
        linked = [port for port in ports if port.up and (port.device, port.number) in every]
        if not linked and any(port.up for port in ports):
            yield unknown(
                check, name, "no error counters in sysfs, and perfquery does not tell them", fix="run as root"
            )
            continue
        ends = _peers(answers[name].out)
        faults, small = [], []
        for port in linked:
            mine = [count for count in every[port.device, port.number] if count.counter in names and count.value]
            cable = (
                f"{port.name} to {ends[port.device, port.number]}" if (port.device, port.number) in ends else port.name
            )
            faults += [fault for count in mine if (fault := _fault(port, count, allowed, cable, fix))]
            small += [f"{port.name}: {count.counter} {count.value}" for count in mine]
        yield told(check, name, faults, "; ".join(small) or ("no errors" if linked else "no port has a link"))


def _fault(port: Port, count: Count, allowed: float, cable: str, fix: str) -> Fault | None:
    said = f"{port.name}: {count.counter} {count.value}"
    if count.grown > 0:
        return Fault("FAIL", f"{said}, {count.grown} more within a second", "no growth", fix.format(cable=cable))
    if count.value > allowed:
        return Fault("WARN", said, f"at most {allowed:g} since the port was reset", fix.format(cable=cable))
    return None


def _read(text: str) -> dict[tuple[str, int], dict[str, int]]:
    found: dict[tuple[str, int], dict[str, int]] = {}
    for device, port, name, value in _FILE.findall(text):
        found.setdefault((device, int(port)), {})[name] = int(value)
    for (device, number), said in sections(text, "perfquery", words=2):
        values = dict(_SAID.findall(said))
        told_of = {name: int(values[theirs]) for name, theirs in NAMES.items() if theirs in values}
        if told_of and number.isdecimal():
            found[device, int(number)] = told_of
    return found


def _peers(out: str) -> dict[tuple[str, int], str]:
    """What is at the other end of a cable, such as ``SW1 port 7``."""
    found = {}
    for (device, number), said in sections(out, "peer", words=2):
        name = re.search(r"^Node Description:\.*(.+)$", said, re.MULTILINE)
        port = re.search(r"^LocalPort:\.*(\d+)$", said, re.MULTILINE)
        if name and port and number.isdecimal():
            found[device, int(number)] = f"{name[1].strip()} port {port[1]}"
    return found
