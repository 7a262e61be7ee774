"""InfiniBand and RoCE: the checks of single ports and adapters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from provision.checks.kit import (
    Answer,
    Answers,
    Judgement,
    Judgements,
    each_node,
    fail,
    groups,
    majority,
    not_here,
    number,
    odd,
    ok,
    unknown,
    warn,
)
from provision.checks.kit.infiniband import (
    ACTIVE,
    ASK,
    NAMES,
    PHYSICAL,
    PORTS,
    Fault,
    Port,
    each_port,
    error_counters,
    fabric_nodes,
    list_ports,
    sections,
    usual,
)
from provision.checks.kit.infiniband import ports as read_ports

Cluster = Mapping[str, Sequence[Port]]


def _up(port: Port) -> bool:
    return port.up


_DEV_PROBE = (
    PORTS
    + """\
for file in /dev/infiniband/uverbs*; do
  [ -e "$file" ] || continue
  if [ -r "$file" ] && [ -w "$file" ]; then echo "@dev $file open"; else echo "@dev $file closed"; fi
done
echo "@user $(id -un)"
"""
)


@each_node(
    "ib.dev",
    "the training user may open /dev/infiniband/uverbs*",
    probe=_DEV_PROBE,
    why="NCCL finds no usable adapter and goes over TCP without an error, at a tenth of the speed.",
)
def dev(answer: Answer) -> Judgement:
    """Name nodes with RDMA adapters whose devices are missing or closed to the training user.

    Programs reach an adapter through /dev/infiniband/uverbs*, which the module ib_uverbs makes; udev gives it to all or
    to the group rdma (rdma-core, 60-rdma-ndd.rules and the distributions' own).
    """
    every = read_ports(answer.out)
    devices = [given for given, _ in sections(answer.out, "dev")]
    user = " ".join(word for given, _ in sections(answer.out, "user") for word in given) or "the user"
    closed = [file for file, state in devices if state != "open"]
    if every is None:
        return unknown("what the node printed about its ports is not understood")
    if not every:
        return not_here("no InfiniBand")
    if not devices:
        return fail("no /dev/infiniband/uverbs*", expected="a device for every adapter", fix="modprobe ib_uverbs")
    if closed:
        return fail(
            f"{user} may not read and write {', '.join(closed)}",
            expected="devices that the training user may open",
            fix=f"usermod -aG rdma {user} and log in again, or a udev rule with MODE=0666 for uverbs*",
        )
    return ok(f"{len(devices)} devices open for {user}")


# --- links ------------------------------------------------------------------------------------------

_PHYSICAL_FIXES = {
    1: "the port sleeps: ibportstate enable from a node of the fabric, then reseat the cable of {port}",
    2: "nothing answers at the other end: seat or replace the cable of {port}, and see that its switch port is enabled",
    3: "the port is switched off: mlxlink -d {device} -p {number} -a UP, or ibportstate enable; then its cable",
    4: "the two ends do not agree: replace the cable or transceiver of {port}; same speed at both ends",
    6: "the link keeps failing: replace the cable or transceiver of {port}",
    7: "the port is in a test mode: restart its driver on {device}",
}


def _unplugged(port: Port, ports: Sequence[Port], somewhere: set[str]) -> bool:
    """Whether a port without a signal is one that no node has a cable on, while its node has others that are up."""
    return not port.up and port.name not in somewhere and any(each.up for each in ports)


def _with_signal(ports: Sequence[Port], context: set[str]) -> str:
    unused = [port for port in ports if _unplugged(port, ports, context)]
    text = f"{list_ports(port for port in ports if port.up)} LinkUp"
    return text + (f"; {list_ports(unused)} without a cable on every node" if unused else "")


@each_port(
    "ib.phys",
    "InfiniBand cables carry a signal",
    context=lambda cluster: {port.name for ports in cluster.values() for port in ports if port.up},
    fine=_with_signal,
    why="A port without a link is missing from the training: NCCL uses fewer ports, or finds none and goes over TCP.",
)
def phys(port: Port, ports: Sequence[Port], context: set[str]) -> Iterator[Fault]:
    """Name the ports without a signal, but for those that have none on any node.

    ``phys_state`` in sysfs. A port that is down on every node while the node has others that are up is one that is not
    cabled, as the second port of an adapter often is.
    """
    if not port.up and not _unplugged(port, ports, context):
        state = PHYSICAL.get(port.physical, port.values.get("phys_state", "") or "in no known state")
        fix = _PHYSICAL_FIXES.get(port.physical, "reseat the cable of {port}")
        fix = fix.format(port=port.name, device=port.device, number=port.number)
        yield Fault("FAIL", f"{port.name} is {state}", "LinkUp", fix)


_START_MANAGER = (
    "on the node that runs the subnet manager: systemctl restart opensmd with OFED, opensm on distributions"
)


def _active(ports: Sequence[Port]) -> str:
    return f"{list_ports(port for port in ports if port.state == ACTIVE)} Active" if ports else "no port has a link"


@each_port(
    "ib.state",
    "InfiniBand ports with a link are Active",
    select=_up,
    fine=_active,
    why="A port that is not Active carries no data: NCCL does not use it, or the training does not start.",
)
def state(port: Port) -> Iterator[Fault]:
    """Name the ports that wait for a subnet manager; ports without a link are those of ib.phys.

    ``state`` in sysfs; ibstat shows INIT as Initializing. A port leaves INIT only when a subnet manager configures it
    (InfiniBand Architecture Specification 1, 14.3).
    """
    if port.state == ACTIVE:
        return
    if port.state == 2:
        observed = f"{port.name} is Initializing: no subnet manager has configured it"
        yield Fault("FAIL", observed, "Active", f"{_START_MANAGER}; or give the inventory services: opensm: and deploy")
    elif port.state in {3, 5}:
        word = "Armed" if port.state == 3 else "Active and deferred"
        yield Fault("WARN", f"{port.name} is {word}", "Active", "check again in a minute; then as for Initializing")
    else:
        observed = f"{port.name} is {port.values['state'] or 'in no known state'} though its cable has a signal"
        fix = f"ibportstate -C {port.device} -D 0 {port.number} reset, then look again"
        yield Fault("FAIL", observed, "Active", fix)


def _usual_rate(cluster: Cluster) -> Mapping[str, Mapping[str, float]]:
    """For every port by its node and name: the rate of similar ports, or the highest rate where nodes differ."""
    most: dict[str, float] = {}
    for ports in cluster.values():
        for port in ports:
            most[port.name] = max(most.get(port.name, 0), port.gigabits or 0)
    expected = usual(cluster, lambda port: port.gigabits)
    return {name: {port.name: expected(port) or most[port.name] for port in ports} for name, ports in cluster.items()}


@each_port(
    "ib.rate",
    "InfiniBand links run at full rate",
    select=_up,
    context=_usual_rate,
    fine=lambda ports: ", ".join(sorted({port.values.get("rate", "") for port in ports})) or "no port has a link",
    limits={"gbps": 0},  # what every link must reach at least; 0: the rate of most similar ports
    why="An all-reduce is as slow as its slowest link: one cable at half the rate halves the speed of all nodes.",
)
def rate(
    port: Port, name: str, limits: Mapping[str, float], context: Mapping[str, Mapping[str, float]]
) -> Iterator[Fault]:
    """Name links that are slower than most similar ports; where nodes differ, the faster ones are right.

    ``rate`` in sysfs. The two ends of a link settle on less than they can do when the cable, the transceiver or the
    switch port is worse than the adapter.
    """
    wanted = limits["gbps"] or context[name][port.name]
    if port.gigabits is None:
        yield Fault("UNKNOWN", f"{port.name}: rate {port.values.get('rate', '')!r} is not understood", "a rate", "")
    elif port.gigabits < wanted:
        observed = f"{port.name} runs at {port.gigabits:g} Gb/s in place of {wanted:g}"
        fix = f"replace the cable or transceiver of {port.name}; iblinkinfo names its switch port and what it could do"
        yield Fault("FAIL", observed, f"{wanted:g} Gb/s", fix)


@each_port(
    "ib.width",
    "InfiniBand links use all lanes",
    select=_up,
    context=lambda cluster: usual(cluster, lambda port: port.lanes),
    fine=lambda ports: ", ".join(sorted({f"{port.lanes}X" for port in ports})) or "no port has a link",
    why="A link with one lane of four has a quarter of the bandwidth, and every all-reduce waits for it.",
)
def width(port: Port, context: Any) -> Iterator[Fault]:
    """Name links with a single lane, or with fewer than most similar ports.

    ``rate`` in sysfs ends in the width, such as ``(4X NDR)``. 2X is right for the halves of a split cable (HDR100 and
    NDR200 on splitter cables) when all similar ports have it; 1X never is.
    """
    usual_lanes = context(port)
    wanted = max(usual_lanes or 0, 2)
    if port.lanes is None:
        yield Fault("UNKNOWN", f"{port.name}: rate {port.values.get('rate', '')!r} is not understood", "a width", "")
    elif port.lanes < wanted:
        lanes = "1 lane" if port.lanes == 1 else f"{port.lanes} lanes"
        expected = f"{usual_lanes}X" if usual_lanes == wanted else "4X"
        fix = f"clean or replace the cable of {port.name}: lanes of it are dead; a bent pin in the cage does the same"
        yield Fault("FAIL", f"{port.name} uses {lanes} ({port.values['rate']})", expected, fix)


# --- error counters ---------------------------------------------------------------------------------

_CLEAN = "clean, reseat, then replace the cable of {cable}; perfquery -R sets the counters to zero"

CHECKS = (
    error_counters(
        "ib.errors",
        "no errors on InfiniBand links",
        counters=[name for name in NAMES if name not in {"symbol_error", "link_downed"}],
        limit=("errors", 10),
        fix=_CLEAN,
        why="Packets that arrive damaged are sent again, and every all-reduce waits for the slowest link.",
        about="""Counters of PortCounters but for symbol errors (ib.symbols) and lost links (ib.flap). More than 10
since the reset is what ibqueryerrors (infiniband-diags, error_thresholds) reports.""",
    ),
    error_counters(
        "ib.symbols",
        "no symbol errors on InfiniBand links",
        counters=("symbol_error",),
        limit=("errors", 10),
        fix=_CLEAN,
        why="Damaged packets are sent again: the link is slow now and goes down later, in the middle of a training.",
        about="""``symbol_error`` of a port counts damaged symbols on the wire: the sign of a bad cable, a dirty fibre
or a transceiver that gets too warm. More than 10 since the reset is what ibqueryerrors (infiniband-diags,
error_thresholds) reports.""",
    ),
    error_counters(
        "ib.flap",
        "InfiniBand links that stay up",
        counters=("link_downed",),
        limit=("times", 10),
        fix="reseat, then replace the cable of {cable}; the switch's log shows when the link was lost",
        why="A link that comes and goes ends the training with a NCCL timeout each time it is away for long enough.",
        about="""``link_downed`` of a port counts how often its link was lost since the driver was loaded; a restart of
the switch or the driver of the other end costs a few. ibqueryerrors (infiniband-diags, error_thresholds) reports more
than 10.""",
    ),
)


# --- adapters ---------------------------------------------------------------------------------------


@fabric_nodes(
    "ib.board",
    "the same InfiniBand adapters on every node",
    why="NCCL builds its rings from what every node has: another model on one node can halve the speed of all.",
)
def board(cluster: Cluster) -> Judgements:
    """Compare the models of the adapters that have an InfiniBand port.

    ``board_id`` in sysfs (the PSID, such as MT_0000000838), and ``hca_type`` where a driver has none.
    """
    models = {}
    for name, ports in cluster.items():
        devices = {port.device: port.values.get("board_id") or port.values.get("hca_type", "") for port in ports}
        models[name] = tuple(sorted(Counter(devices.values()).items()))
    yield from odd(
        models,
        show=lambda found: ", ".join(f"{number} x {model or 'unknown'}" for model, number in found),
        fix="use nodes of one kind, or name the adapters that all have with NCCL_IB_HCA in the inventory's train: env:",
    )


def _firmware(cluster: Cluster) -> Mapping[str, Mapping[str, str]]:
    """The version of every adapter, by model and by ``NODE DEVICE``."""
    found: dict[str, dict[str, str]] = {}
    for name, ports in cluster.items():
        for port in ports:
            alike = found.setdefault(port.values.get("board_id", ""), {})
            alike[f"{name} {port.device}"] = port.values.get("fw_ver", "")
    return found


@each_port(
    "ib.fw",
    "one firmware on InfiniBand adapters of one model",
    context=_firmware,
    fine=lambda ports: ", ".join(sorted({port.values.get("fw_ver", "") for port in ports})),
    why="Adapters with different firmware negotiate differently: one node is slower, or its link comes and goes.",
)
def fw(port: Port, name: str, context: Mapping[str, Mapping[str, str]]) -> Iterator[Fault]:
    """Name the adapters whose firmware differs from most of their model.

    ``fw_ver`` and ``board_id`` in sysfs; adapters of one ``board_id`` take the same firmware.
    """
    alike = context[port.values.get("board_id", "")]
    version = alike[f"{name} {port.device}"]
    common = majority(alike)
    fix = f"mlxfwmanager (or ofed_info and flint) updates {port.device}; then restart the node"
    if not version:
        yield Fault("UNKNOWN", f"{port.device} does not report its firmware", "fw_ver", "ibv_devinfo")
    elif common is None:
        observed = ", ".join(f"{each} on {len(at)}" for each, at in groups(alike).items())
        yield Fault("WARN", f"{port.device} has {version}; its model has {observed}", "one version", fix)
    elif version != common:
        yield Fault("WARN", f"{port.device} has {version}, most of its model have {common}", common, fix)


_UMAD_PROBE = (
    PORTS
    + """\
set -- /dev/infiniband/umad*
[ -e "$1" ] || shift
echo "@umad $#"
"""
)


@fabric_nodes(
    "ib.umad",
    "/dev/infiniband/umad* for the InfiniBand tools",
    probe=_UMAD_PROBE,
    why="Without it no subnet manager starts on this node, and no tool can show why a link is slow.",
)
def umad(cluster: Cluster, answers: Answers) -> Judgements:
    """Name nodes with InfiniBand and without the module.

    /dev/infiniband/umad* is made by the module ib_umad; sminfo, perfquery and opensm speak to the fabric through it.
    """
    fix = "modprobe ib_umad; echo ib_umad >/etc/modules-load.d/ib_umad.conf keeps it"
    for name in cluster:
        devices = sum(number(count) or 0 for (count,), _ in sections(answers[name].out, "umad", words=1))
        missing = warn("no /dev/infiniband/umad*", expected="the module ib_umad", fix=fix)
        yield name, ok(f"{devices} devices") if devices else missing


_PCI = re.compile(r"^@pci (\d+)$", re.MULTILINE)


@each_node(
    "ib.ports",
    "the same number of InfiniBand ports on every node",
    probe=PORTS + "echo \"@pci $(cat /sys/bus/pci/devices/*/class 2>/dev/null | grep -c '^0x0207')\"\n",
    why="NCCL gives up or falls back to TCP on the node that lacks a port, and every other node waits for it.",
)
def port_count(answers: Answers) -> Judgements:
    """Compare the numbers of ports; an adapter on the PCI bus without a driver is named on its own.

    sysfs: /sys/class/infiniband (Documentation/ABI/stable/sysfs-class-infiniband). PCI class 0x0207 is an InfiniBand
    controller (PCI Code and ID Assignment Specification); one without a driver has no folder in /sys/class/infiniband.
    """
    counts: dict[str, int] = {}
    for name, answer in answers.items():
        every = read_ports(answer.out)
        adapters = _PCI.search(answer.out)
        if every is None or adapters is None:
            yield name, unknown("what the node printed about its ports is not understood")
        elif not every and int(adapters[1]):
            observed = f"{adapters[1]} InfiniBand adapter(s) on the PCI bus and none in /sys/class/infiniband"
            fix = "modprobe mlx5_ib; dmesg | grep mlx5 shows why it does not start"
            yield name, fail(observed, expected="a driver for every adapter", fix=fix)
        else:
            counts[name] = sum(port.infiniband for port in every)
    if not any(counts.values()):
        yield from ((name, not_here("no InfiniBand")) for name in counts)
        return
    yield from odd(
        counts,
        verdict="FAIL",
        show=lambda count: f"{count} InfiniBand port{'' if count == 1 else 's'}" if count else "no InfiniBand port",
        fix="lspci | grep -i -e infiniband -e mellanox shows whether the adapter is there; dmesg | grep mlx5 why not",
    )


# --- the subnet manager -----------------------------------------------------------------------------

_RESTART = "restart the subnet manager; with two of them, see ib.masters"


def _addresses(cluster: Cluster) -> tuple[Any, Counter[tuple[int | None, int | None]], Mapping[str, set[int]]]:
    """The subnet manager that most ports know, how many ports have a LID, and the managers that are known at a port."""
    every = [port for ports in cluster.values() for port in ports]
    known: dict[str, set[int]] = {}
    for port in every:
        known.setdefault(port.name, set()).update(filter(None, [port.number_of("sm_lid")]))
    taken = Counter((port.number_of("sm_lid"), port.number_of("lid")) for port in every)
    return usual(cluster, lambda port: port.number_of("sm_lid") or None, by_model=False), taken, known


def _lids(ports: Sequence[Port]) -> str:
    found = ", ".join(f"{port.name} LID {port.number_of('lid')}, SM {port.number_of('sm_lid')}" for port in ports)
    return found or "no port is Active"


@each_port(
    "ib.lid",
    "a unique LID for every Active port, and one subnet manager for all",
    select=lambda port: port.state == ACTIVE,
    context=_addresses,
    fine=_lids,
    why="Ports without an address, or of two subnets, do not reach each other: the first all-reduce hangs.",
)
def lid(port: Port, context: Any) -> Iterator[Fault]:
    """Name ports without a LID, with another's LID, and with another subnet manager than similar ports.

    ``lid`` and ``sm_lid`` in sysfs, which every user may read. A LID is a port's address in its subnet; 0 is none.
    """
    usual_manager, taken, known = context
    lid, manager, common = port.number_of("lid"), port.number_of("sm_lid"), usual_manager(port)
    if lid is None or manager is None:
        yield Fault("UNKNOWN", f"{port.name}: its LID is not understood", "a LID", "")
    elif not lid:
        yield Fault("FAIL", f"{port.name} is Active and has no LID", "a LID", _RESTART)
    elif not manager:
        yield Fault("FAIL", f"{port.name} is Active and knows no subnet manager (sm_lid 0)", "sm_lid > 0", _RESTART)
    elif taken[manager, lid] > 1:
        observed = f"{port.name} has LID {lid}, and another port of the same subnet has it too"
        yield Fault("FAIL", observed, "a unique LID", _RESTART)
    elif common is None:
        managers = " and ".join(map(str, sorted(known[port.name])))
        observed = f"{port.name}: the nodes know subnet managers at LIDs {managers}"
        yield Fault("FAIL", observed, "one subnet manager for all nodes", _RESTART)
    elif manager != common:
        observed = f"{port.name} knows the subnet manager at LID {manager}, other ports like it know LID {common}"
        yield Fault("FAIL", observed, f"sm_lid {common}", f"{_RESTART}; is it cabled to another fabric?")


_SMINFO = re.compile(r"sm lid (\d+) sm guid (0x[0-9a-f]+), activity count \d+ priority \d+ state \d+ SMINFO_(\w+)")


def _sminfo(answer: Answer) -> dict[tuple[str, ...], str]:
    return dict(sections(answer.out, "sminfo", words=2))


def _masters(answer: Answer) -> str:
    masters = {found[2] for text in _sminfo(answer).values() if (found := _SMINFO.search(text))}
    return f"master {', '.join(sorted(masters))}" if masters else "no port has a link"


@each_port(
    "ib.sm",
    "the subnet manager answers",
    select=_up,
    fine=_masters,
    root=True,
    # Half a second for an answer and umad's three attempts: at most two seconds for a port.
    probe=PORTS + ASK.format(mark="sminfo", command='sminfo -C "${device##*/}" -P "${port##*/}" -t 500'),
    timeout=30,
    why=(
        "Without a subnet manager nothing new joins the fabric: a node that restarts or a cable that blinks stays "
        "Initializing, and the running job hangs."
    ),
)
def manager(port: Port, answer: Answer) -> Iterator[Fault]:
    """Name the ports whose subnet manager is unknown, silent or no master.

    ``sminfo`` (infiniband-diags) asks the subnet manager that the port knows. A manager that died leaves the ports
    Active; only asking shows it. sminfo needs /dev/infiniband/umad*, which is root's; the values in sysfs are judged
    without.
    """
    address = port.number_of("sm_lid")
    text = _sminfo(answer).get((port.device, str(port.number)))
    if port.state != ACTIVE or not address:
        yield Fault("FAIL", f"{port.name} waits for a subnet manager", "an answer of sminfo", _START_MANAGER)
    elif text is None or "not installed" in text:
        fix = "install infiniband-diags with services: os_packages:"
        yield Fault("UNKNOWN", "sminfo is not installed", "an answer of sminfo", fix)
    elif found := _SMINFO.search(text):
        if found[3] != "MASTER":
            observed = f"{port.name}: the subnet manager at LID {found[1]} is {found[3]} and not MASTER"
            yield Fault("FAIL", observed, "SMINFO_MASTER", _START_MANAGER)
    elif not answer.root or "UMAD" in text:
        why = "cannot open /dev/infiniband/umad*" if answer.root else "needs root"
        fix = "modprobe ib_umad" if answer.root else "run as root"
        yield Fault("UNKNOWN", f"sminfo {why}", "an answer of sminfo", fix)
    else:
        observed = f"{port.name} is Active, but the subnet manager at LID {address} does not answer"
        yield Fault("FAIL", observed, "an answer of sminfo", _START_MANAGER)
