"""env.ops: the node's processor has the instructions that prebuilt ops use.

``pack-env --with-ops`` builds DeepSpeed's ops for a CPU baseline and says so in the manifest's notices. The flags of a
baseline: the x86-64 psABI, "Micro-architecture levels", by Linux's names (pni is SSE3, abm is LZCNT).
"""

import re

from provision.checks.kit import Answers, Judgements, Plan, fail, ok, unknown

TITLE = "the processor has the instructions that prebuilt ops use"
PROBE = "grep -m 1 -E '^(flags|Features)' /proc/cpuinfo || echo none\n"
BUNDLE = True
WHY = "DeepSpeed's optimizer on the CPU ends with SIGILL, 'Illegal instruction', at its first step."

_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_V4 = _V3 | frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_FLAGS = {"x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4, "armv8-a": frozenset({"fp", "asimd"})}
_NOTICE = re.compile(r"were built for (\S+) and added")  # as provision/env/ops/prebuild.py has it


def judge(seen: Plan, answers: Answers) -> Judgements:
    """FAIL where instructions are missing."""
    assert seen.manifest is not None
    baseline = next((found[1] for notice in seen.manifest.notices if (found := _NOTICE.search(notice))), "")
    for node, answer in answers.items():
        listed = re.search(r"^(?:flags|Features)\s*: (.*)$", answer.out, flags=re.MULTILINE)
        if not baseline:
            yield node, ok("the bundle has no prebuilt ops")
        elif not listed or baseline not in _FLAGS:
            yield node, unknown(f"whether it has the instructions of {baseline} is not known")
        elif missing := sorted(_FLAGS[baseline] - set(listed[1].split())):
            fix = f"pack with --cpu-baseline {_best(listed[1].split())}, or without --with-ops"
            yield node, fail(f"no {', '.join(missing)}", expected=f"the instructions of {baseline}", fix=fix)
        else:
            yield node, ok(f"has the instructions of {baseline}")


def _best(flags: list[str]) -> str:
    fitting = [name for name, needed in _FLAGS.items() if needed <= set(flags)]
    return fitting[-1] if fitting else "that the node has"
