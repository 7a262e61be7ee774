"""What the checks of InfiniBand share: ports in sysfs, and findings about ports.

Files and words are those of the kernel's Documentation/ABI/stable/sysfs-class-infiniband: ``state`` is ``4: ACTIVE``,
``phys_state`` is ``5: LinkUp``, ``rate`` is ``400 Gb/sec (4X NDR)``. A port without ``link_layer`` (kernels before
2.6.37, the ibsim simulator) is an InfiniBand port, as for libibumad. A probe reads with ``cat`` and ``head`` and never
with sh's own ``<``, so that what serves these programs alone, such as the simulator's library, serves the probe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from provision.checks import Answers, Check, Judgement, Judgements, Plan, call, not_here, ok, unknown
from provision.checks.kit.declare import majority
from provision.model import Verdict

T = TypeVar("T", bound=Hashable)

# One `head` for the whole node; with several files it prints each one's name above its line (POSIX). The two files
# that every node has keep it from waiting for an input, and from a single file without a name.
PORTS = """\
set -- /proc/version /proc/sys/kernel/ostype
for port in /sys/class/infiniband/*/ports/*; do
  device=${port%/ports/*}
  for file in state phys_state rate link_layer lid sm_lid; do set -- "$@" "$port/$file"; done
  set -- "$@" "$device/fw_ver" "$device/board_id" "$device/hca_type"
done
head -n 1 "$@" 2>/dev/null
echo @end
"""
# What the tools of infiniband-diags say about every Active InfiniBand port, after a line `@MARK DEVICE PORT`.
ASK = """\
for port in /sys/class/infiniband/*/ports/*; do
  device=${{port%/ports/*}}
  case $(cat "$port/state" "$port/link_layer" 2>/dev/null) in *Ethernet*) continue ;; 4:*) ;; *) continue ;; esac
  echo "@{mark} ${{device##*/}} ${{port##*/}}"
  if PATH=$PATH:/usr/sbin:/sbin; command -v sminfo >/dev/null 2>&1; then
    {{ {command}; }} 2>&1 || echo "exit code $?"
  else
    echo 'sminfo is not installed'
  fi
done
"""
_FILE = re.compile(r"^==> /sys/class/infiniband/([^/]+)/(?:ports/(\d+)/)?(\S+) <==\n([^\n]*)$", re.MULTILINE)
_RATE = re.compile(r"(?P<rate>[\d.]+) Gb/sec \((?P<width>\d+)X(?: (?P<kind>\w+))?\)")
_RANK: Mapping[Verdict, int] = {"N/A": 0, "OK": 0, "UNKNOWN": 1, "WARN": 2, "FAIL": 3}

LINK_UP = 5  # of phys_state
ACTIVE = 4  # of state
PHYSICAL: Mapping[int, str] = {
    1: "Sleep",
    2: "Polling",
    3: "Disabled",
    4: "PortConfigurationTraining",
    5: "LinkUp",
    6: "LinkErrorRecovery",
    7: "Phy Test",
}


@dataclass(frozen=True)
class Port:
    """A port of an adapter that speaks RDMA.

    Attributes:
        device: such as ``mlx5_0``.
        number: on the device, from 1.
        values: of its files by their names, and ``fw_ver``, ``board_id`` and ``hca_type`` of its device.
    """

    device: str
    number: int
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As people say it."""
        return f"{self.device} port {self.number}"

    @property
    def infiniband(self) -> bool:
        """Whether it is a port of an InfiniBand fabric; else it is Ethernet (RoCE) or something of a cloud."""
        return self.values.get("link_layer", "InfiniBand") in {"InfiniBand", "IB"}

    @property
    def state(self) -> int:
        """1 DOWN, 2 INIT, 3 ARMED, 4 ACTIVE, 5 ACTIVE_DEFER; 0 where it is not known."""
        return _leading(self.values.get("state", ""))

    @property
    def physical(self) -> int:
        """The state of the cable, a key of ``PHYSICAL``; 0 where it is not known."""
        return _leading(self.values.get("phys_state", ""))

    @property
    def up(self) -> bool:
        """Whether its cable carries a signal."""
        return self.physical == LINK_UP

    @property
    def gigabits(self) -> float | None:
        """Its present rate in Gb/s."""
        found = _RATE.match(self.values.get("rate", ""))
        return float(found["rate"]) if found else None

    @property
    def lanes(self) -> int | None:
        """How many lanes of its cable are in use: the 4 of ``4X``."""
        found = _RATE.match(self.values.get("rate", ""))
        return int(found["width"]) if found else None

    def number_of(self, file: str) -> int | None:
        """What a file holds as a number, ``0x1f`` or ``31``."""
        try:
            return int(self.values.get(file, ""), 0)
        except ValueError:
            return None


@dataclass(frozen=True)
class Fault:
    """What is wrong with one port."""

    verdict: Verdict
    observed: str
    expected: str
    fix: str


def ports(out: str) -> tuple[Port, ...] | None:
    """The ports that ``PORTS`` printed, by device and number; None where its output is not whole."""
    if "@end" not in out.splitlines():
        return None
    devices: dict[str, dict[str, str]] = {}
    found: dict[tuple[str, int], dict[str, str]] = {}
    for device, number, file, text in _FILE.findall(out):
        values = found.setdefault((device, int(number)), {}) if number else devices.setdefault(device, {})
        values[file] = text.strip()
    return tuple(
        Port(device, number, {**devices.get(device, {}), **values})
        for (device, number), values in sorted(found.items(), key=lambda item: _natural(item[0]))
        if "state" in values
    )


def fabric(answers: Answers) -> tuple[dict[str, tuple[Port, ...]], list[tuple[str, Judgement]]]:
    """The InfiniBand ports of the nodes that have any, and the findings of all others."""
    found: dict[str, tuple[Port, ...]] = {}
    others = []
    for name, answer in answers.items():
        every = ports(answer.out)
        if every is None:
            others.append((name, unknown("what the node printed about its ports is not understood")))
        elif mine := tuple(port for port in every if port.infiniband):
            found[name] = mine
        else:
            others.append((name, not_here("no InfiniBand")))
    return found, others


def usual(
    cluster: Mapping[str, Sequence[Port]], of: Callable[[Port], T | None], *, by_model: bool = True
) -> Callable[[Port], T | None]:
    """What most nodes have at the port of the same name, else most ports of the same model, else None.

    Args:
        cluster: the ports of every node.
        of: the value of a port; a port without one has no say.
        by_model: False: only ports of the same name are alike, since each may belong to another fabric.
    """
    values = [(name, port, value) for name, each in cluster.items() for port in each if (value := of(port)) is not None]

    def of_port(port: Port) -> T | None:
        same = {name: value for name, other, value in values if other.name == port.name}
        found = majority(same)
        if not by_model or (found is not None and len(same) > 1):
            return found
        board = port.values.get("board_id", "")
        alike = {f"{name} {at.name}": value for name, at, value in values if at.values.get("board_id", "") == board}
        return majority(alike)

    return of_port


def worst(faults: Iterable[Fault], fine: str) -> Judgement:
    """One finding for a node: its faults with the worst verdict, or OK and ``fine``."""
    found = sorted(faults, key=lambda fault: -_RANK[fault.verdict])
    if not found:
        return ok(fine)
    return Judgement(
        found[0].verdict,
        "; ".join(dict.fromkeys(fault.observed for fault in found)),
        "; ".join(dict.fromkeys(fault.expected for fault in found)),
        "; ".join(dict.fromkeys(fault.fix for fault in found)),
    )


def sections(out: str, mark: str, *, words: int | None = None) -> Iterator[tuple[tuple[str, ...], str]]:
    """The parts of a probe's output that begin with a line ``@mark WORD...``: the words, and what follows.

    Args:
        out: the output.
        mark: the first word.
        words: how many must follow it; parts with another number are skipped.
    """
    for part in re.split(r"^@", out, flags=re.MULTILINE)[1:]:
        head, _, text = part.partition("\n")
        name, *given = head.split() or [""]
        if name == mark and words in (None, len(given)):
            yield tuple(given), text


def list_ports(items: Iterable[Port]) -> str:
    """Names of ports in one line."""
    return ", ".join(port.name for port in items)


def _leading(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0


def _natural(port: tuple[str, int]) -> tuple[list[tuple[int, str]], int]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", port[0])], port[1]


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
  output=$(head -n 1 "$@" 2>/dev/null)
  case $output in
    */counters/*) printf '%s\\n' "$output" ;;
    *) ask_hardware ;;
  esac
}}
ask_hardware() {{
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
_COUNTER_FILE = re.compile(r"^==> /sys/class/infiniband/([^/]+)/ports/(\d+)/counters/(\S+) <==\n(\d+)$", re.MULTILINE)
_COUNTER_LINE = re.compile(r"^(\w+):\.*(\d+)$", re.MULTILINE)


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


def judged_counts(answers: Answers, names: Sequence[str], allowed: float, fix: str) -> Judgements:
    """A finding for every node: FAIL where a counter grows, WARN where it stands above ``allowed``."""
    cluster, others = fabric(answers)
    yield from others
    for name, ports in cluster.items():
        every = counts(answers[name].out)
        linked = [port for port in ports if port.up and (port.device, port.number) in every]
        if not linked and any(port.up for port in ports):
            yield name, unknown("no error counters in sysfs, and perfquery does not report them", fix="run as root")
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
        yield name, worst(faults, "; ".join(small) or ("no errors" if linked else "no port has a link"))


def _fault(port: Port, count: Count, allowed: float, cable: str, fix: str) -> Fault | None:
    observed = f"{port.name}: {count.counter} {count.value}"
    if count.grown > 0:
        return Fault("FAIL", f"{observed}, {count.grown} more within a second", "no growth", fix.format(cable=cable))
    if count.value > allowed:
        return Fault("WARN", observed, f"at most {allowed:g} since the port was reset", fix.format(cable=cable))
    return None


def _read(text: str) -> dict[tuple[str, int], dict[str, int]]:
    found: dict[tuple[str, int], dict[str, int]] = {}
    for device, port, name, value in _COUNTER_FILE.findall(text):
        found.setdefault((device, int(port)), {})[name] = int(value)
    for (device, number), body in sections(text, "perfquery", words=2):
        values = dict(_COUNTER_LINE.findall(body))
        values_by_name = {name: int(values[theirs]) for name, theirs in NAMES.items() if theirs in values}
        if values_by_name and number.isdecimal():
            found[device, int(number)] = values_by_name
    return found


def _peers(out: str) -> dict[tuple[str, int], str]:
    """What is at the other end of a cable, such as ``SW1 port 7``."""
    found = {}
    for (device, number), body in sections(out, "peer", words=2):
        name = re.search(r"^Node Description:\.*(.+)$", body, re.MULTILINE)
        port = re.search(r"^LocalPort:\.*(\d+)$", body, re.MULTILINE)
        if name and port and number.isdecimal():
            found[device, int(number)] = f"{name[1].strip()} port {port[1]}"
    return found


def each_port(
    check: str,
    title: str,
    *,
    fine: Callable[..., str],
    select: Callable[[Port], bool] = lambda _: True,
    context: Callable[..., Any] | None = None,
    probe: str = PORTS,
    **options: Any,
) -> Callable[[Callable[..., Iterable[Fault]]], Check]:
    """A check whose function yields the faults of one InfiniBand port.

    The functions name the arguments they need. The decorated function can name ``port``, ``ports`` (those of its
    node), ``name`` (of its node), ``answer``, ``limits`` and ``context``; ``fine`` all of these but ``port``.

    Args:
        check: the id.
        title: what is true of a healthy node.
        fine: the text of a node without faults.
        select: the ports to judge.
        context: computed once, from ``cluster`` (the selected ports of every node) and ``answers``.
        probe: prints at least what ``PORTS`` prints.
        options: further fields of ``Check``. The docstring's text below its first line is ``about``.
    """

    def declare(faults: Callable[..., Iterable[Fault]]) -> Check:
        def judge(plan: Plan, answers: Answers) -> Judgements:
            every, others = fabric(answers)
            yield from others
            cluster = {name: [port for port in ports if select(port)] for name, ports in every.items()}
            shared = call(context, cluster=cluster, answers=answers) if context else None
            for name, ports in cluster.items():
                values = {"name": name, "ports": ports, "answer": answers[name], "limits": plan.limits}
                found = (each for port in ports for each in call(faults, port=port, context=shared, **values))
                yield name, worst(found, call(fine, context=shared, **values))

        return Check(check, title, judge=judge, probe=probe, about=_about(faults), **options)

    return declare


def fabric_nodes(check: str, title: str, *, probe: str = PORTS, **options: Any) -> Callable[..., Check]:
    """A check whose function judges all nodes with InfiniBand ports.

    The function names the arguments it needs: ``cluster`` (the ports of every such node), ``answers``, ``limits``.
    """

    def declare(function: Callable[..., Judgements]) -> Check:
        def judge(plan: Plan, answers: Answers) -> Judgements:
            cluster, others = fabric(answers)
            yield from others
            yield from call(function, cluster=cluster, answers=answers, limits=plan.limits)

        return Check(check, title, judge=judge, probe=probe, about=_about(function), **options)

    return declare


def error_counters(check: str, title: str, *, counters: Sequence[str], limit: tuple[str, float], fix: str,
                   why: str, about: str) -> Check:  # fmt: skip
    """A check that error counters of ports neither grow nor exceed a limit.

    Args:
        check: the id.
        title: what is true of a healthy node.
        counters: keys of ``NAMES``.
        limit: the name and value of the threshold.
        fix: what to do, with ``{cable}`` for the port and the other end of its cable.
        why: what happens otherwise.
        about: the sources.
    """

    def judge(plan: Plan, answers: Answers) -> Judgements:
        yield from judged_counts(answers, counters, plan.limits[limit[0]], fix)

    return Check(check, title, why, judge, COUNTERS, root=True, timeout=30, limits=dict((limit,)), about=about)


def _about(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").partition("\n")[2]


# What decides about GPUDirect RDMA: the ports, the peer memory modules, the driver and the kernel.
GPUDIRECT = (
    PORTS
    + """\
for module in nvidia_peermem nv_peer_mem; do [ ! -d "/sys/module/$module" ] || echo "@module $module"; done
for file in /sys/kernel/mm/memory_peers/*; do [ ! -d "$file" ] || echo "@peer ${file##*/}"; done
echo "@driver $(head -n 1 /proc/driver/nvidia/version 2>/dev/null)"
echo "@kernel $(uname -r)"
"""
)


def driver(out: str) -> str:
    """The first line of /proc/driver/nvidia/version, "" without a driver."""
    return next((" ".join(words) for words, _ in sections(out, "driver")), "")


def peer_modules(out: str) -> tuple[str, ...]:
    """The peer memory modules that are loaded."""
    return tuple(module for (module,), _ in sections(out, "module", words=1))


def dma_buf(out: str) -> bool:
    """Whether driver and kernel lend the GPU's memory as dma-buf."""
    release = next((words[0] for words, _ in sections(out, "kernel") if words), "")
    found = re.match(r"(\d+)\.(\d+)", release)
    kernel = (int(found[1]), int(found[2])) if found else (0, 0)
    return "Open Kernel Module" in driver(out) and kernel >= (5, 12)
