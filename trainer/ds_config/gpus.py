"""GPUs by name: what their generation can compute with, how much they hold and how fast they are.

Sources: capabilities from NVIDIA, "CUDA GPU Compute Capability" (developer.nvidia.com/cuda-gpus; Volta and older:
cuda-legacy-gpus); peaks and bandwidths from NVIDIA's datasheet of each card, B200's an eighth of DGX B200's; A10G's,
and what sets A800, H800 and H20 apart, as they are reported. Peaks are dense 16-bit tensor peaks with 32-bit
accumulation, without sparsity (P100 has no tensor cores: its ordinary ones). Boards for PCIe compute less than those of
the same name with SXM, and have no NVLink or only pairs of it; a name that says neither is taken for SXM.

``memory`` is what nvidia-smi shows: GDDR6 with ECC, as data centers have it, keeps a sixteenth for itself
(github.com/modal-labs/modal-client/pull/2797 lists cards).

``peer`` is what a collective reaches between GPUs of one node: four fifths of one direction of NVLink, since a fifth is
protocol (an author of NCCL in github.com/NVIDIA/nccl-tests/issues/212: 370 of 450 GB/s on H100; DeepSeek-V3, arXiv
2412.19437, section 3.2.2: 160 GB/s on H800). Through PCIe it is an estimate, two thirds of one direction of 16 lanes;
20 GB/s were seen on generation 4 (issues/178 there).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, Tuple

from trainer.ds_config.errors import ConfigError

BF16_FROM = (8, 0)  # Ampere: the first whose tensor cores multiply bfloat16


@dataclass(frozen=True)
class Gpu:
    """One card.

    Attributes:
        name: as people say it, without the size of its memory.
        capability: compute capability, (major, minor).
        memory: GiB that nvidia-smi shows, of the largest common model.
        tflops: dense peak in bf16, or in fp16 where there is no bf16; TFLOP/s.
        bandwidth: of its memory, GB/s.
        peer: bus bandwidth of a collective among the GPUs of one node, GB/s.
    """

    name: str
    capability: Tuple[int, int]
    memory: float
    tflops: float
    bandwidth: float
    peer: float

    @property
    def bf16(self) -> bool:
        """Whether it computes in bfloat16."""
        return self.capability >= BF16_FROM


GPUS: Dict[str, Gpu] = {
    each.name: each
    for each in (
        Gpu("P100", (6, 0), 16, 21.2, 732, 64),
        Gpu("V100", (7, 0), 32, 125, 900, 120),
        Gpu("V100 PCIe", (7, 0), 32, 112, 900, 10),
        Gpu("T4", (7, 5), 15, 65, 320, 10),
        Gpu("A100", (8, 0), 80, 312, 2039, 240),
        Gpu("A100 PCIe", (8, 0), 80, 312, 1935, 20),
        Gpu("A800", (8, 0), 80, 312, 2039, 160),
        Gpu("RTX A6000", (8, 6), 48, 154.8, 768, 20),
        Gpu("A30", (8, 0), 24, 165, 933, 20),
        Gpu("A40", (8, 6), 45, 149.7, 696, 20),
        Gpu("A10", (8, 6), 22.5, 125, 600, 20),
        Gpu("A10G", (8, 6), 22.5, 70, 600, 20),  # of AWS
        Gpu("RTX3090", (8, 6), 24, 71, 936, 20),
        Gpu("RTX4090", (8, 9), 24, 165.2, 1008, 20),
        Gpu("L4", (8, 9), 22.5, 121, 300, 20),
        Gpu("L40", (8, 9), 45, 181, 864, 20),
        Gpu("L40S", (8, 9), 45, 362, 864, 20),
        Gpu("H100", (9, 0), 80, 989, 3350, 360),
        Gpu("H100 PCIe", (9, 0), 80, 756, 2000, 42),
        Gpu("H100 NVL", (9, 0), 94, 835, 3900, 42),
        Gpu("H800", (9, 0), 80, 989, 3350, 160),
        Gpu("H20", (9, 0), 96, 148, 4000, 360),
        Gpu("H20-3e", (9, 0), 141, 148, 4800, 360),
        Gpu("GH200", (9, 0), 96, 989, 4000, 360),
        Gpu("H200", (9, 0), 141, 989, 4800, 360),
        Gpu("B200", (10, 0), 180, 2250, 8000, 720),
        Gpu("GB200", (10, 0), 186, 2500, 8000, 720),
    )
}
_ASIDE = re.compile(r"nvidia|geforce|tesla|quadro|\d+ ?gb|[^a-z0-9]")


def find(name: str) -> Gpu:
    """The card that a name means: ``a100``, ``NVIDIA A100 80GB PCIe`` as nvidia-smi says it, ``RTX 3090``.

    Raises:
        ConfigError: it is not in the table.
    """
    word = _ASIDE.sub("", name.lower())
    fitting = [key for key in GPUS if re.match(_ASIDE.sub("", key.lower()) + r"(?!\d)", word)]  # T400 is no T4
    if not fitting:
        raise ConfigError(f"--gpu {name}: not in the table", hint=f"--gpu of {', '.join(GPUS)}; or --precision")
    return GPUS[max(fitting, key=len)]  # L40S before L4
