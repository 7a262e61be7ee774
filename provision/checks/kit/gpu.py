"""NVIDIA GPUs: the questions that several checks ask, and the answers as data. Pure.

The kernel's view comes from sysfs, /proc and the kernel's log; the driver's from nvidia-smi. Every call of nvidia-smi
first looks at all GPUs, so everything that each driver since 525 (CUDA 12) reports is asked at once, and checks with
the same probe share its answer. The format was recorded with driver 580.159.04 (``nvidia-smi --help-query-gpu``
explains the fields): one line per GPU, values separated by ", ", and "[N/A]" for what a GPU does not have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from provision.checks import Answer, Answers, Check, Judgement, Judgements, Plan, call, not_here, unknown
from provision.checks.kit.declare import odd
from provision.model import Verdict

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

_GPU_CLASSES = ("0x0300", "0x0302")  # VGA controller, 3D controller: PCI Code and ID Assignment, base class 03h
_SWITCH_CLASS = "0x0680"  # bridge, other: NVSwitch of A100 and H100 boards


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

_NOT_THERE = ("[N/A]", "N/A", "[Not Supported]", "")
_NUMBERS = ("memory.", "ecc.errors.", "temperature.", "pcie.link.", "power.")
_SWITCHES = ("persistence_mode", "mig.mode.current", "ecc.mode.current", "ecc.mode.pending")
_POSITIONS = ("Enabled", "Disabled")


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
        return _number(self.values[field])


def rows(answer: Answer, fields: tuple[str, ...] = FIELDS) -> tuple[Gpu, ...] | str:
    """The GPUs of an answer to ``query(*fields)``, ``index`` first among them; text: why there are none to read."""
    lines = answer_lines(answer)
    if nothing(answer):
        return ()
    values = [re.split(r",\s*", line) for line in lines]
    if answer.rc or not values or any(len(row) != len(fields) or not row[0].isdecimal() for row in values):
        return trouble(answer)
    return tuple(Gpu(row[0], dict(zip(fields, row, strict=True))) for row in values)


def answer_lines(answer: Answer) -> tuple[str, ...]:
    """The lines of an answer without nvidia-smi's warnings (of a damaged InfoROM), which may stand beside any."""
    return tuple(line for line in answer.lines if not line.upper().startswith("WARNING"))


def nothing(answer: Answer) -> bool:
    """Whether nvidia-smi says that there is no GPU."""
    return any(line.startswith("No devices were found") for line in answer.lines)


def trouble(answer: Answer) -> str:
    """Why nvidia-smi's answer is none, in a few words."""
    first = next(iter((*answer.lines, *answer.err.splitlines())), "it printed nothing")
    if found := re.search(r'Field "(\S+)" is not a valid field', answer.out + answer.err):
        return f"this driver's nvidia-smi does not know {found[1]}"
    return f"nvidia-smi gave no answer that can be read (exit code {answer.rc}): {first[:160]}"


def unanswered(node: str, answer: Answer) -> Judgement:
    """OK where there is no GPU, else UNKNOWN: what a check says of an answer that is none."""
    if nothing(answer):
        return not_here("no GPU")
    is_old = "not a valid field" in answer.out + answer.err
    fix = "a newer driver reports it" if is_old else f"run nvidia-smi on {node}; see the check gpu.driver"
    return unknown(trouble(answer), fix=fix)


def gpus(
    answers: Answers, *used: str, fields: tuple[str, ...] = FIELDS
) -> Generator[tuple[str, Judgement], None, dict[str, tuple[Gpu, ...]]]:
    """The GPUs of every node that has some, by its name; a finding for each of the other nodes.

    Args:
        answers: to ``query(*fields)``.
        used: the fields that the check looks at: a GPU that cannot report one of them makes the node UNKNOWN.
        fields: what was asked.
    """
    found = {}
    for node, answer in answers.items():
        read = rows(answer, fields)
        if isinstance(read, str) or not read:
            yield node, unanswered(node, answer)
        elif silent := {gpu.index: gpu[name] for gpu in read for name in used if _is_broken(name, gpu[name])}:
            yield node, unknown(each(silent), fix=f"run nvidia-smi -q on {node}; reset the GPU or reboot")
        else:
            found[node] = read
    return found


def _is_broken(field: str, text: str) -> bool:
    """``[GPU requires reset]``, ``[GPU is lost]``, ``[Unknown Error]``, and what no value of the field looks like."""
    if text in _NOT_THERE:
        return False
    if field.startswith(_NUMBERS):
        return _number(text) is None
    return text == "ERR!" or text.startswith("[") or (field in _SWITCHES and text not in _POSITIONS)


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text) else None


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


def alike(nodes: Mapping[str, Mapping[str, str]], *, noun: str, fix: str, verdict: Verdict) -> Judgements:
    """A judgement of every node: the GPUs of a node have one value, and all nodes the same.

    Args:
        nodes: for each node, the value of each GPU by its index.
        noun: the noun that stands before the value.
        fix: what to do.
        verdict: for a node whose GPUs differ, from one another or from those of the other nodes.
    """
    mixed = {node: values for node, values in nodes.items() if len(set(values.values())) > 1}
    for node, values in mixed.items():
        yield node, Judgement(verdict, each(values), "the same for all GPUs of a node", fix)
    same = {node: next(iter(values.values())) for node, values in nodes.items() if node not in mixed}
    yield from odd(same, noun=noun, fix=fix, verdict=verdict)


_LINKED_GPU = re.compile(r"GPU (\d+): (.*?)(?: \(UUID: .*\))?$")
_LINK = re.compile(r"Link (\d+): (.*)$")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_NAME = re.compile(r"(?:GPU|NIC|mlx|hca|roce|ib|bnxt)\S*\d\S*")

Matrix = Mapping[tuple[str, str], str]


@dataclass(frozen=True)
class LinkedGpu:
    """A GPU in the answer of ``nvidia-smi nvlink``: its links by number, and the text about each."""

    index: str
    model: str
    links: tuple[tuple[int, str], ...]


def links(out: str) -> tuple[LinkedGpu, ...]:
    """What ``nvidia-smi nvlink`` says of the links of each GPU; a link may have several lines."""
    heads: list[tuple[str, str]] = []
    found: list[list[tuple[int, str]]] = []
    for line in out.splitlines():
        if head := _LINKED_GPU.match(line):
            heads.append((head[1], head[2]))
            found.append([])
        elif found and (link := _LINK.match(line.strip())):
            found[-1].append((int(link[1]), link[2].strip()))
    return tuple(LinkedGpu(*head, tuple(lines)) for head, lines in zip(heads, found, strict=True))


def matrix(out: str) -> Matrix:
    """The cells of ``nvidia-smi topo``: of GPUs (rows) with GPUs and network cards; the header is underlined."""
    lines = [_STYLE.sub("", line) for line in out.splitlines()]
    header = next((line for line in lines if re.match(r"\s+GPU0\b", line)), "")
    columns = [cell for cell in re.split(r"\s*\t\s*", header.strip()) if _NAME.fullmatch(cell)]
    found = {}
    for line in lines:
        cells = line.strip().split("\t")
        if re.fullmatch(r"GPU\d+", cells[0].strip()):
            for column, cell in zip(columns, cells[1:], strict=False):
                found[cells[0].strip(), column] = cell.strip()
    return {pair: cell for pair, cell in found.items() if cell != "X"}


def each_gpu_node(
    check: str, title: str, *, reads: Sequence[str], query_fields: tuple[str, ...] = FIELDS, **options: Any
) -> Callable[[Callable[..., Judgement]], Check]:
    """A check whose function judges the GPUs of one node.

    The function names the arguments it needs: ``row``, ``node``, ``limits``.

    Args:
        check: the id.
        title: what is true of a healthy node.
        reads: the fields that the function reads. A GPU that cannot report one of them makes the node UNKNOWN.
        query_fields: the fields to query.
        options: further fields of ``Check``. The docstring's text below its first line is ``about``.
    """

    def declare(function: Callable[..., Judgement]) -> Check:
        def judge(plan: Plan, answers: Answers) -> Judgements:
            found = yield from gpus(answers, *reads, fields=query_fields)
            for node, row in found.items():
                yield node, call(function, plan=plan, node=node, row=row, limits=plan.limits)

        about = (function.__doc__ or "").partition("\n")[2]
        probe = query(*query_fields)
        return Check(
            check, title, judge=judge, **{"about": about, "probe": probe, "tool": SMI, "timeout": 20.0, **options}
        )

    return declare


class OwnFault(NamedTuple):
    """What is wrong with a GPU whatever the others have.

    Attributes:
        find: its text, empty for a healthy GPU; names ``gpu`` and ``limits`` as it needs them.
        expected: the healthy state.
        fix: what to do.
        verdict: of its node.
    """

    find: Callable[..., str]
    expected: str
    fix: str
    verdict: Verdict = "WARN"


def equal_gpus(
    check: str,
    title: str,
    *,
    reads: Sequence[str],
    fix: str,
    noun: str = "",
    verdict: Verdict = "WARN",
    show: Callable[[Gpu], str],
    own: OwnFault | None = None,
    **options: Any,
) -> Check:
    """A check that all GPUs of all nodes have the same value.

    Args:
        check: the id.
        title: what is true of healthy nodes.
        reads: the fields that ``show`` and ``own`` read. A GPU that cannot report one of them makes the node UNKNOWN.
        fix: what to do about a node that differs.
        noun: stands before the value.
        verdict: for a node that differs.
        show: a GPU's value.
        own: a fault of single GPUs. Nodes with one are not compared.
        options: further fields of ``Check``.
    """

    def judge(plan: Plan, answers: Answers) -> Judgements:
        found = yield from gpus(answers, *reads)
        values = {}
        for node, row in found.items():
            texts = {gpu.index: call(own.find, gpu=gpu, limits=plan.limits) for gpu in row} if own else {}
            if own and any(texts.values()):
                faults = {index: text for index, text in texts.items() if text}
                yield node, Judgement(own.verdict, each(faults), own.expected, own.fix)
            else:
                values[node] = {gpu.index: show(gpu) for gpu in row}
        yield from alike(values, noun=noun, fix=fix, verdict=verdict)

    return Check(check, title, judge=judge, probe=GPUS, tool=SMI, timeout=20.0, **options)
