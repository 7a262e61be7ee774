"""gpu.arch: the bundle's torch was compiled for the GPUs.

Code for X.Y runs on every GPU of the same major version X whose minor is Y or more; sm_90a runs on 9.0 alone, sm_100f
within its family (CUDA C++ Programming Guide, "Binary Compatibility" and "Feature Set Compiler Targets"). Whether torch
has PTX as well, which the driver compiles at the first start, the manifest does not record.
"""

import re

from provision.checks.kit import Answers, Judgements, Plan, fail, ok, unknown
from provision.checks.kit.gpu import GPUS, SMI, gpus, ranges
from provision.env.overview import architecture_order, cards

TITLE = "torch was compiled for the GPUs"
TOOL = SMI
TIMEOUT = 20.0
PROBE = GPUS
BUNDLE = True
WHY = "The first kernel ends with 'no kernel image is available for execution on the device'."

_ARCHITECTURE = re.compile(r"sm_(\d+)(\d)([af]?)\Z")


def judge(plan: Plan, answers: Answers) -> Judgements:
    """FAIL for a GPU that no compiled architecture runs on."""
    assert plan.manifest is not None
    compiled = plan.manifest.gpu_architectures
    found = yield from gpus(answers, "compute_cap", "name")
    for node, row in found.items():
        if not plan.manifest.versions.get("cuda"):
            yield node, ok("the bundle has no CUDA build of torch")
            continue
        if compiled is None:
            fix = "python -c 'import torch; print(torch.cuda.get_arch_list())' where it was packed"
            yield node, unknown("the bundle does not record what torch was compiled for", fix=fix)
            continue
        bad = [gpu for gpu in row if not any(_runs(one, gpu["compute_cap"]) for one in compiled)]
        names = ", ".join(sorted(compiled, key=architecture_order)) or "no architecture"
        if bad:
            wanted = f"sm_{bad[0]['compute_cap'].replace('.', '')}"
            observed = f"GPU {ranges(gpu.index for gpu in bad)}: {bad[0]['name']} needs {wanted}, torch has {names}"
            fix = f"pack an environment whose torch was built for {cards(wanted) or wanted}: another wheel or version"
            yield node, fail(observed, expected=wanted, fix=fix)
        else:
            needed = sorted({f"sm_{gpu['compute_cap'].replace('.', '')}" for gpu in row}, key=architecture_order)
            yield node, ok(f"{', '.join(needed)}; torch has {names}")


def _runs(compiled: str, capability: str) -> bool:
    built = _ARCHITECTURE.match(compiled)
    major, _, minor = capability.partition(".")
    if built is None or not minor.isdecimal():
        return False
    if built[3] == "a":
        return (built[1], built[2]) == (major, minor)
    return built[1] == major and int(built[2]) <= int(minor)
