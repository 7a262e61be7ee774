"""The processors that an op is built for."""

from __future__ import annotations

from dataclasses import dataclass

from provision.errors import UsageError


@dataclass(frozen=True)
class Baseline:
    """A set of instructions that every node has.

    Attributes:
        name: as compilers know it (``-march``).
        platform: conda's name of the platform.
        simd: the macro that tells DeepSpeed's sources how wide their vectors may be (``csrc/includes/simd.h``).
    """

    name: str
    platform: str
    simd: str


# x86-64-v3 (AVX2, FMA, F16C) is every server since Haswell (2013) and Zen (2017), v4 (AVX-512) Skylake-SP and Zen 4.
# Source: the x86-64 psABI, "Micro-architecture levels".
BASELINES = (
    Baseline("x86-64-v3", "linux-64", "__AVX256__"),
    Baseline("x86-64-v4", "linux-64", "__AVX512__"),
    Baseline("x86-64-v2", "linux-64", "__SCALAR__"),
    Baseline("armv8-a", "linux-aarch64", "__NEON__"),
)


def choose(name: str | None, platform: str) -> Baseline | None:
    """The baseline of that name, or the platform's usual one; None for a platform that has none.

    Raises:
        UsageError: no such baseline for this platform.
    """
    known = [one for one in BASELINES if one.platform == platform]
    if name is None:
        return known[0] if known else None
    for one in known:
        if one.name == name:
            return one
    names = ", ".join(one.name for one in known) or "none"
    raise UsageError(f"{name!r} is no CPU baseline for {platform}", hint=f"known: {names}")
