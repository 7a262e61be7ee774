"""What the checks of GPUs share: the questions that several of them ask, the answers as data, words for findings.

Every call of nvidia-smi starts with looking at all GPUs, so what every driver since 2022 (510) can tell is asked at
once: checks with the same probe share its answer. The format was seen with driver 580.159.04
(``nvidia-smi --help-query-gpu`` explains the fields): one line a GPU, values with ", " between them, and "[N/A]" for
what a GPU does not have.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass

from provision.checks import Answer, ok, unknown
from provision.checks._judging import found_as, odd
from provision.model import Finding, Verdict

SMI = "nvidia-smi"
FIELDS = (
    "index",
    "driver_version",
    "name",
    "compute_cap",
    "memory.total",
    "memory.used",
    "vbios_version",
    "inforom.img",
    "persistence_mode",
    "mig.mode.current",
    "compute_mode",
    "ecc.mode.current",
    "ecc.mode.pending",
    "ecc.errors.uncorrected.volatile.total",
    "ecc.errors.uncorrected.aggregate.sram",
    "temperature.gpu",
    "temperature.memory",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "pcie.link.gen.max",
    "power.limit",
    "power.default_limit",
)

# Every NVIDIA device on the PCI bus, from sysfs and without starting a program: address, class, driver, link width. One
# that has fallen off the bus answers with ones: its link seems to be 63 wide, or cannot be read.
PCI = """\
for device in /sys/bus/pci/devices/*; do
    { read -r vendor <"$device/vendor"; } 2>/dev/null || continue
    [ "$vendor" = 0x10de ] || continue
    read -r class <"$device/class"
    driver=none
    while read -r line; do
        case $line in DRIVER=*) driver=${line#DRIVER=} ;; esac
    done <"$device/uevent"
    width=none
    if [ -e "$device/current_link_width" ]; then
        { read -r width <"$device/current_link_width"; } 2>/dev/null || width=lost
    fi
    echo "pci ${device##*/} $class $driver $width"
done
"""

# The loaded kernel module's version.
VERSION = """\
if [ -r /proc/driver/nvidia/version ]; then
    read -r line </proc/driver/nvidia/version
    echo "$line"
fi
"""

# What the kernel's log says of NVIDIA's devices. dmesg may be root's only, and a user who may not read the journal
# gets an empty one.
LOG = f"""\
log=$(dmesg 2>/dev/null)
[ -n "$log" ] || log=$(journalctl -k -b -q -o short-monotonic --no-pager 2>/dev/null)
[ -z "$log" ] || echo "log readable"
printf '%s\\n' "$log" | grep -E 'NVRM: Xid|SXid|available PCIe bandwidth' | tail -n 200
{PCI}echo looked
"""

_NOTHING = "No devices were found"
_NOT_THERE = ("[N/A]", "N/A", "[Not Supported]", "")
_GPU_CLASSES = ("0x0300", "0x0302")  # VGA controller, 3D controller: PCI Code and ID Assignment, base class 03h
_SWITCH_CLASS = "0x0680"  # bridge, other: NVSwitch of A100 and H100 boards


def query(*fields: str) -> str:
    """Sh that asks for fields of every GPU; what it prints is read by ``rows``."""
    return f"{SMI} --query-gpu={','.join(fields)} --format=csv,noheader,nounits"


GPUS = query(*FIELDS)


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi's answer."""

    index: str
    values: Mapping[str, str]

    def __getitem__(self, field: str) -> str:
        return self.values[field]

    def has(self, field: str) -> bool:
        """Whether this GPU knows the field at all."""
        return self.values[field] not in _NOT_THERE

    def number(self, field: str) -> float | None:
        """The field's number; None where the GPU does not have it."""
        text = self.values[field]
        return float(text) if re.fullmatch(r"-?\d+(\.\d+)?", text) else None


def rows(answer: Answer, fields: tuple[str, ...] = FIELDS) -> tuple[Gpu, ...] | str:
    """The GPUs of an answer to ``query(*fields)``, ``index`` first among them; text: why there are none to read."""
    lines = [line for line in answer.lines if not line.upper().startswith("WARNING")]
    if any(line.startswith(_NOTHING) for line in lines):
        return ()
    values = [re.split(r",\s*", line) for line in lines]
    if answer.rc or not values or any(len(row) != len(fields) for row in values):
        return trouble(answer)
    return tuple(Gpu(row[0], dict(zip(fields, row, strict=True))) for row in values)


def trouble(answer: Answer) -> str:
    """Why nvidia-smi's answer is none, in a few words."""
    said = next(iter((*answer.lines, *answer.err.splitlines())), "it said nothing")
    if found := re.search(r'Field "(\S+)" is not a valid field', answer.out + answer.err):
        return f"this driver's nvidia-smi does not know {found[1]}"
    return f"nvidia-smi gave no answer that can be read (exit code {answer.rc}): {said[:160]}"


def gpus(
    check: str, answers: Mapping[str, Answer], *used: str, fields: tuple[str, ...] = FIELDS
) -> Generator[Finding, None, dict[str, tuple[Gpu, ...]]]:
    """The GPUs of every node that has some, by its name; a finding for each of the other nodes.

    Args:
        check: the id.
        answers: to ``query(*fields)``.
        used: the fields that the check looks at: a GPU that cannot tell one of them makes the node UNKNOWN.
        fields: what was asked.
    """
    found = {}
    for node, answer in answers.items():
        read = rows(answer, fields)
        if isinstance(read, str):
            yield unknown(check, node, read, fix=f"run nvidia-smi on {node}; the check gpu.driver tells more")
        elif not read:
            yield ok(check, node, "no GPU")
        elif silent := {gpu.index: gpu[name] for gpu in read for name in used if _broken(gpu[name])}:
            yield unknown(check, node, each(silent), fix=f"run nvidia-smi -q on {node}; reset the GPU or reboot")
        else:
            found[node] = read
    return found


def _broken(text: str) -> bool:
    """``[GPU requires reset]``, ``[GPU is lost]``, ``[Unknown Error]``."""
    return text == "ERR!" or (text not in _NOT_THERE and text.startswith("["))


def each(values: Mapping[str, str]) -> str:
    """``GPU 0-2, 5: Enabled; GPU 3: Disabled`` from the value of each GPU."""
    found: dict[str, list[str]] = {}
    for index, value in values.items():
        found.setdefault(value, []).append(index)
    return "; ".join(f"GPU {ranges(indexes)}: {value}" for value, indexes in found.items())


def ranges(indexes: Iterable[str]) -> str:
    """``0-2, 5`` from 0, 1, 2 and 5."""
    parts: list[tuple[int, int]] = []
    for index in sorted(int(index) for index in indexes):
        if parts and index == parts[-1][1] + 1:
            parts[-1] = (parts[-1][0], index)
        else:
            parts.append((index, index))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def alike(
    check: str, nodes: Mapping[str, Mapping[str, str]], *, what: str, fix: str, verdict: Verdict
) -> Iterator[Finding]:
    """A finding for every node: the GPUs of a node have one value, and all nodes the same.

    Args:
        check: the id.
        nodes: for each node, the value of each GPU by its index.
        what: the noun that stands before the value.
        fix: what to do.
        verdict: for a node whose GPUs differ, from one another or from those of the other nodes.
    """
    mixed = {node: values for node, values in nodes.items() if len(set(values.values())) > 1}
    for node, values in mixed.items():
        yield found_as(check, node, verdict, each(values), expected="the same for all GPUs of a node", fix=fix)
    same = {node: next(iter(values.values())) for node, values in nodes.items() if node not in mixed}
    yield from odd(check, same, what=what, fix=fix, verdict=verdict)


@dataclass(frozen=True)
class Device:
    """An NVIDIA device on the PCI bus, as ``PCI`` prints it."""

    address: str
    kind: str
    driver: str
    width: str

    @property
    def is_gpu(self) -> bool:
        """A graphics processor, not its audio function and no switch."""
        return self.kind.startswith(_GPU_CLASSES)

    @property
    def is_switch(self) -> bool:
        """An NVSwitch, which needs the fabric manager."""
        return self.kind.startswith(_SWITCH_CLASS)

    @property
    def is_lost(self) -> bool:
        """It has fallen off the bus."""
        return self.width in ("63", "lost")


def devices(answer: Answer) -> tuple[Device, ...]:
    """What ``PCI`` found."""
    lines = re.findall(r"^pci (\S+) (0x[0-9a-f]+) (\S+) (\S+)$", answer.out, flags=re.MULTILINE)
    return tuple(Device(*fields) for fields in lines)


def kernel_module(text: str) -> str:
    """The loaded kernel module's version, from ``/proc/driver/nvidia/version``; empty if it is not there."""
    found = re.search(r"NVRM version:.*?\s(\d{3,}\.\d+(?:\.\d+)*)\s", f"{text}\n")
    return found[1] if found else ""
