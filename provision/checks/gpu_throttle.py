"""gpu.throttle: no GPU is slowed down by heat or power.

Bits: NVML, "NvmlClocksEventReasons": 0x1 idle, 0x2 clocks set by a user, 0x4 the power cap, 0x8 hardware slowdown,
0x20 thermal slowdown by software, 0x40 by hardware, 0x80 power brake from outside. 0x1 and 0x4 are a healthy GPU's,
without and with work. Drivers before 535.54 know the field as clocks_throttle_reasons.active.
"""

from provision.checks.kit import Answers, Judgement, Judgements, fail, ok, unknown, warn
from provision.checks.kit.gpu import SMI, Gpu, each, gpus, query

_FIELDS = ("index", "clocks_event_reasons.active")

TITLE = "no GPU is slowed down by heat or power"
TOOL = SMI
TIMEOUT = 20.0
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


def judge(answers: Answers) -> Judgements:
    """FAIL for what the hardware does, WARN for what the driver does against heat."""
    found = yield from gpus(answers, _FIELDS[1], fields=_FIELDS)
    for node, row in found.items():
        yield node, _judge(row)


def _judge(row: tuple[Gpu, ...]) -> Judgement:
    try:
        masks = {gpu.index: int(gpu[_FIELDS[1]], 16) for gpu in row if gpu.has(_FIELDS[1])}
    except ValueError as error:
        return unknown(f"nvidia-smi's answer cannot be read: {error}")
    words = {
        index: ", ".join(word for bit, word in (_FAILS | _WARNS).items() if mask & bit) for index, mask in masks.items()
    }
    reasons = {index: text for index, text in words.items() if text}
    if not reasons:
        return ok("no GPU is slowed down")
    if any(mask & sum(_FAILS) for mask in masks.values()):
        return fail(each(reasons), expected="none", fix=_FIX)
    return warn(each(reasons), expected="none", fix=_FIX)
