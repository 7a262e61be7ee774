"""gpu.throttle: no GPU lowers its clocks because of heat or power.

Bits: NVML, "NvmlClocksEventReasons": 0x1 idle, 0x2 clocks set by a user, 0x4 the power cap, 0x8 hardware slowdown, 0x20
thermal slowdown by software, 0x40 by hardware, 0x80 power brake from outside. 0x1 and 0x4 are a healthy GPU's, without
and with work. Drivers before 535.54 know the field as clocks_throttle_reasons.active.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, ok, unknown, warn
from provision.checks._nvidia import SMI, each, gpus, query
from provision.model import Finding

ID = "gpu.throttle"
LEVEL = 0
TITLE = "no GPU is slowed down by heat or power"
TOOL = SMI
TIMEOUT = 20.0
_FIELDS = ("index", "clocks_event_reasons.active")
PROBE = f"""\
out=$({query(*_FIELDS)})
rc=$?
case $out in *'is not a valid field'*) exec {query("index", "clocks_throttle_reasons.active")} ;; esac
printf '%s\\n' "$out"
exit $rc
"""
WHY = "A GPU that is slowed down to half its clocks makes every rank of the run wait for it at every step."

_FAILS = {0x8: "hardware slowdown", 0x40: "thermal slowdown by the hardware", 0x80: "power brake from outside"}
_WARNS = {0x20: "thermal slowdown by the driver"}
_FIX = "look at fans, air flow and power supplies (ipmitool sdr); nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """FAIL for what the hardware does, WARN for what the driver does against heat."""
    found = yield from gpus(ID, answers, _FIELDS[1], fields=_FIELDS)
    for node, row in found.items():
        try:
            masks = {gpu.index: int(gpu[_FIELDS[1]], 16) for gpu in row if gpu.has(_FIELDS[1])}
        except ValueError as error:
            yield unknown(ID, node, f"nvidia-smi's answer cannot be read: {error}")
            continue
        reasons = {index: _words(mask) for index, mask in masks.items() if _words(mask)}
        if not reasons:
            yield ok(ID, node, "no GPU is slowed down")
        elif any(mask & sum(_FAILS) for mask in masks.values()):
            yield fail(ID, node, each(reasons), expected="none", fix=_FIX)
        else:
            yield warn(ID, node, each(reasons), expected="none", fix=_FIX)


def _words(mask: int) -> str:
    return ", ".join(word for bit, word in (_FAILS | _WARNS).items() if mask & bit)
