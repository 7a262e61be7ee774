"""rdma.soft: no RDMA device is made of software.

rxe (soft RoCE) and siw (soft iWARP) are devices without an adapter: in sysfs they lie below /sys/devices/virtual.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, not_here, ok, unknown, warn
from provision.checks._infiniband import sections
from provision.model import Finding

ID = "rdma.soft"
LEVEL = 0
TITLE = "RDMA devices are real adapters"
WHY = "NCCL takes a software device for an adapter and trains over the processor's emulation of one, or hangs."
PROBE = """\
for device in /sys/class/infiniband/*; do
  [ -e "$device" ] || continue
  case $(readlink -f "$device") in */virtual/*) echo "@soft ${device##*/}" ;; *) echo "@real ${device##*/}" ;; esac
done
echo @end
"""


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """Name the nodes that have software devices."""
    for name, answer in answers.items():
        soft = [device for (device,), _ in sections(answer.out, "soft", words=1)]
        real = [device for (device,), _ in sections(answer.out, "real", words=1)]
        if "@end" not in answer.lines:
            yield unknown(ID, name, "what the node printed about its RDMA devices is not understood")
        elif soft:
            yield warn(
                ID,
                name,
                f"{', '.join(soft)} made of software",
                expected="real adapters only",
                fix="; ".join(f"rdma link delete {device}" for device in soft) + "; or NCCL_IB_HCA names the real ones",
            )
        else:
            yield ok(ID, name, f"{len(real)} adapters") if real else not_here(ID, name, "no RDMA device")
