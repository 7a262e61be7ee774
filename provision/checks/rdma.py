"""GPUDirect: the simple checks."""

from provision.checks.kit import Answer, Judgement, each_node, not_here, ok, unknown, warn
from provision.checks.kit.infiniband import sections

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
