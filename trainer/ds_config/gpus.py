"""GPUs by name: what their generation supports, their memory and their speed.

Sources: capabilities from NVIDIA, "CUDA GPU Compute Capability" (developer.nvidia.com/cuda-gpus; Volta and older:
cuda-legacy-gpus); peaks and bandwidths from NVIDIA's datasheet of each card; B200: an eighth of DGX B200; A10G, and the
differences of A800, H800 and H20: as reported. RTX 4090 D, RTX 5090, RTX 6000 Ada: appendices of NVIDIA's "Ada GPU
Architecture", "RTX Blackwell GPU Architecture" and "Ada GPU Architecture in Professional Graphics" (bf16 with 32-bit
accumulation: 147.1, 209.5 and 364.2); RTX A5000: half of the 222.2 with sparsity of its datasheet; L20: 119.5 as
reported; B300: an eighth of HGX B300's 36 PFLOP/s with sparsity, halved; its 288 GB are of 10^9 bytes. Peaks are dense
16-bit tensor peaks with 32-bit accumulation, without sparsity (P100 has no tensor cores: its ordinary peaks). PCIe
boards are slower than SXM boards of the same name and have no NVLink or only pairs of it; a name without either word
means SXM. A name with unknown words (Laptop, Max-Q, vGPU, MIG) is another card: it is refused, so that it is not
planned as a faster one.

``memory`` is the value of nvidia-smi: GDDR6 with ECC, usual in data centers, reserves a sixteenth
(github.com/modal-labs/modal-client/pull/2797 lists cards).

``peer`` is the bandwidth of a collective between GPUs of one node: four fifths of one direction of NVLink, since the
protocol takes a fifth (an author of NCCL in github.com/NVIDIA/nccl-tests/issues/212: 370 of 450 GB/s on H100;
DeepSeek-V3, arXiv 2412.19437, section 3.2.2: 160 GB/s on H800). For PCIe it is an estimate, two thirds of one direction
of 16 lanes; issues/178 there reports 20 GB/s on generation 4.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Dict, Tuple

BF16_FROM = (8, 0)  # Ampere: the first with bfloat16 tensor cores


class ConfigError(ValueError):
    """Options that contradict each other. ``hint`` says what to type instead."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Gpu:
    """One card.

    Attributes:
        name: the usual name, without the size of its memory.
        capability: compute capability, (major, minor).
        memory: GiB that nvidia-smi shows for the largest common model.
        tflops: dense peak in bf16, or in fp16 without bf16; TFLOP/s.
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
        """Whether the card supports bfloat16."""
        return self.capability >= BF16_FROM


GPUS: Dict[str, Gpu] = {
    each.name: each
    for each in (
        Gpu("P100", (6, 0), 16, 21.2, 732, 64),
        Gpu("P100 PCIe", (6, 0), 16, 18.7, 732, 10),
        Gpu("V100", (7, 0), 32, 125, 900, 120),
        Gpu("V100 PCIe", (7, 0), 32, 112, 900, 10),
        Gpu("V100S", (7, 0), 32, 130, 1134, 10),
        Gpu("T4", (7, 5), 15, 65, 320, 10),
        Gpu("A100", (8, 0), 80, 312, 2039, 240),
        Gpu("A100 PCIe", (8, 0), 80, 312, 1935, 20),
        Gpu("A800", (8, 0), 80, 312, 2039, 160),
        # like A100's PCIe board, with slower NVLink: github.com/karpathy/nanochat (common.py) has 312 for both
        Gpu("A800 PCIe", (8, 0), 80, 312, 1935, 20),
        # pnypartners.com/wp-content/uploads/nvidia-rtx-a5000-datasheet.pdf
        Gpu("RTX A5000", (8, 6), 24, 111.1, 768, 20),
        Gpu("RTX A6000", (8, 6), 48, 154.8, 768, 20),
        # images.nvidia.com/aem-dam/en-zz/Solutions/technologies/NVIDIA-ADA-GPU-PROVIZ-Architecture-Whitepaper_1.1.pdf
        Gpu("RTX 6000 Ada", (8, 9), 48, 364.2, 960, 20),
        Gpu("A30", (8, 0), 24, 165, 933, 20),
        Gpu("A40", (8, 6), 45, 149.7, 696, 20),
        Gpu("A10", (8, 6), 22.5, 125, 600, 20),
        Gpu("A10G", (8, 6), 22.5, 70, 600, 20),  # of AWS
        Gpu("RTX3090", (8, 6), 24, 71, 936, 20),
        Gpu("RTX4090", (8, 9), 24, 165.2, 1008, 20),
        # hmc-tech.com/gpu/nvidia-geforce-rtx-4090-d: 147.09, of 114 multiprocessors at 2.52 GHz; 1,008 GB/s
        Gpu("RTX4090 D", (8, 9), 24, 147.1, 1008, 20),
        # github.com/karpathy/nanochat (common.py): 209.5; 1,792 GB/s in NVIDIA's architecture paper
        Gpu("RTX5090", (12, 0), 32, 209.5, 1792, 42),
        Gpu("L4", (8, 9), 22.5, 121, 300, 20),
        # github.com/modelscope/ms-swift and others have 119.5; topcpu.net/en/gpu-c/b100-vs-l20: 48 GB, 864 GB/s
        Gpu("L20", (8, 9), 45, 119.5, 864, 20),
        Gpu("L40", (8, 9), 45, 181, 864, 20),
        Gpu("L40S", (8, 9), 45, 362, 864, 20),
        Gpu("H100", (9, 0), 80, 989, 3350, 360),
        Gpu("H100 PCIe", (9, 0), 80, 756, 2000, 42),
        Gpu("H100 NVL", (9, 0), 94, 835, 3900, 42),
        Gpu("H800", (9, 0), 80, 989, 3350, 160),
        # github.com/karpathy/nanochat (common.py): 756, as for H100's PCIe board; no datasheet found
        Gpu("H800 PCIe", (9, 0), 80, 756, 2000, 42),
        Gpu("H20", (9, 0), 96, 148, 4000, 360),
        Gpu("H20-3e", (9, 0), 141, 148, 4800, 360),
        Gpu("GH200", (9, 0), 96, 989, 4000, 360),
        Gpu("H200", (9, 0), 141, 989, 4800, 360),
        Gpu("H200 NVL", (9, 0), 141, 835, 4800, 42),
        Gpu("B200", (10, 0), 180, 2250, 8000, 720),
        # glennklockwood.com/garden/processors/B300: 2,250 dense, 8 TB/s; 288 GB of 10^9 bytes
        Gpu("B300", (10, 3), 268, 2250, 8000, 720),
        Gpu("GB200", (10, 0), 186, 2500, 8000, 720),
    )
}
_SMALLER: Dict[Tuple[str, int], float] = {  # GB/s of a card's smaller model, if it is slower
    ("A100", 40): 1555,
    ("A100 PCIe", 40): 1555,
    ("A800", 40): 1555,
    ("A800 PCIe", 40): 1555,
    ("P100 PCIe", 12): 549,
}
_SIZE = re.compile(r"(?<![a-z\d])(\d+) ?g(?:i?b)?\b")  # 80GB; GH200 144G; not A10G, which is a card
_LARGEST = 300  # GB; "GH200 480GB" names its processor's memory
_SAME = 0.1  # largest difference between a name and nvidia-smi: ECC, and 10^9 bytes instead of 2^30
_ASIDE = re.compile(r"nvidia|geforce|tesla|quadro|rtx|[^a-z0-9]")
_BOARD = re.compile(
    r"(?:sxm\d?|dgxs|hbm\d?e?|generation|ac|lc|pg\d+|oam|active)*"
)  # words without influence on the speed
_LINKED = 64  # GB/s of ``peer`` from which a card is an SXM board


def find(name: str) -> Gpu:
    """Return the card of a name: ``a100``, nvidia-smi's ``NVIDIA A100 80GB PCIe``, ``RTX 3090``.

    A size in the name is the card's memory: ``NVIDIA A100-SXM4-40GB`` has 40.

    Raises:
        ConfigError: the card is unknown.
    """
    words = name.lower()
    sizes = [int(size) for size in _SIZE.findall(words) if 0 < int(size) <= _LARGEST]
    word = _ASIDE.sub("", _SIZE.sub("", words))
    keys = {_ASIDE.sub("", key.lower()): card for key, card in GPUS.items()}
    fitting = [key for key in keys if word.startswith(key) and _is_board(word[len(key) :], keys[key])]
    if not fitting:
        hint = "--gpu A100, or --precision bf16 or fp16 without --gpu"
        raise ConfigError(f"--gpu {name}: not in the table of GPUs ({', '.join(GPUS)})", hint=hint)
    card = keys[max(fitting, key=len)]  # L40S before L4
    return card if not sizes else with_memory(card, sizes[0])


def with_memory(card: Gpu, size: float) -> Gpu:
    """Return the model of a card with this many GB; the card itself if that is about its memory."""
    if abs(size / card.memory - 1) < _SAME:
        return card
    slower = [speed for (name, sold), speed in _SMALLER.items() if name == card.name and abs(size / sold - 1) < _SAME]
    return replace(card, memory=float(size), bandwidth=slower[0] if slower else card.bandwidth)


def _is_board(rest: str, card: Gpu) -> bool:
    """Whether the rest of a card's name only describes its board."""
    if rest.startswith("pcie") and card.peer < _LINKED:
        rest = rest[len("pcie") :]
    return _BOARD.fullmatch(rest) is not None
