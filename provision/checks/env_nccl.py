"""env.nccl: the bundle's NCCL sees the node's peer memory module.

NCCL before 2.23.4 looks for ``/sys/kernel/mm/memory_peers/nv_mem*``, the older module's, and does not see
nvidia_peermem, so that GPUDirect RDMA is silently off: 180 became 10 GB/s (github.com/NVIDIA/nccl/issues/1676). Where
driver and kernel have dma-buf it needs neither.
"""

import re

from provision.checks.kit import Answer, Answers, Judgement, Judgements, Plan, not_here, ok, unknown, unread, warn
from provision.checks.kit.infiniband import ports, sections
from provision.checks.rdma_gdr import PROBE as RDMA
from provision.checks.rdma_gdr import dma_buf, driver

TITLE = "the bundle's NCCL sees the node's peer memory module"
PROBE = RDMA
BUNDLE = True
WHY = "Every exchange between nodes goes through the host's memory: a tenth of the speed, and no message says so."

_SEES_PEERMEM = (2, 23, 4)


def judge(seen: Plan, answers: Answers) -> Judgements:
    """WARN for an NCCL that does not see nvidia_peermem where nothing else does the work."""
    assert seen.manifest is not None
    versions = seen.manifest.versions
    for node, answer in answers.items():
        yield node, _judge(answer, versions.get("nccl") or "", has_cuda=bool(versions.get("cuda")))


def _judge(answer: Answer, nccl: str, *, has_cuda: bool) -> Judgement:
    found = ports(answer.out)
    if found is None:
        return unread(answer)
    if not found or not driver(answer.out) or not has_cuda:
        observed = "the bundle has no CUDA" if found and not has_cuda else "no GPU beside an RDMA adapter"
        return not_here(observed)
    if not nccl:
        return unknown(
            "the bundle does not record its NCCL version", fix="NCCL_DEBUG=VERSION prints it when training starts"
        )
    if dma_buf(answer.out):
        return ok(f"NCCL {nccl}, dma-buf")
    if not any("nvidia_peermem" in words for words, _ in sections(answer.out, "module")):
        return ok(f"NCCL {nccl}, no nvidia_peermem (see the check rdma.gdr)")
    older = any(words[:1] and words[0].startswith("nv_mem") for words, _ in sections(answer.out, "peer"))
    if older or tuple(int(part) for part in re.findall(r"\d+", nccl)[:3]) >= _SEES_PEERMEM:
        return ok(f"NCCL {nccl} sees nvidia_peermem")
    fix = "pack an environment with NCCL 2.23.4 or later, or install the open driver on Linux 5.12 or later"
    observed = f"NCCL {nccl} does not see nvidia_peermem"
    return warn(observed, expected="NCCL 2.23.4 or later", fix=fix)
