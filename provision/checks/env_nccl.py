"""env.nccl: the bundle's NCCL uses the GPUs' memory directly with the node's InfiniBand.

NCCL before 2.23.4 looks for nv_peer_mem only and does not see nvidia_peermem, so that GPUDirect RDMA is silently off:
180 became 10 GB/s (github.com/NVIDIA/nccl/issues/1676). With DMA-BUF (open kernel module, Linux 5.12) it needs neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, unknown, warn
from provision.checks._host import unread
from provision.checks._nvidia import VERSION
from provision.model import Finding

ID = "env.nccl"
LEVEL = 0
TITLE = "the bundle's NCCL works with the node's peer memory module"
PROBE = f"""\
{VERSION}\
for device in /sys/class/infiniband/*; do [ ! -e "$device" ] || echo "device ${{device##*/}}"; done
for module in nvidia_peermem nv_peer_mem; do [ ! -e "/sys/module/$module" ] || echo "module $module"; done
echo "kernel $(uname -r)"
"""
BUNDLE = True
WHY = "Every exchange between nodes goes through the host's memory: a tenth of the speed, and no message says so."

_KNOWS_PEERMEM = (2, 23, 4)
_DMA_BUF = (5, 12)


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """WARN for an NCCL that does not see nvidia_peermem where nothing else does the work."""
    assert seen.manifest is not None
    nccl = seen.manifest.versions.get("nccl") or ""
    for node, answer in answers.items():
        yield _judge(node, answer, nccl, has_cuda=bool(seen.manifest.versions.get("cuda")))


def _judge(node: str, answer: Answer, nccl: str, *, has_cuda: bool) -> Finding:
    kernel = re.search(r"^kernel (\d+)\.(\d+)", answer.out, flags=re.MULTILINE)
    if not kernel:
        return unread(ID, node, answer)
    if "device " not in answer.out:
        return ok(ID, node, "no InfiniBand or RoCE device")
    if not has_cuda:
        return ok(ID, node, "the bundle has no CUDA")
    if not nccl:
        return unknown(ID, node, "the bundle does not tell its NCCL", fix="NCCL_DEBUG=VERSION says it when training")
    dma_buf = "Open Kernel Module" in answer.out and (int(kernel[1]), int(kernel[2])) >= _DMA_BUF
    if dma_buf:
        return ok(ID, node, f"NCCL {nccl}, DMA-BUF")
    if "module nvidia_peermem" not in answer.lines or "module nv_peer_mem" in answer.lines:
        return ok(ID, node, f"NCCL {nccl}, nvidia_peermem is not loaded (see rdma.gdr)")
    if tuple(int(part) for part in re.findall(r"\d+", nccl)[:3]) >= _KNOWS_PEERMEM:
        return ok(ID, node, f"NCCL {nccl}, nvidia_peermem")
    said = f"NCCL {nccl} does not see nvidia_peermem"
    fix = "pack an environment with NCCL 2.23.4 or later, or install the open kernel modules on Linux 5.12 or later"
    return warn(ID, node, said, expected="NCCL 2.23.4 or later", fix=fix)
