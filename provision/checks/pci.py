"""PCI: the checks."""

import re

from provision.checks.kit import (
    Answer,
    Answers,
    Judgement,
    Judgements,
    each_node,
    majority,
    not_here,
    ok,
    unknown,
    warn,
)
from provision.checks.kit.infiniband import Fault, sections, worst

_ACS_PROBE = """\
PATH=$PATH:/usr/sbin:/sbin
echo "@devices $(cat /sys/bus/pci/devices/*/class 2>/dev/null | grep -c -e '^0x0207' -e '^0x0302' -e '^0x0300')"
if grep -qw hypervisor /proc/cpuinfo; then echo @virtual; fi
if command -v lspci >/dev/null 2>&1; then
  echo @lspci
  lspci -vvv 2>/dev/null | sed -n -e 's/^\\([0-9a-f:.]* [^:]*\\):.*/\\1/p' -e 's/^[[:space:]]*\\(ACSCtl:.*\\)/\\1/p' |
    awk '/^ACSCtl:/ { print at, $0; next } { at = $1 }'
fi
echo @end
"""
_CONTROL = re.compile(r"^(\S+) ACSCtl:.*SrcValid([+-])", re.MULTILINE)


@each_node(
    "pci.acs",
    "PCI Access Control Services are off",
    probe=_ACS_PROBE,
    timeout=20,
    root=True,
    why="Traffic between GPUs and adapters goes up to the processor and back: GPUDirect is slow, or NCCL hangs.",
)
def acs(answer: Answer) -> Judgement:
    """Name machines of metal whose bridges redirect traffic between devices.

    ``lspci -vvv`` shows ``ACSCtl: SrcValid+`` on bridges that send peer-to-peer traffic through the root complex (NCCL
    user guide, Troubleshooting, PCI Access Control Services). It prints capabilities to root only. Virtual machines
    need ACS and use ATS instead.
    """
    observed = {mark: list(sections(answer.out, mark)) for mark in ("devices", "virtual", "lspci", "end")}
    controls = _CONTROL.findall(answer.out)
    on = [bridge for bridge, sign in controls if sign == "+"]
    if not observed["end"] or not observed["devices"]:
        return unknown("what the node printed about its PCI devices is not understood")
    if observed["devices"][0][0] == ("0",):
        return not_here("no GPU and no InfiniBand adapter")
    if observed["virtual"]:
        return ok("a virtual machine")
    if not observed["lspci"]:
        return unknown("lspci is not installed", fix="install pciutils with services: os_packages:")
    if not answer.root:
        return unknown("lspci shows it to root only", fix="run as root")
    if on:
        return warn(
            f"on at {len(on)} of {len(controls)} bridges, such as {on[0]}",
            expected="SrcValid- on every bridge",
            fix="switch ACS off in the BIOS, or with setpci -s BRIDGE ECAP_ACS+0x6.w=0000 at each start",
        )
    return ok(f"off at {len(controls)} bridges" if controls else "no bridge has it")


_IOMMU_PROBE = """\
for device in /sys/bus/pci/devices/*; do
  case $(cat "$device/class" 2>/dev/null) in
    0x0302* | 0x0300* | 0x0207*)
      echo "@device ${device##*/} $(cat "$device/iommu_group/type" 2>/dev/null || echo none)" ;;
  esac
done
echo "@end"
"""


@each_node(
    "pci.iommu",
    "the IOMMU is off or passes addresses through",
    probe=_IOMMU_PROBE,
    why="Translating every access makes GPUDirect slow, and with some chipsets hangs NCCL between GPUs.",
)
def iommu(answer: Answer) -> Judgement:
    """Name nodes whose GPUs or adapters have their addresses translated.

    ``iommu_group/type`` of a device in sysfs is ``identity`` where addresses pass through (``iommu=pt``), and begins
    with ``DMA`` where they are translated (Linux, Documentation/ABI/testing/sysfs-kernel-iommu_groups). PCI classes:
    0x0302 and 0x0300 a GPU, 0x0207 an InfiniBand adapter.
    """
    kinds = {device: kind for (device, kind), _ in sections(answer.out, "device", words=2)}
    translated = [device for device, kind in kinds.items() if kind.startswith("DMA")]
    if "@end" not in answer.lines:
        return unknown("what the node printed about its PCI devices is not understood")
    if translated:
        return warn(
            f"{len(translated)} of {len(kinds)} devices translated, such as {translated[0]}",
            expected="identity, or no IOMMU",
            fix="add iommu=pt (Intel: intel_iommu=on iommu=pt) to the kernel's command line and restart the node",
        )
    if kinds:
        return ok(", ".join(sorted(set(kinds.values()))))
    return not_here("no GPU and no InfiniBand adapter")


_SPEED_PROBE = """\
set -- /proc/version /proc/sys/kernel/ostype
for device in /sys/class/infiniband/*/device; do
  for file in current_link_speed current_link_width max_link_speed max_link_width; do set -- "$@" "$device/$file"; done
done
head -n 1 "$@" 2>/dev/null
echo @end
"""
_LINK_FILE = re.compile(
    r"^==> /sys/class/infiniband/([^/]+)/device/(\w+)_link_(\w+) <==\n(\d+(?:\.\d+)?)", re.MULTILINE
)
_LINK_FACTS = {"current width", "current speed", "max width", "max speed"}


def _link_text(link: tuple[float, float]) -> str:
    return f"x{link[0]:g} at {link[1]:g} GT/s"


@each_node(
    "pci.speed",
    "RDMA adapters have all their PCI lanes at full speed",
    probe=_SPEED_PROBE,
    why="A 400 Gb/s adapter on half of its lanes moves half as much, and every all-reduce waits for it.",
)
def speed(answers: Answers) -> Judgements:
    """Name adapters with fewer lanes or a lower speed than similar adapters, or, without any, than they could have.

    ``current_link_*`` and ``max_link_*`` of the adapter in sysfs (Linux, Documentation/ABI/testing/sysfs-bus-pci). An
    adapter in a slower slot than it could use is right when all similar adapters are.
    """
    every: dict[str, dict[str, dict[str, float]]] = {}
    for name, answer in answers.items():
        if "@end" not in answer.lines:
            yield name, unknown("what the node printed about its adapters is not understood")
            continue
        every[name] = {}
        for device, kind, what, value in _LINK_FILE.findall(answer.out):
            every[name].setdefault(device, {})[f"{kind} {what}"] = float(value)
    for name, mine in every.items():
        links = {device: link for device, link in mine.items() if link.keys() == _LINK_FACTS and link["current width"]}
        if not links:
            yield name, not_here("no RDMA adapter on a PCI slot that reports its speed")
            continue
        faults = []
        for device, link in links.items():
            has = (link["current width"], link["current speed"])
            most = (link["max width"], link["max speed"])
            alike = {
                f"{node} {other}": (each["current width"], each["current speed"])
                for node, devices in every.items()
                for other, each in devices.items()
                if each.keys() == _LINK_FACTS and (each["max width"], each["max speed"]) == most
            }
            usual = majority(alike) if len(alike) > 1 else None
            wanted = usual or most
            if has[0] < wanted[0] or has[1] < wanted[1]:
                fix = f"reseat the adapter {device} or its riser; its slot should have x{most[0]:g} at {most[1]:g} GT/s"
                others = "similar adapters have" if usual else "it could have"
                observed = f"{device} has {_link_text(has)}, {others} {_link_text(wanted)}"
                faults.append(Fault("WARN", observed, _link_text(wanted), fix))
        fine = sorted({_link_text((link["current width"], link["current speed"])) for link in links.values()})
        yield name, worst(faults, ", ".join(fine))
