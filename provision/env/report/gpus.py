"""The cards of a GPU architecture.

Source: NVIDIA, "CUDA GPU Compute Capability" (developer.nvidia.com/cuda-gpus); the A800, H800 and H20 have the A100's
and H100's chips. Data centre cards come first, since clusters have those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

CARDS: Mapping[str, str] = {
    "sm_50": "GTX 750",
    "sm_52": "M40, M60",
    "sm_60": "P100",
    "sm_61": "P40, P4, GTX 10",
    "sm_70": "V100",
    "sm_75": "T4, RTX 20",
    "sm_80": "A100, A800, A30",
    "sm_86": "A40, A10, A16, RTX 30",
    "sm_87": "Jetson Orin",
    "sm_89": "L40S, L40, L4, RTX 40",
    "sm_90": "H100, H800, H200, H20, GH200",
    "sm_100": "B200, GB200",
    "sm_103": "B300, GB300",
    "sm_110": "Jetson Thor",
    "sm_120": "RTX PRO 6000, RTX 50",
    "sm_121": "GB10",
}

_ARCHITECTURE = re.compile(r"sm_(\d+)[af]?\Z")


def cards(architecture: str) -> str:
    """The cards of ``sm_90`` or ``sm_90a``; empty for an architecture that is not in the table."""
    match = _ARCHITECTURE.match(architecture)
    return CARDS.get(f"sm_{match[1]}", "") if match else ""


def order(architecture: str) -> tuple[int, str]:
    """A key that sorts architectures by number."""
    match = _ARCHITECTURE.match(architecture)
    return (int(match[1]) if match else 0, architecture)
