"""env.cuda: the driver is new enough for the bundle's CUDA.

Within a major version of CUDA every driver since its first will do. Source: NVIDIA, "CUDA Compatibility", minor version
compatibility: CUDA 11 from 450.80.02 on, 12 from 525.60.13, 13 from 580.
"""

import re

from provision.checks.kit import Answer, Answers, Judgement, Judgements, Plan, fail, not_here, ok, unknown, unread
from provision.checks.kit.gpu import PCI, VERSION, devices, kernel_module

TITLE = "the driver is new enough for the bundle's CUDA"
PROBE = f"{VERSION}{PCI}echo looked\n"
BUNDLE = True
WHY = "No GPU is found ('The NVIDIA driver on your system is too old'): torch trains on the CPU, or ends."

_FIRST = {11: "450.80.02", 12: "525.60.13", 13: "580"}


def judge(seen: Plan, answers: Answers) -> Judgements:
    """FAIL for an older driver."""
    assert seen.manifest is not None
    cuda = seen.manifest.versions.get("cuda") or ""
    for node, answer in answers.items():
        yield node, _judge(answer, cuda)


def _judge(answer: Answer, cuda: str) -> Judgement:
    if "looked" not in answer.lines:
        return unread(answer)
    if not cuda:
        return ok("the bundle has no CUDA")
    driver = kernel_module(answer.out)
    if not driver and not any(device.is_gpu for device in devices(answer)):
        return not_here("no GPU")
    if not driver:
        return unknown("no driver is loaded", fix="see the check gpu.module")
    major = int(re.split(r"\D", cuda)[0] or 0)
    if major not in _FIRST:
        return unknown(f"which driver CUDA {cuda} needs is not known here; the node has {driver}")
    if _version(driver) >= _version(_FIRST[major]):
        return ok(f"driver {driver}, CUDA {cuda}")
    fix = f"install a driver of {_FIRST[major]} or later, or pack an environment with {_possible(driver)}"
    return fail(f"driver {driver}, CUDA {cuda}", expected=f"driver {_FIRST[major]} or later", fix=fix)


def _possible(driver: str) -> str:
    fits = [major for major, first in _FIRST.items() if _version(driver) >= _version(first)]
    return f"CUDA {max(fits)}" if fits else "an older CUDA"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
