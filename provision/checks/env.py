"""The packed environment: the checks."""

import re
from collections.abc import Mapping

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
    groups,
    human,
    kib,
    majority,
    not_here,
    odd,
    ok,
    pairs,
    unknown,
    unread,
    warn,
)
from provision.checks.kit.gpu import PCI, VERSION, devices, kernel_module
from provision.checks.kit.infiniband import GPUDIRECT, dma_buf, driver, ports, sections
from provision.checks.kit.mounts import mount_of, mounts
from provision.env.release.examine import MACHINES
from provision.inventory import fold
from provision.render import quote


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
def memory(plan: Plan, node: str, answer: Answer) -> Judgement:
    """Two thresholds for each process.

    A process for each GPU, or as many as the inventory says. torch with its CUDA context alone took 0.6 GiB (2.11,
    H200); libraries, data loaders, pinned buffers and loading a checkpoint come on top. Both thresholds are this
    program's own rules of thumb: optimizers that are offloaded to the CPU need far more.
    """
    gpus = {each.name: each.gpus for each in plan.nodes}
    facts = pairs(answer)
    free = kib(facts.get("MemAvailable"))
    if free is None or not facts.get("gpus", "").isdecimal():
        return unread(answer)
    processes = gpus.get(node) or int(facts["gpus"]) or 1
    observed = f"{human(free)} free for {processes} process{'es' if processes > 1 else ''}"
    wanted = processes * plan.limits["process_gib"] * GIB
    fix = "end what holds the memory (ps -eo pid,user,rss,args --sort=-rss | head), or set gpus: to fewer"
    if free >= wanted:
        return ok(observed)
    if free >= processes * plan.limits["process_gib_least"] * GIB:
        return warn(observed, expected=human(wanted), fix=fix)
    return fail(observed, expected=human(wanted), fix=fix)


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
def glibc(plan: Plan, answer: Answer) -> Judgement:
    """FAIL for an older one, and for musl.

    The bundle's manifest holds the highest GLIBC_x.y that any of its ELF files asks for; a node's own comes from
    ``getconf GNU_LIBC_VERSION``. conda environments bring no C library of their own.
    """
    assert plan.manifest is not None
    wanted = plan.manifest.glibc
    found = re.search(r"^(?:glibc |ldd .*\s)(\d+\.\d+)\b", answer.out, flags=re.MULTILINE)
    fix = "pack the environment on a system as old as the node's, or update the node's"
    if not wanted:
        return ok("nothing in the bundle asks for a version")
    if found and _version(found[1]) >= _version(wanted):
        return ok(f"glibc {found[1]}, the bundle needs {wanted}")
    if found:
        return fail(f"glibc {found[1]}", expected=f"glibc {wanted} or later", fix=fix)
    if "musl " in answer.out:
        return fail("musl instead of glibc", expected=f"glibc {wanted} or later", fix=fix)
    return unknown("the node does not report its glibc")


@each_node(
    "env.platform",
    "the bundle was packed for the node's processor",
    probe=_GLIBC_PROBE,  # it prints the machine as well; both checks share one run
    bundle=True,
    why="No program of the environment starts: 'Exec format error'.",
)
def platform(plan: Plan, answer: Answer) -> Judgement:
    """FAIL for another platform."""
    assert plan.manifest is not None
    machine = pairs(answer).get("machine")
    if not machine:
        return unread(answer)
    here = f"linux-{MACHINES.get(machine, machine)}"
    if here == plan.manifest.platform:
        return ok(here)
    fix = f"pack the environment on a {here} machine"
    return fail(here, expected=plan.manifest.platform, fix=fix)


_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_V4 = _V3 | frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_FLAGS = {"x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4, "armv8-a": frozenset({"fp", "asimd"})}
_NOTICE = re.compile(r"were built for (\S+) and added")  # as provision/env/ops.py writes it


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
def ops(plan: Plan, answer: Answer) -> Judgement:
    """FAIL where instructions are missing.

    ``pack-env --with-ops`` builds DeepSpeed's ops for a CPU baseline and says so in the manifest's notices. The flags
    of a baseline: the x86-64 psABI, "Micro-architecture levels", by Linux's names (pni is SSE3, abm is LZCNT).
    """
    assert plan.manifest is not None
    baseline = next((found[1] for notice in plan.manifest.notices if (found := _NOTICE.search(notice))), "")
    listed = re.search(r"^(?:flags|Features)\s*: (.*)$", answer.out, flags=re.MULTILINE)
    if not baseline:
        return ok("the bundle has no prebuilt ops")
    if not listed or baseline not in _FLAGS:
        return unknown(f"whether it has the instructions of {baseline} is not known")
    if missing := sorted(_FLAGS[baseline] - set(listed[1].split())):
        fix = f"pack with --cpu-baseline {_best(listed[1].split())}, or without --with-ops"
        return fail(f"no {', '.join(missing)}", expected=f"the instructions of {baseline}", fix=fix)
    return ok(f"has the instructions of {baseline}")


_FIRST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580"}


def _possible(driver: str) -> str:
    fits = [major for major, first in _FIRST_DRIVERS.items() if _version(driver) >= _version(first)]
    return f"CUDA {max(fits)}" if fits else "an older CUDA"


@each_node(
    "env.cuda",
    "the driver is new enough for the bundle's CUDA",
    probe=f"{VERSION}{PCI}echo looked\n",
    bundle=True,
    why="No GPU is found ('The NVIDIA driver on your system is too old'): torch trains on the CPU, or ends.",
)
def cuda(plan: Plan, answer: Answer) -> Judgement:
    """FAIL for an older driver.

    Within a major version of CUDA every driver since its first will do. Source: NVIDIA, "CUDA Compatibility", minor
    version compatibility: CUDA 11 from 450.80.02 on, 12 from 525.60.13, 13 from 580.
    """
    assert plan.manifest is not None
    version = plan.manifest.versions.get("cuda") or ""
    if "looked" not in answer.lines:
        return unread(answer)
    if not version:
        return ok("the bundle has no CUDA")
    driver = kernel_module(answer.out)
    if not driver and not any(device.is_gpu for device in devices(answer)):
        return not_here("no GPU")
    if not driver:
        return unknown("no driver is loaded", fix="see the check gpu.module")
    major = int(re.split(r"\D", version)[0] or 0)
    if major not in _FIRST_DRIVERS:
        return unknown(f"which driver CUDA {version} needs is not known here; the node has {driver}")
    if _version(driver) >= _version(_FIRST_DRIVERS[major]):
        return ok(f"driver {driver}, CUDA {version}")
    fix = f"install a driver of {_FIRST_DRIVERS[major]} or later, or pack an environment with {_possible(driver)}"
    return fail(f"driver {driver}, CUDA {version}", expected=f"driver {_FIRST_DRIVERS[major]} or later", fix=fix)


_SEES_PEERMEM = (2, 23, 4)


@each_node(
    "env.nccl",
    "the bundle's NCCL sees the node's peer memory module",
    probe=GPUDIRECT,
    bundle=True,
    why="Every exchange between nodes goes through the host's memory: a tenth of the speed, and no message says so.",
)
def nccl(plan: Plan, answer: Answer) -> Judgement:
    """WARN for an NCCL that does not see nvidia_peermem where nothing else does the work.

    NCCL before 2.23.4 looks for ``/sys/kernel/mm/memory_peers/nv_mem*``, the older module's, and does not see
    nvidia_peermem, so that GPUDirect RDMA is silently off: 180 became 10 GB/s
    (github.com/NVIDIA/nccl/issues/1676). Where driver and kernel have dma-buf it needs neither.
    """
    assert plan.manifest is not None
    version, has_cuda = plan.manifest.versions.get("nccl") or "", bool(plan.manifest.versions.get("cuda"))
    found = ports(answer.out)
    if found is None:
        return unread(answer)
    if not found or not driver(answer.out) or not has_cuda:
        observed = "the bundle has no CUDA" if found and not has_cuda else "no GPU beside an RDMA adapter"
        return not_here(observed)
    if not version:
        return unknown(
            "the bundle does not record its NCCL version", fix="NCCL_DEBUG=VERSION prints it when training starts"
        )
    if dma_buf(answer.out):
        return ok(f"NCCL {version}, dma-buf")
    if not any("nvidia_peermem" in words for words, _ in sections(answer.out, "module")):
        return ok(f"NCCL {version}, no nvidia_peermem (see the check rdma.gdr)")
    older = any(words[:1] and words[0].startswith("nv_mem") for words, _ in sections(answer.out, "peer"))
    if older or tuple(int(part) for part in re.findall(r"\d+", version)[:3]) >= _SEES_PEERMEM:
        return ok(f"NCCL {version} sees nvidia_peermem")
    fix = "pack an environment with NCCL 2.23.4 or later, or install the open driver on Linux 5.12 or later"
    observed = f"NCCL {version} does not see nvidia_peermem"
    return warn(observed, expected="NCCL 2.23.4 or later", fix=fix)


_NONE = "no release"


def _same_probe(plan: Plan) -> str:
    """What the inventory's prefix is, where it leads, and whether that is whole."""
    return f"""\
prefix={quote(plan.inventory.prefix)}
if [ -L "$prefix" ]; then echo "is link"; elif [ -e "$prefix" ]; then echo "is other"; else echo "is nothing"; fi
if real=$(cd -- "$prefix" 2>/dev/null && pwd -P); then
    echo "release ${{real##*/}}"
    if [ -e "$real/.clusterctl/complete" ] && [ -e "$real.ok" ]; then echo "whole yes"; fi
    if [ -x "$real/bin/python" ]; then echo "python yes"; fi
fi
echo "looked yes"
"""


def _compare_releases(releases: Mapping[str, str], bundle: str) -> Judgements:
    used = set(releases.values())
    if used == {_NONE}:
        for node in releases:
            yield node, ok("nothing has been deployed yet")
    elif bundle and used != {bundle} and len(used) == 1:
        for node, release in releases.items():
            observed = f"release {release}, the bundle is {bundle}"
            yield node, warn(observed, expected=f"release {bundle}", fix="clusterctl deploy the bundle")
    else:
        yield from odd(releases, show=_release_text, fix="clusterctl deploy", verdict="FAIL")


def _release_text(release: str) -> str:
    return release if release == _NONE else f"release {release}"


@each_node(
    "env.same",
    "every node uses the same release of the environment",
    probe=_same_probe,
    why="Ranks with other versions of torch or NCCL hang at the first exchange, or train something else.",
)
def same(plan: Plan, answers: Answers) -> Judgements:
    """FAIL for a release that is broken or not that of most nodes, WARN for one that is not the bundle's.

    A release's name is made of the digest of everything in it; ``.clusterctl/complete`` comes last when it is unpacked,
    and the mark ``<id>.ok`` when it has been tried (docs/releases.md, "On a node").
    """
    prefix = plan.inventory.prefix
    releases = {}
    for node, answer in answers.items():
        facts = pairs(answer)
        release = facts.get("release", _NONE)
        if "looked" not in facts:
            yield node, unread(answer)
        elif facts.get("is") == "other":
            observed = f"{prefix} was not made by clusterctl"
            yield (
                node,
                fail(observed, expected="a link to a release", fix=f"move {prefix} away, or choose another prefix"),
            )
        elif release != _NONE and not ("whole" in facts and "python" in facts):
            yield node, fail(f"release {release} is not whole", expected="a whole release", fix="clusterctl deploy")
        elif facts.get("is") == "link" and release == _NONE:
            observed = f"{prefix} leads to a release that is not there"
            yield node, fail(observed, expected="a whole release", fix="clusterctl deploy")
        else:
            releases[node] = release
    yield from _compare_releases(releases, plan.manifest.release_id if plan.manifest else "")


_VARS_PROBE = """\
env | grep -E '^(NCCL_[A-Z0-9_]*|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_LAUNCH_BLOCKING)='
for file in /etc/nccl.conf "${NCCL_CONF_FILE:-$HOME/.nccl.conf}"; do
    [ -r "$file" ] || continue
    while read -r line; do
        case $line in NCCL_*=*) echo "$line" ;; esac
    done <"$file"
done
echo looked
"""
# What may differ from node to node, is set by clusterctl itself, or is none of NCCL's (images have NCCL_VERSION).
_FREE_SETTINGS = (
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_DEBUG",
    "NCCL_DEBUG_FILE",
    "NCCL_TOPO_FILE",
    "NCCL_VERSION",
)
_SLOW_SETTINGS = {
    "NCCL_P2P_DISABLE": "GPUs exchange data through the host's memory",
    "NCCL_SHM_DISABLE": "processes of a node exchange data through the network",
    "NCCL_IB_DISABLE": "NCCL does not use InfiniBand",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before it",
}
_OFF = ("", "0")


def _nccl_settings(given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(
        sorted((name, value) for name, value in given.items() if name[:5] == "NCCL_" and name not in _FREE_SETTINGS)
    )


def _settings_text(pairs: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{name}={value}" for name, value in pairs) or "nothing set"


def _bad_settings(given: Mapping[str, str]) -> str:
    found = [
        f"{name}={given[name]}: {means}" for name, means in _SLOW_SETTINGS.items() if given.get(name, "") not in _OFF
    ]
    if "CUDA_VISIBLE_DEVICES" in given:
        found.append(f"CUDA_VISIBLE_DEVICES={given['CUDA_VISIBLE_DEVICES']}: the other GPUs are hidden")
    if given.get("NCCL_NET", "").lower() == "socket":
        found.append("NCCL_NET=Socket: NCCL does not use InfiniBand")
    return "; ".join(found)


@each_node(
    "env.vars",
    "no variable of the node changes CUDA or NCCL",
    probe=_VARS_PROBE,
    why="NCCL's settings must agree on all ranks, else it hangs; some of them make it many times slower.",
)
def variables(plan: Plan, answers: Answers) -> Judgements:
    """FAIL where NCCL's settings differ, WARN for one that hides GPUs or makes NCCL slow.

    A process of the run inherits the environment of a non-interactive session (/etc/environment, PAM), and NCCL reads
    /etc/nccl.conf and ~/.nccl.conf ("Environment Variables" in its manual). What the inventory's ``train: env:`` sets
    wins.
    """
    found = {}
    for node, answer in answers.items():
        if "looked" not in answer.lines:
            yield node, unread(answer)
            continue
        given = dict(line.split("=", 1) for line in reversed(answer.lines) if "=" in line)  # the environment wins
        found[node] = {name: value for name, value in given.items() if name not in plan.inventory.train.env}
    shared = {node: _nccl_settings(given) for node, given in found.items()}
    usual = majority(shared)
    for node, given in found.items():
        fix = "set it for all nodes in the inventory (train: env:), and take it out of /etc/environment and nccl.conf"
        if usual is None or shared[node] != usual:
            other = usual if usual is not None else next(value for value in groups(shared) if value != shared[node])
            who = "the other nodes" if usual is not None else fold(groups(shared)[other])
            observed = f"{_settings_text(shared[node])}; {who}: {_settings_text(other)}"
            yield node, fail(observed, expected="the same on every node", fix=fix)
        elif bad := _bad_settings(given):
            yield node, warn(bad, expected="not set", fix=fix)
        else:
            yield node, ok(_settings_text(tuple(sorted(given.items()))))
