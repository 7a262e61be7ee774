"""The packed environment: the simple checks."""

import re

from provision.checks.kit import (
    GIB,
    GPUS,
    MEMORY,
    Answer,
    Answers,
    Judgement,
    Judgements,
    Plan,
    each_node,
    fail,
    human,
    kib,
    ok,
    pairs,
    unknown,
    unread,
    warn,
)
from provision.checks.kit.mounts import mount_of, mounts
from provision.env.release.examine import MACHINES


@each_node(
    "env.noexec",
    "compiled kernels can be loaded from /tmp",
    probe='cat /proc/self/mounts\necho "real $(readlink -f /tmp)"\n',
    why=(
        "Triton's and Inductor's kernels do not load: 'failed to map segment from shared object', minutes into the run."
    ),
)
def noexec(answer: Answer) -> Judgement:
    """FAIL for a mount with noexec.

    Compiled kernels and their launchers are shared libraries in caches below /tmp (``clusterctl train``) or in the
    home. A file system mounted ``noexec`` refuses to map them (mount(8)). The releases' own folder: the check
    fs.noexec.
    """
    mount = mount_of(mounts(answer), pairs(answer).get("real", ""))
    if mount is None:
        return unread(answer)
    if "noexec" in mount.options:
        fix = f"mount -o remount,exec {mount.target} (and in /etc/fstab), or set TRITON_CACHE_DIR in train.env"
        return fail(f"{mount.target} is mounted noexec", expected="exec", fix=fix)
    return ok(f"{mount.target} allows it")


@each_node(
    "env.memory",
    "the free memory is enough for the processes of a run",
    probe=MEMORY + GPUS,
    limits={"process_gib": 8, "process_gib_least": 2},
    why="The kernel kills a rank for lack of memory (exit code -9) while all others wait for it.",
)
def memory(seen: Plan, answers: Answers) -> Judgements:
    """Two thresholds for each process.

    A process for each GPU, or as many as the inventory says. torch with its CUDA context alone took 0.6 GiB (2.11,
    H200); libraries, data loaders, pinned buffers and loading a checkpoint come on top. Both thresholds are this
    program's own rules of thumb: optimizers that are offloaded to the CPU need far more.
    """
    gpus = {node.name: node.gpus for node in seen.nodes}
    for node, answer in answers.items():
        facts = pairs(answer)
        free = kib(facts.get("MemAvailable"))
        if free is None or not facts.get("gpus", "").isdecimal():
            yield node, unread(answer)
            continue
        processes = gpus.get(node) or int(facts["gpus"]) or 1
        observed = f"{human(free)} free for {processes} process{'es' if processes > 1 else ''}"
        wanted = processes * seen.limits["process_gib"] * GIB
        fix = "end what holds the memory (ps -eo pid,user,rss,args --sort=-rss | head), or set gpus: to fewer"
        if free >= wanted:
            yield node, ok(observed)
        elif free >= processes * seen.limits["process_gib_least"] * GIB:
            yield node, warn(observed, expected=human(wanted), fix=fix)
        else:
            yield node, fail(observed, expected=human(wanted), fix=fix)


_GLIBC_PROBE = """\
getconf GNU_LIBC_VERSION 2>/dev/null || ldd --version 2>&1 | head -n 1
for file in /lib/ld-musl-*; do [ ! -e "$file" ] || echo "musl $file"; done
echo "machine $(uname -m)"
"""


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


@each_node(
    "env.glibc",
    "the node's glibc is new enough for the bundle",
    probe=_GLIBC_PROBE,
    bundle=True,
    why="Python or a library does not start: 'version GLIBC_2.34 not found'.",
)
def glibc(seen: Plan, answers: Answers) -> Judgements:
    """FAIL for an older one, and for musl.

    The bundle's manifest holds the highest GLIBC_x.y that any of its ELF files asks for; a node's own comes from
    ``getconf GNU_LIBC_VERSION``. conda environments bring no C library of their own.
    """
    assert seen.manifest is not None
    wanted = seen.manifest.glibc
    for node, answer in answers.items():
        found = re.search(r"^(?:glibc |ldd .*\s)(\d+\.\d+)\b", answer.out, flags=re.MULTILINE)
        fix = "pack the environment on a system as old as the node's, or update the node's"
        if not wanted:
            yield node, ok("nothing in the bundle asks for a version")
        elif found and _version(found[1]) >= _version(wanted):
            yield node, ok(f"glibc {found[1]}, the bundle needs {wanted}")
        elif found:
            yield node, fail(f"glibc {found[1]}", expected=f"glibc {wanted} or later", fix=fix)
        elif "musl " in answer.out:
            yield node, fail("musl instead of glibc", expected=f"glibc {wanted} or later", fix=fix)
        else:
            yield node, unknown("the node does not report its glibc")


@each_node(
    "env.platform",
    "the bundle was packed for the node's processor",
    probe=_GLIBC_PROBE,  # it prints the machine as well; both checks share one run
    bundle=True,
    why="No program of the environment starts: 'Exec format error'.",
)
def platform(seen: Plan, answers: Answers) -> Judgements:
    """FAIL for another platform."""
    assert seen.manifest is not None
    for node, answer in answers.items():
        machine = pairs(answer).get("machine")
        if not machine:
            yield node, unread(answer)
            continue
        here = f"linux-{MACHINES.get(machine, machine)}"
        if here == seen.manifest.platform:
            yield node, ok(here)
        else:
            fix = f"pack the environment on a {here} machine"
            yield node, fail(here, expected=seen.manifest.platform, fix=fix)


_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"})


_V3 = _V2 | frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})


_V4 = _V3 | frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})


_FLAGS = {"x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4, "armv8-a": frozenset({"fp", "asimd"})}


_NOTICE = re.compile(r"were built for (\S+) and added")  # as provision/env/ops/prebuild.py has it


def _best(flags: list[str]) -> str:
    fitting = [name for name, needed in _FLAGS.items() if needed <= set(flags)]
    return fitting[-1] if fitting else "that the node has"


@each_node(
    "env.ops",
    "the processor has the instructions that prebuilt ops use",
    probe="grep -m 1 -E '^(flags|Features)' /proc/cpuinfo || echo none\n",
    bundle=True,
    why="DeepSpeed's optimizer on the CPU ends with SIGILL, 'Illegal instruction', at its first step.",
)
def ops(seen: Plan, answers: Answers) -> Judgements:
    """FAIL where instructions are missing.

    ``pack-env --with-ops`` builds DeepSpeed's ops for a CPU baseline and says so in the manifest's notices. The flags
    of a baseline: the x86-64 psABI, "Micro-architecture levels", by Linux's names (pni is SSE3, abm is LZCNT).
    """
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
