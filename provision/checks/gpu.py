"""GPUs: the simple checks."""

import re
from collections import Counter
from collections.abc import Mapping

from provision.checks.kit import (
    Answer,
    Answers,
    Judgement,
    Judgements,
    Plan,
    close,
    each_node,
    fail,
    not_here,
    odd,
    ok,
    unknown,
    unread,
    warn,
)
from provision.checks.kit.gpu import (
    GPUS,
    LOG,
    PCI,
    SMI,
    Gpu,
    OwnFault,
    alike,
    devices,
    each,
    each_gpu_node,
    equal_gpus,
    gpus,
    rows,
    unanswered,
)

_AER_PROBE = f"""\
{PCI}\
for file in /sys/bus/pci/drivers/nvidia/0*/aer_dev_*; do
    [ -r "$file" ] || continue
    while read -r name count; do
        case $name in TOTAL_ERR_*) echo "aer $file ${{name#TOTAL_ERR_}} $count" ;; esac
    done <"$file"
done
echo looked
"""
_COUNT = re.compile(r"^aer \S*/(\S+)/aer_dev_\S+ (COR|FATAL|NONFATAL) (\d+)$", re.MULTILINE)
_FIX = "reseat the GPU and its riser; then look at the server vendor's firmware; dmesg | grep AER shows the port"


@each_node(
    "gpu.aer",
    "the PCIe links of the GPUs count no errors",
    probe=_AER_PROBE,
    limits={"corrected": 1000},  # since boot
    why="A link that sends much twice is slow; one that loses data ends the run with Xid 79 sooner or later.",
)
def aer(answer: Answer, limits: Mapping[str, float]) -> Judgement:
    """FAIL for fatal ones, WARN for other uncorrected ones and for many corrected ones.

    Linux counts them in sysfs (Documentation/ABI/testing/sysfs-bus-pci-devices-aer): what was corrected is sent again,
    the others lose data. Virtual machines often have no such counters.
    """
    counts = [(address, kind, int(count)) for address, kind, count in _COUNT.findall(answer.out)]
    if "looked" not in answer.lines:
        return unread(answer)
    if not counts:
        gpus = any(device.is_gpu for device in devices(answer))
        return ok("PCIe errors are not counted here") if gpus else not_here("no GPU")
    allowed = {"COR": limits["corrected"], "FATAL": 0, "NONFATAL": 0}
    bad = [each for each in counts if each[2] > allowed[each[1]]]
    words = {"COR": "corrected", "FATAL": "fatal", "NONFATAL": "uncorrected"}
    observed = "; ".join(f"{address}: {count} {words[kind]} errors" for address, kind, count in bad)
    if not bad:
        return ok(f"at most {max(count for *_, count in counts)} corrected errors")
    if any(kind == "FATAL" for _, kind, _ in bad):
        return fail(observed, expected="none", fix=_FIX)
    return warn(observed, expected=f"at most {allowed['COR']:.0f} corrected ones since boot", fix=_FIX)


# A line for each process and GPU, with the login name of its owner before it.
_BUSY_PROBE = """\
out=$(nvidia-smi --query-compute-apps=pid,used_memory,process_name --format=csv,noheader)
rc=$?
printf '%s\\n' "$out" | while IFS= read -r line; do
    pid=${line%%,*}
    case $pid in '' | *[!0-9]*) printf '%s\\n' "$line" ;; *)
        owner=$(stat -c %U "/proc/$pid" 2>/dev/null) || owner=
        printf 'process %s, %s\\n' "${owner:-unknown}" "$line" ;;
    esac
done
echo asked
exit $rc
"""


@each_node(
    "gpu.busy",
    "no process uses a GPU",
    probe=_BUSY_PROBE,
    tool=SMI,
    timeout=20.0,
    why="Two programs on one GPU share its memory and time: the run is slow, or ends with 'out of memory'.",
)
def busy(node: str, answer: Answer) -> Judgement:
    """FAIL, and name the processes with their owners."""
    found = re.findall(r"^process (.*?), (\d+), (.*?), (.*)$", answer.out, flags=re.MULTILINE)
    if "asked" not in answer.lines or answer.rc:
        return unanswered(node, answer)
    if found:
        owners = {pid: f"{pid} {name.rsplit('/', 1)[-1]} of {owner}" for owner, pid, _, name in found}
        listed = [*list(owners.values())[:8], *(["..."] if len(owners) > 8 else [])]
        fix = f"wait for it or ask its owner; ps -fp {','.join(list(owners)[:8])} on {node} shows what it is"
        return fail(f"in use by {', '.join(listed)}", expected="no process", fix=fix)
    return ok("no process")


@each_gpu_node(
    "gpu.computemode",
    "compute mode is Default",
    reads=("compute_mode",),
    why=(
        "In an exclusive mode a second context ends in 'all CUDA-capable devices are busy', in "
        "Prohibited the first one."
    ),
)
def computemode(row: tuple[Gpu, ...]) -> Judgement:
    """FAIL for every other mode."""
    other = {gpu.index: gpu["compute_mode"] for gpu in row if gpu.has("compute_mode")}
    other = {index: mode for index, mode in other.items() if mode != "Default"}
    if other:
        return fail(each(other), expected="Default", fix=f"nvidia-smi -i {','.join(other)} -c 0 (as root)")
    return ok("Default")


_FIELD = "ecc.errors.uncorrected.volatile.total"


@each_gpu_node(
    "gpu.ecc",
    "no uncorrected memory error since the driver was loaded",
    reads=(_FIELD,),
    why="An uncorrected error ends the process that meets it; where there was one, the next is likely.",
)
def ecc(row: tuple[Gpu, ...]) -> Judgement:
    """FAIL for every one: the memory is repaired when the GPU is reset."""
    errors = {gpu.index: count for gpu in row if (count := gpu.number(_FIELD)) is not None}
    bad = {index: f"{count:.0f} uncorrected errors" for index, count in errors.items() if count}
    if bad:
        fix = "reset the GPU (nvidia-smi --gpu-reset -i N) or reboot: bad rows are replaced; else replace the GPU"
        return fail(each(bad), expected="0 uncorrected errors", fix=fix)
    return ok("no uncorrected error" if errors else "these GPUs have no ECC")


_FABRIC_FIELDS = ("index", "fabric.state", "fabric.status")


def _missing(gpu: Gpu) -> str:
    state, status = gpu["fabric.state"], gpu["fabric.status"]
    if not gpu.has("fabric.state") or (state, status) == ("Completed", "Success"):
        return ""
    return f"{state}, {status}" if gpu.has("fabric.status") else state


@each_gpu_node(
    "gpu.fabric",
    "every GPU behind NVSwitch has joined the fabric",
    reads=_FABRIC_FIELDS[1:],
    query_fields=_FABRIC_FIELDS,
    why="Until the fabric manager has set up NVLink, CUDA does not start: error 802, 'system not yet initialized'.",
)
def fabric(row: tuple[Gpu, ...]) -> Judgement:
    """FAIL for a GPU that has not joined, or not with success.

    States and statuses: nvidia-smi's manual page, "Fabric"; seen on H200 behind NVSwitch with driver 580.159.04.
    Drivers before 530 do not have the fields, GPUs without NVSwitch say N/A.
    """
    bad = {gpu.index: observed for gpu in row if (observed := _missing(gpu))}
    if bad:
        fix = "systemctl restart nvidia-fabricmanager, and read /var/log/fabricmanager.log; see the check gpu.fm"
        return fail(each(bad), expected="Completed, Success", fix=fix)
    if any(gpu.has("fabric.state") for gpu in row):
        return ok("Completed, Success")
    return not_here("no NVLink fabric")


@each_gpu_node(
    "gpu.mig",
    "no GPU is divided into MIG instances",
    reads=("mig.mode.current",),
    why="A process sees one MIG instance only, and NCCL does not work between instances: ranks find no GPU.",
)
def mig(row: tuple[Gpu, ...]) -> Judgement:
    """FAIL where MIG is on; GPUs that cannot be divided are fine."""
    on = {gpu.index: "MIG is on" for gpu in row if gpu["mig.mode.current"] == "Enabled"}
    if on:
        fix = f"nvidia-smi -i {','.join(on)} -mig 0 (as root, with nothing running; it may ask for a reset)"
        return fail(each(on), expected="MIG is off", fix=fix)
    return ok("MIG is off")


_LIMITED = re.compile(r"pci\S* ([0-9a-f]{4}:\S+): ([\d.]+) Gb/s available PCIe bandwidth, limited by (.*?) at (\S+) \(")


@each_node(
    "gpu.pcielog",
    "no slot limits a GPU's PCIe bandwidth",
    probe=LOG,
    root=True,
    why="Data, checkpoints and network traffic of that GPU go at the slot's speed, and all ranks wait for it.",
)
def pcielog(answer: Answer) -> Judgement:
    """WARN for every GPU that is limited; UNKNOWN where the kernel's log may not be read.

    At boot Linux says "..., limited by 8.0 GT/s PCIe x8 link at ..." (drivers/pci/pci.c, __pcie_print_link_status).
    """
    mine = {device.address for device in devices(answer) if device.is_gpu}
    found = {row[0]: f"limited by {row[2]} at {row[3]}" for row in _LIMITED.findall(answer.out) if row[0] in mine}
    if "looked" not in answer.lines:
        return unread(answer)
    if found:
        observed = "; ".join(f"{address} is {text}" for address, text in found.items())
        fix = "reseat GPU and riser; look at the slot's lanes and speed in the BIOS (lspci -vv, LnkCap and LnkSta)"
        return warn(observed, expected="the GPU's own speed", fix=fix)
    if "log readable" in answer.lines or not mine:
        return ok("no GPU is limited") if mine else not_here("no GPU")
    fix = "check with become, or let the user read the journal: usermod -aG systemd-journal USER"
    return unknown("the kernel's log may not be read", fix=fix)


@each_gpu_node(
    "gpu.persist",
    "persistence mode is on",
    reads=("persistence_mode",),
    why=(
        "Without it the driver shuts GPUs down between programs: every start takes seconds longer, and "
        "settings are lost."
    ),
)
def persist(row: tuple[Gpu, ...]) -> Judgement:
    """WARN where it is off."""
    off = {gpu.index: gpu["persistence_mode"] for gpu in row if gpu["persistence_mode"] == "Disabled"}
    if off:
        fix = "systemctl enable --now nvidia-persistenced (or, until the next boot, nvidia-smi -pm 1)"
        return warn(each(off), expected="Enabled", fix=fix)
    return ok(each({gpu.index: gpu["persistence_mode"] for gpu in row}))


_RECOVERY_FIELDS = ("index", "gpu_recovery_action")


@each_gpu_node(
    "gpu.recovery",
    "no GPU waits for a reset",
    reads=(_RECOVERY_FIELDS[1],),
    query_fields=_RECOVERY_FIELDS,
    why="The driver has met an error that only a reset ends: programs fail on this GPU, at once or soon.",
)
def recovery(row: tuple[Gpu, ...]) -> Judgement:
    """FAIL for every action but None.

    ``gpu_recovery_action`` is what the driver asks for: None, Reset, Reboot, Drain P2P, Drain and Reset (nvidia-smi's
    manual page); drivers before 565 do not have it.
    """
    actions = {
        gpu.index: gpu[_RECOVERY_FIELDS[1]]
        for gpu in row
        if gpu.has(_RECOVERY_FIELDS[1]) and gpu[_RECOVERY_FIELDS[1]] != "None"
    }
    if actions:
        fix = "stop the processes on it, then nvidia-smi --gpu-reset -i N, or reboot; dmesg | grep Xid shows why"
        return fail(each(actions), expected="None", fix=fix)
    return ok("None")


_SRAM_FIELD = "ecc.errors.uncorrected.aggregate.sram"


@each_gpu_node(
    "gpu.sram",
    "no uncorrected error of on-chip memory in the GPU's life",
    reads=(_SRAM_FIELD,),
    limits={"errors": 4},
    why="On-chip memory cannot be repaired: a GPU with such errors ends one run after the other.",
)
def sram(row: tuple[Gpu, ...], limits: Mapping[str, float]) -> Judgement:
    """WARN from the first on, FAIL above the limit.

    SRAM has no spare rows. Source of the threshold: NVIDIA, "GPU Memory Error Management", RMA policy: more than four
    in one bank of memory with parity. The counter is the whole GPU's, so the vendor's field diagnostic decides.
    """
    errors = {gpu.index: count for gpu in row if (count := gpu.number(_SRAM_FIELD)) is not None}
    bad = {index: f"{count:.0f} uncorrected SRAM errors" for index, count in errors.items() if count}
    if not bad:
        return ok("no uncorrected SRAM error" if errors else "these GPUs do not count SRAM errors")
    if max(errors.values()) > limits["errors"]:
        fix = "have the GPU tested and replaced; nvidia-bug-report.sh makes the report that the vendor asks for"
        return fail(each(bad), expected=f"at most {limits['errors']:.0f}", fix=fix)
    fix = "run dcgmi diag -r 3 at the next maintenance, and watch whether the number grows"
    return warn(each(bad), expected="none", fix=fix)


_SXID = re.compile(r"SXid \(PCI:([0-9a-fA-F:.]+)\): (\d+), (Non-fatal|Fatal)?")
_MANY = 6  # that are named


@each_node(
    "gpu.sxid",
    "no NVSwitch error (SXid) since the node was started",
    probe=LOG,
    root=True,
    why="After a fatal error of an NVSwitch all its GPUs must be reset: until then NCCL fails or hangs between them.",
)
def sxid(answer: Answer) -> Judgement:
    """FAIL for a fatal one, WARN for others; UNKNOWN where the kernel's log may not be read.

    Format: NVIDIA, "Fabric Manager for NVIDIA NVSwitch Systems", appendix on SXids, and the driver's source.
    """
    found = Counter(_SXID.findall(answer.out))
    observed = "; ".join(
        f"SXid {number} {word or 'of unknown weight'} {count} x on {switch}"
        for (switch, number, word), count in sorted(found.items(), key=lambda item: item[0][2] != "Fatal")[:_MANY]
    )
    if "looked" not in answer.lines:
        return unread(answer)
    if any(word == "Fatal" for _, _, word in found):
        fix = "reboot the node, or stop all GPU programs, reset all GPUs and restart nvidia-fabricmanager"
        return fail(observed, expected="no SXid", fix=fix)
    if found:
        fix = "read /var/log/fabricmanager.log, and watch whether they come again"
        return warn(observed, expected="no SXid", fix=fix)
    if not any(device.is_switch for device in devices(answer)):
        return not_here("no NVSwitch")
    if "log readable" in answer.lines:
        return ok("no SXid in the kernel's log")
    fix = "check with become, or let the user read the journal: usermod -aG systemd-journal USER"
    return unknown("the kernel's log may not be read", fix=fix)


_STACKED = ("6.0", "7.0", "8.0", "9.0", "10.0", "10.3")  # P100, V100, A100, H100 and H200, B200, B300
_ECC_FIX = "nvidia-smi -e 1 (as root), then reboot"


def _ecc(gpu: Gpu) -> str:
    now, next_boot = gpu["ecc.mode.current"], gpu["ecc.mode.pending"]
    if gpu.has("ecc.mode.pending") and now != next_boot:
        return f"ECC {now}, {next_boot} after the next reboot"
    return "ECC Disabled" if now == "Disabled" and gpu["compute_cap"] in _STACKED else ""


_LANES, _ALL_LANES, _GENERATION = "pcie.link.width.current", "pcie.link.width.max", "pcie.link.gen.max"


def _missing_lanes(gpu: Gpu) -> str:
    now, most = gpu.number(_LANES), gpu.number(_ALL_LANES)
    return f"{gpu[_LANES]} of {gpu[_ALL_LANES]} lanes" if now is not None and most is not None and now < most else ""


def _reduced_power(gpu: Gpu, limits: Mapping[str, float]) -> str:
    limit, default = gpu.number("power.limit"), gpu.number("power.default_limit")
    if limit is None or default is None or limit >= default * (1 - limits["below_percent"] / 100):
        return ""
    return f"{limit:.0f} W of {default:.0f} W"


def _power(gpu: Gpu) -> str:
    limit = gpu.number("power.limit")
    return "no power limit" if limit is None else f"{limit:.0f} W"


_COUNT_FIX = "look for Xid 79 in dmesg; power cycle the node, then reseat or replace the GPU"


@each_gpu_node(
    "gpu.used",
    "the memory of the GPUs is free",
    reads=("memory.used",),
    limits={"used_mib": 1024},  # a display or a monitoring service takes some hundred
    why="Memory that a process in a container or a dead program still holds is missing from the run's batch.",
)
def used(row: tuple[Gpu, ...], limits: Mapping[str, float]) -> Judgement:
    """WARN where more is used than the limit, whatever uses it: processes of containers are not listed by name."""
    mib = {gpu.index: gpu.number("memory.used") or 0.0 for gpu in row}
    full = {index: f"{size:.0f} MiB in use" for index, size in mib.items() if size > limits["used_mib"]}
    if full:
        fix = "fuser -v /dev/nvidia* (as root) shows what holds the GPUs; if nothing does, reset them or reboot"
        return warn(each(full), expected=f"at most {limits['used_mib']:.0f} MiB", fix=fix)
    return ok(f"at most {max(mib.values()):.0f} MiB in use")


@each_gpu_node(
    "gpu.temp",
    "no GPU is hot",
    reads=("temperature.gpu", "temperature.memory"),
    limits={"warn_celsius": 85, "fail_celsius": 95},
    why="A hot GPU slows down, and all ranks with it, or is shut off in the middle of the run.",
)
def temp(row: tuple[Gpu, ...], limits: Mapping[str, float]) -> Judgement:
    """WARN and FAIL from the limits on; the hotter of chip and memory counts.

    From 85 degrees on most models begin to slow down, near 95 they stop: ``nvidia-smi -q -d TEMPERATURE`` shows a
    model's own limits.
    """
    both = ((gpu.index, [gpu.number(f"temperature.{part}") for part in ("gpu", "memory")]) for gpu in row)
    known = {index: max(values) for index, pair in both if (values := [each for each in pair if each is not None])}
    hot = {index: f"{degrees:.0f} °C" for index, degrees in known.items() if degrees >= limits["warn_celsius"]}
    if hot:
        fix = "check fans, air flow and the neighbours in the rack; stop the load"
        verdict = fail if max(known.values()) >= limits["fail_celsius"] else warn
        return verdict(each(hot), expected=f"below {limits['warn_celsius']:.0f} °C", fix=fix)
    return ok(f"at most {max(known.values()):.0f} °C" if known else "these GPUs report no temperature")


@each_node(
    "gpu.count",
    "every node shows the same number of GPUs",
    probe=GPUS,
    tool=SMI,
    timeout=20.0,
    absent="FAIL",
    absent_fix=f"install the driver; where it is there, {_COUNT_FIX}",
    why="A rank without a GPU fails at once, and a node that starts fewer ranks than the others makes them all wait.",
)
def count(plan: Plan, answers: Answers) -> Judgements:
    """FAIL where there are fewer than the inventory's ``gpus``, and where the number is not that of most nodes."""
    wanted = {node.name: node.gpus for node in plan.nodes}
    counts = {}
    for node, answer in answers.items():
        found = rows(answer)
        asked = wanted.get(node) or 0
        if isinstance(found, str):
            yield node, unanswered(node, answer)
        elif len(found) < asked:
            observed = f"{len(found)} GPUs, the inventory starts {asked} processes"
            yield node, fail(observed, expected=f"{asked} GPUs", fix=f"correct gpus: in the inventory, or {_COUNT_FIX}")
        else:
            counts[node] = len(found)
    if not any(counts.values()):
        yield from ((node, not_here("no GPU")) for node in counts)
        return
    yield from odd(
        counts, show=lambda count: f"{count} GPUs" if count != 1 else "1 GPU", fix=_COUNT_FIX, verdict="FAIL"
    )


def _memory(mib: float | None) -> str:
    return "unified memory" if mib is None else f"{mib:.0f} MiB"


@each_node(
    "gpu.memory",
    "all GPUs have the same amount of memory",
    probe=GPUS,
    tool=SMI,
    timeout=20.0,
    limits={"differ_percent": 2},  # drivers reserve a little more or less
    why="A batch that fits the other GPUs runs out of memory on a smaller one, and ends the run.",
)
def memory(plan: Plan, answers: Answers) -> Judgements:
    """FAIL where the memory differs by more than the limit."""
    found = yield from gpus(answers, "memory.total")
    sizes = {
        f"{node}/{gpu.index}": size
        for node, row in found.items()
        for gpu in row
        if (size := gpu.number("memory.total")) is not None
    }
    rounded = close(sizes, plan.limits["differ_percent"] / 100)
    nodes = {
        node: {gpu.index: _memory(rounded.get(f"{node}/{gpu.index}")) for gpu in row} for node, row in found.items()
    }
    fix = "replace the GPU or leave the node out (--exclude); nvidia-smi -q -d MEMORY,ECC shows what is reserved"
    yield from alike(nodes, noun="", fix=fix, verdict="FAIL")


@each_node(
    "gpu.inforom",
    "the InfoROM of every GPU is whole and of one version",
    probe=GPUS,
    tool=SMI,
    timeout=20.0,
    why="The InfoROM remembers which rows of memory were replaced: a damaged one lets bad memory be used again.",
)
def inforom(answers: Answers) -> Judgements:
    """WARN for a damaged one, and where the version differs.

    nvidia-smi says "WARNING: infoROM is corrupted at gpu 0000:3B:00.0" below its answer (NVIDIA, "GPU Debug
    Guidelines").
    """
    whole = {}
    for node, answer in answers.items():
        damaged = re.findall(r"(?i)infoROM is corrupted at gpu\s+(\S+)", answer.out + answer.err)
        if damaged:
            observed = f"the InfoROM of {', '.join(damaged)} is damaged"
            fix = "reset the GPU (nvidia-smi --gpu-reset -i N) or reboot; if it stays, have the GPU replaced"
            yield node, warn(observed, expected="a whole InfoROM", fix=fix)
        else:
            whole[node] = answer
    found = yield from gpus(whole, "inforom.img")
    nodes = {node: {gpu.index: gpu["inforom.img"] for gpu in row} for node, row in found.items()}
    fix = "bring the GPUs to one firmware with the server vendor's tool at the next maintenance"
    yield from alike(nodes, noun="InfoROM", fix=fix, verdict="WARN")


CHECKS = (
    equal_gpus(
        "gpu.same",
        "all GPUs are of one model",
        reads=("name", "compute_cap"),
        show=lambda gpu: f"{gpu['name']} (compute capability {gpu['compute_cap']})",
        verdict="FAIL",
        fix="leave the node out (--exclude), or train on nodes with equal GPUs",
        why="Ranks wait for the slowest GPU at every step, and a batch that fits one model may not fit another.",
    ),
    equal_gpus(
        "gpu.vbios",
        "all GPUs have the same VBIOS",
        reads=("vbios_version",),
        show=lambda gpu: gpu["vbios_version"],
        noun="VBIOS",
        fix="bring the GPUs to one firmware with the server vendor's tool at the next maintenance",
        why="Another VBIOS may mean other clocks and power limits: one GPU that is slower makes all others wait.",
    ),
    equal_gpus(
        "gpu.eccmode",
        "ECC is on",
        reads=("ecc.mode.current", "ecc.mode.pending", "compute_cap"),
        show=lambda gpu: gpu["ecc.mode.current"],
        own=OwnFault(_ecc, "ECC is on", _ECC_FIX),
        noun="ECC",
        fix=_ECC_FIX,
        why=(
            "Without ECC a flipped bit of memory goes into the weights unseen; where it differs, so does the memory's "
            "size."
        ),
        about="""ECC is expected of the chips with stacked memory, which data centres have; on others it is a choice,
but one that all nodes should have made. Source of the capabilities: NVIDIA, "CUDA GPU Compute Capability".""",
    ),
    equal_gpus(
        "gpu.pcie",
        "every GPU uses all lanes of its PCIe slot",
        reads=(_LANES, _ALL_LANES, _GENERATION),
        show=lambda gpu: f"x{gpu[_LANES]}, generation {gpu[_GENERATION]}",
        own=OwnFault(
            _missing_lanes,
            "all lanes",
            "power off and reseat the GPU, its riser and cables; then look at the slot's setting in the BIOS",
            "FAIL",
        ),
        noun="PCIe",
        fix="compare the BIOS settings of the PCIe slots, and the risers",
        why="Half the lanes are half the speed between GPU, memory and network: every step waits for that one GPU.",
        about="""The current generation says nothing: it drops while a GPU idles. The highest one is what GPU and slot
agree on.""",
    ),
    equal_gpus(
        "gpu.power",
        "the power limit of every GPU is its default",
        reads=("power.limit", "power.default_limit"),
        show=_power,
        own=OwnFault(
            _reduced_power,
            "the default limit",
            "nvidia-smi -i N -pl WATTS (as root); find out first who set it, and whether the rack can bear more",
        ),
        limits={"below_percent": 2},
        fix="nvidia-smi -i N -pl WATTS (as root) sets the same limit on all nodes",
        why="A GPU with less power has lower clocks: the whole run goes at its pace.",
    ),
)
