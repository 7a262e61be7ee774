"""rdma.gdr: RDMA adapters reach the memory of GPUs on every node.

Either the module nvidia_peermem (nv_peer_mem before driver 470) is loaded, or the driver is the open one on Linux 5.12
or later, which lends memory as dma-buf (NVIDIA, GPUDirect RDMA documentation). /proc/driver/nvidia/version calls the
open driver ``Open Kernel Module``.
"""

import re

from provision.checks.kit import Answer, Judgement, not_here, ok, unknown, warn
from provision.checks.kit.infiniband import ACTIVE, PORTS, ports, sections

TITLE = "GPUDirect RDMA on every node"
WHY = "Without it every byte goes through the host's memory: multi-node all-reduce is up to ten times slower."
# What other judges read too: lines `@module NAME` and `@driver TEXT`.
PROBE = (
    PORTS
    + """\
for module in nvidia_peermem nv_peer_mem; do [ ! -d "/sys/module/$module" ] || echo "@module $module"; done
for file in /sys/kernel/mm/memory_peers/*; do [ ! -d "$file" ] || echo "@peer ${file##*/}"; done
echo "@driver $(head -n 1 /proc/driver/nvidia/version 2>/dev/null)"
echo "@kernel $(uname -r)"
"""
)


def judge(answer: Answer) -> Judgement:
    """Name nodes with GPUs and RDMA adapters that have neither a peer module nor dma-buf."""
    every = ports(answer.out)
    if every is None:
        return unknown("what the node printed about its ports is not understood")
    if not any(port.state == ACTIVE for port in every):
        return not_here("no RDMA port is Active")
    if not driver(answer.out):
        return not_here("no NVIDIA driver")
    if modules := peer_modules(answer.out):
        return ok(f"{', '.join(modules)} is loaded")
    if dma_buf(answer.out):
        return ok("dma-buf of the open driver")
    return warn(
        "neither nvidia_peermem nor dma-buf",
        expected="nvidia_peermem, or the open driver on Linux 5.12 or later",
        fix="modprobe nvidia-peermem; echo nvidia-peermem >/etc/modules-load.d/nvidia-peermem.conf keeps it",
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
