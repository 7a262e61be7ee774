"""Why a GPU's clock is lower than its maximum, in nvidia-smi's words.

The driver reports a mask (NVML, "NvmlClocksEventReasons"); a sample has the names of its bits: ``["sw_power_cap"]``.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

REASONS = (  # by bit, from the lowest; the names are those of nvidia-smi's clocks_event_reasons.*
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clock_setting",
)
OTHER = "other"  # bits of a newer driver
HARDWARE = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")  # these halve the clock, or worse
LOWERS = (  # those that slow a GPU down, the worst first
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "hw_slowdown",
    "sw_thermal_slowdown",
    "sw_power_cap",
    "sync_boost",
    "applications_clocks_setting",
    "display_clock_setting",
    OTHER,
)
_DIGITS = 18  # of a mask of 64 bits: 0x0000000000000004


def reasons(mask: str) -> Optional[List[str]]:
    """The names of a mask's bits; None for other text, such as "[N/A]"."""
    try:
        bits = int(mask, 16) if len(mask) <= _DIGITS else -1
    except ValueError:
        return None
    if bits < 0:
        return None
    found = [name for place, name in enumerate(REASONS) if bits >> place & 1]
    return found + ([OTHER] if bits >> len(REASONS) else [])


def slowing(found: Any) -> Tuple[str, ...]:
    """A sample's reasons that slow a GPU down, the worst first: a GPU without work has a low clock, too.

    ``hw_slowdown`` is omitted beside its cause. Skips unknown values.
    """
    known = {name for name in found if isinstance(name, str)} if isinstance(found, Sequence) else set()
    if known.intersection(HARDWARE[1:]):
        known.discard(HARDWARE[0])
    return tuple(name for name in LOWERS if name in known)
