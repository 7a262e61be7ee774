"""GPUDirect: the checks."""

from provision.checks.kit import Answer, Judgement, each_node, not_here, ok, unknown, warn
from provision.checks.kit.infiniband import ACTIVE, GPUDIRECT, dma_buf, driver, peer_modules, ports, sections

_SOFT_PROBE = """\
for device in /sys/class/infiniband/*; do
  [ -e "$device" ] || continue
  case $(readlink -f "$device") in */virtual/*) echo "@soft ${device##*/}" ;; *) echo "@real ${device##*/}" ;; esac
done
echo @end
"""


@each_node(
    "rdma.soft",
    "RDMA devices are real adapters",
    probe=_SOFT_PROBE,
    why="NCCL takes a software device for an adapter and trains over the processor's emulation of one, or hangs.",
)
def soft(answer: Answer) -> Judgement:
    """Name the nodes that have software devices.

    rxe (soft RoCE) and siw (soft iWARP) are devices without an adapter: in sysfs they lie below /sys/devices/virtual.
    """
    soft = [device for (device,), _ in sections(answer.out, "soft", words=1)]
    real = [device for (device,), _ in sections(answer.out, "real", words=1)]
    if "@end" not in answer.lines:
        return unknown("what the node printed about its RDMA devices is not understood")
    if soft:
        return warn(
            f"{', '.join(soft)} made of software",
            expected="real adapters only",
            fix="; ".join(f"rdma link delete {device}" for device in soft) + "; or NCCL_IB_HCA names the real ones",
        )
    return ok(f"{len(real)} adapters") if real else not_here("no RDMA device")


@each_node(
    "rdma.gdr",
    "GPUDirect RDMA on every node",
    probe=GPUDIRECT,
    why="Without it every byte goes through the host's memory: multi-node all-reduce is up to ten times slower.",
)
def gdr(answer: Answer) -> Judgement:
    """Name nodes with GPUs and RDMA adapters that have neither a peer module nor dma-buf.

    Either the module nvidia_peermem (nv_peer_mem before driver 470) is loaded, or the driver is the open one on Linux
    5.12 or later, which lends memory as dma-buf (NVIDIA, GPUDirect RDMA documentation). /proc/driver/nvidia/version
    calls the open driver ``Open Kernel Module``.
    """
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
