"""pci.iommu: the IOMMU does not translate what GPUs and adapters read and write.

``iommu_group/type`` of a device in sysfs is ``identity`` where addresses pass through (``iommu=pt``), and begins with
``DMA`` where they are translated (Linux, Documentation/ABI/testing/sysfs-kernel-iommu_groups). PCI classes: 0x0302 and
0x0300 a GPU, 0x0207 an InfiniBand adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, not_here, ok, unknown, warn
from provision.checks._infiniband import sections
from provision.model import Finding

ID = "pci.iommu"
LEVEL = 0
TITLE = "the IOMMU is off or passes addresses through"
WHY = "Translating every access makes GPUDirect slow, and with some chipsets hangs NCCL between GPUs."
PROBE = """\
for device in /sys/bus/pci/devices/*; do
  case $(cat "$device/class" 2>/dev/null) in
    0x0302* | 0x0300* | 0x0207*)
      echo "@device ${device##*/} $(cat "$device/iommu_group/type" 2>/dev/null || echo none)" ;;
  esac
done
echo "@end"
"""


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """Name nodes whose GPUs or adapters have their addresses translated."""
    for name, answer in answers.items():
        kinds = {device: kind for (device, kind), _ in sections(answer.out, "device", words=2)}
        translated = [device for device, kind in kinds.items() if kind.startswith("DMA")]
        if "@end" not in answer.lines:
            yield unknown(ID, name, "what the node printed about its PCI devices is not understood")
        elif translated:
            yield warn(
                ID,
                name,
                f"{len(translated)} of {len(kinds)} devices translated, such as {translated[0]}",
                expected="identity, or no IOMMU",
                fix="add iommu=pt (Intel: intel_iommu=on iommu=pt) to the kernel's command line and restart the node",
            )
        elif kinds:
            yield ok(ID, name, ", ".join(sorted(set(kinds.values()))))
        else:
            yield not_here(ID, name, "no GPU and no InfiniBand adapter")
