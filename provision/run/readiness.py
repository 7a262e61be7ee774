"""Judges whether nodes can take part in a run. Pure: the nodes' answers in, findings out.

The checks of ``provision/checks`` judge the answers to their probes. This module judges the agents' reports, the
programs on the GPUs of a run, and whether all nodes have the same data and models. ``tasks/gate.py`` asks the nodes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from provision.checks.kit.gpu import SMI
from provision.checks.kit.host import many
from provision.checks.kit.measures import detail, heard
from provision.checks.kit.probing import Probe
from provision.errors import PreflightError
from provision.hints import again
from provision.inventory import fold
from provision.model import Finding
from provision.run.fields import conform
from trainer.agent.contract.untrusted import UntrustedError, parse_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from provision.checks import Answer
    from provision.model import CommandLine, Node
    from provision.run import Facts

DISK_LEAST = 256 << 20  # bytes that the logs and the tokenized data need at least
DISK_SMALL = 5 << 30

# Checks whose failures do not stop a run, and why.
_SOFT = {
    "gpu.xid": "since the node booted; the GPU may have been reset since",
    "ib.state": "NCCL falls back to TCP",
}
_SOFT_WITHOUT_GPUS = {"mem.shm": "too small for data loaders with several workers"}
# Checks whose warnings do not concern a run.
_QUIET = frozenset({"lim.memlock"})


def reachable(nodes: Sequence[Node], facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Whether every node reaches rank 0 and its interface is known, and whether rank 0 has a port."""
    master = nodes[0]
    for rank, node in enumerate(nodes):
        known = facts[node.name]
        if known.port_free is False:
            fix = "set another train.port, or omit it to use any free port"
            yield _fail("gate.port", node, known.error or "the port is in use", fix)
        elif known.error:
            yield _fail("gate.master", node, known.error, f"clusterctl check --level 1 --only net --limit {node.name}")
        elif len(nodes) > 1 and known.interface == "lo":
            observed = f"{master.train_address} resolves to {known.master_ip}, which other nodes cannot reach"
            fix = f"give {master.name} a network address (data_address), or correct /etc/hosts on {node.name}"
            yield _fail("gate.master", node, observed, fix)
        elif known.rank != rank:
            yield _fail(
                "gate.rank",
                node,
                f"its agent reports rank {known.rank}; the node has rank {rank}",
                "start the run again",
            )
        elif len(nodes) > 1 and known.hostname_resolves == "loopback":
            observed = (
                f"its host name {known.hostname} resolves to a loopback address; this run sets the interfaces, but "
                "programs started by hand may hang"
            )
            yield _warn("gate.master", node, observed, f"put its network address for {known.hostname} into /etc/hosts")
        else:
            yield Finding("gate.master", node.name, "OK", f"over {known.interface}")


def machines(nodes: Sequence[Node], facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Whether every node is a separate machine: with two names for one machine, a rank would wait forever."""
    seen: dict[tuple[str, str | None], str] = {}
    for node in nodes:
        known = facts[node.name]
        twin = seen.setdefault((known.boot_id, known.ip), node.name) if known.boot_id else node.name
        if twin != node.name:
            yield _fail("gate.machine", node, f"is the same machine as {twin}", "correct its address in the inventory")


def releases(nodes: Sequence[Node], found: Mapping[str, str]) -> Iterator[Finding]:
    """Whether all nodes have the same release. FAIL for those that differ from most; for all without a majority."""
    (usual, count), *others = Counter(found[node.name] for node in nodes).most_common()
    settled = not others or 2 * count > len(nodes)
    for node in nodes:
        if not settled or found[node.name] != usual:
            observed = f"has release {found[node.name]}" + (f"; {count} other nodes have {usual}" if settled else "")
            yield _fail("gate.release", node, observed, "clusterctl deploy")


def room(nodes: Sequence[Node], facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Whether the disk of the run's folder has space, and each process a GPU."""
    for node in nodes:
        known = facts[node.name]
        free = f"{known.disk_free / (1 << 30):.1f} GiB free for the run's folder"
        if known.disk_free < DISK_LEAST:
            yield _fail("gate.disk", node, free, "clusterctl prune, or free disk space: df -h")
        elif known.disk_free < DISK_SMALL:
            yield _warn("gate.disk", node, free, "a checkpoint may not fit; clusterctl prune, or another output_dir")
        if known.gpus and node.gpus and node.gpus > known.gpus:
            observed = f"has {known.gpus} GPUs, but the inventory says gpus: {node.gpus}"
            yield _fail(
                "gate.gpus", node, observed, f"correct gpus:, or see clusterctl check --only gpu --limit {node.name}"
            )


def best_model(nodes: Sequence[Node], settings: Mapping[str, Any], *, is_shared: bool) -> Iterator[Finding]:
    """Whether every node has the best checkpoint at the end of a training with DeepSpeed.

    The Trainer loads it on every rank (``load_best_model_at_end``), but only rank 0's node has the model's states
    (https://github.com/hiyouga/LlamaFactory/issues/5757).

    Args:
        nodes: in the order of their ranks.
        settings: the values of the run's config.
        is_shared: whether the nodes share the disk of the run's folder.
    """
    output = str(settings.get("output_dir", ""))
    if is_shared or not settings.get("deepspeed") or PurePosixPath(output).is_absolute():
        return
    if settings.get("load_best_model_at_end") and not settings.get("save_on_each_node"):
        for node in nodes[1:]:
            observed = (
                f"load_best_model_at_end: true needs the checkpoints of {nodes[0].name}, which shares no disk with it"
            )
            fix = "an output_dir on a shared disk, or load_best_model_at_end: false"
            yield _fail("gate.checkpoints", node, observed, fix)


def runs(nodes: Sequence[Node], facts: Mapping[str, Facts], visible: Mapping[str, str]) -> Iterator[Finding]:
    """Other runs on the same GPUs, and processes of runs whose agent no longer exists.

    Args:
        nodes: the nodes of the run.
        facts: by node name.
        visible: by node name, the run's CUDA_VISIBLE_DEVICES; a node that is not named uses all GPUs.
    """
    for node in nodes:
        known = facts[node.name]
        for run in known.runs:
            whose = f"{run['run']} of {run['user']}"
            mine, others = visible.get(node.name), run["visible"]
            apart = mine is not None and others is not None and not devices(mine) & devices(others)
            is_bad = bool(known.gpus) and not apart
            if not run["agent"]:
                count = len(run["pids"])
                observed = (
                    f"{count} process{'es' if count > 1 else ''} left of run {whose}, whose agent no longer exists"
                )
                fix = f"to stop them: clusterctl stop {run['run']}"
            else:
                where = "on the same GPUs" if is_bad else "on other GPUs" if known.gpus else "on the same cores"
                observed = f"run {whose} is running {where}"
                fix = f"wait for it (clusterctl status {run['run']}), or clusterctl stop {run['run']}"
            yield (_fail if is_bad else _warn)("gate.runs", node, observed, fix)


def devices(visible: str) -> frozenset[str]:
    """The GPUs that a CUDA_VISIBLE_DEVICES names."""
    return frozenset(word for word in (each.strip() for each in visible.split(",")) if word and word != "-1")


def linked(nodes: Sequence[Node], answers: Mapping[str, Answer], port: int | None) -> Iterator[Finding]:
    """Whether all agents reach the agent of rank 0, whose port is not MASTER_PORT."""
    master = nodes[0]
    tried = {node.name: heard(answers[node.name]).to(master.name, "link") for node in nodes[1:] if node.name in answers}
    failed = {name: one for name, one in tried.items() if one and one.state != "open"}
    all_failed = len(failed) > 1 and len(failed) == len(tried)
    for node in nodes[1:]:
        if node.name in failed and port:
            observed, fix = detail(failed[node.name], master, port)
            if not all_failed:
                yield _fail("gate.link", node, observed, fix)
    if all_failed and port:
        observed, fix = detail(next(iter(failed.values())), master, port)
        yield _fail("gate.link", master, f"none of the {len(failed)} nodes can reach the agent's port: {observed}", fix)


def weighed(findings: Iterable[Finding], facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """The checks' findings as they count for a run: some failures become warnings, and some warnings OK."""
    for each in findings:
        known = facts.get(each.node)
        soft = _SOFT.get(each.check) or (_SOFT_WITHOUT_GPUS.get(each.check) if known and not known.gpus else None)
        if each.verdict == "FAIL" and soft:
            yield replace(each, verdict="WARN", observed=f"{each.observed} ({soft})")
        elif each.verdict == "WARN" and each.check in _QUIET:
            yield replace(each, verdict="OK")
        else:
            yield each


def reasons(nodes: Sequence[Node], findings: Iterable[Finding], verdict: str = "FAIL") -> dict[str, str]:
    """Why nodes cannot take part, in the order of the nodes: a line for each finding, with its fix."""
    found: dict[str, list[str]] = {}
    for each in findings:
        if each.verdict == verdict:
            fix = f"; {each.fix}" if each.fix else ""
            found.setdefault(each.node, []).append(f"{each.observed}{fix} ({each.check})")
    return {node.name: "\n".join(dict.fromkeys(found[node.name])) for node in nodes if node.name in found}


def hopeless(nodes: Sequence[Node], facts: Mapping[str, Facts]) -> tuple[str, ...]:
    """Nodes on which ``--force`` has no effect: a plan needs an interface, and rank 0's plan a port."""
    without = [node.name for rank, node in enumerate(nodes) if facts[node.name].interface is None
               or (rank == 0 and facts[node.name].port is None)]  # fmt: skip
    return tuple(without)


def _fail(check: str, node: Node, observed: str, fix: str) -> Finding:
    return Finding(check, node.name, "FAIL", observed, fix=fix)


def _warn(check: str, node: Node, observed: str, fix: str) -> Finding:
    return Finding(check, node.name, "WARN", observed, fix=fix)


# --- programs on the GPUs ------------------------------------------------------------------------

# The check gpu.busy fails for any process. The gate fails only for a process that holds much memory: services such as
# DCGM or MPS always hold a few dozen MiB.

GPU_CHECK = "gpu.gate"
LEAST = 256  # MiB
_MIB = re.compile("[0-9]{1,9}")  # nvidia-smi prints "[N/A]" if it is unknown

# ``gpu INDEX, UUID``, then a line for each process and GPU, with the login name of its owner before it.
_TEXT = f"""\
{SMI} --query-gpu=index,uuid --format=csv,noheader | sed 's/^/gpu /'
{SMI} --query-compute-apps=pid,used_memory,gpu_uuid,process_name --format=csv,noheader,nounits |
    while IFS= read -r line; do
        pid=${{line%%,*}}
        case $pid in '' | *[!0-9]*) continue ;; esac
        owner=$(stat -c %U "/proc/$pid" 2>/dev/null) || owner=unknown
        printf 'process %s, %s\\n' "$owner" "$line"
    done
"""
PROBE = Probe(GPU_CHECK, _TEXT, 20, SMI)


def busy(
    nodes: Sequence[Node], answers: Mapping[str, Answer], facts: Mapping[str, Facts], visible: Mapping[str, str]
) -> Iterator[Finding]:
    """FAIL for programs outside clusterctl's runs (see ``readiness.runs``) that hold GPU memory.

    Args:
        nodes: the nodes of the run.
        answers: by node name, the answers to ``PROBE``.
        facts: by node name.
        visible: by node name, the run's CUDA_VISIBLE_DEVICES; a node that is not named uses all GPUs.
    """
    for node in nodes:
        answer = answers.get(node.name)
        if answer is None or answer.state != "answered":
            continue  # no nvidia-smi, or one that hangs: the check gpu.driver reports it
        ours = {pid for run in facts[node.name].runs for pid in run["pids"]}
        wanted = _wanted(answer, facts[node.name], node, visible.get(node.name))
        found: dict[int, tuple[str, str, list[str], list[str]]] = {}
        for owner, pid, used, index, name in _processes(answer):
            elsewhere = wanted is not None and index not in wanted
            if int(pid) in ours or elsewhere or (_MIB.fullmatch(used) and int(used) < LEAST):
                continue
            entry = found.setdefault(int(pid), (owner, name.rsplit("/", 1)[-1], [], []))
            entry[2].append(index)
            entry[3].append(used)
        if found:
            shown = [_holder(pid, *entry) for pid, entry in list(found.items())[:8]]
            observed = "; ".join(shown) + (f"; {len(found) - 8} more" if len(found) > 8 else "")
            fix = f"wait, or ask the owner: ps -fp {','.join(map(str, list(found)[:8]))} on {node.name}"
            yield Finding(GPU_CHECK, node.name, "FAIL", observed, "no other program", fix=fix)


def _holder(pid: int, owner: str, name: str, gpus: list[str], used: list[str]) -> str:
    memory = f"{sum(map(int, used))} MiB" if all(map(_MIB.fullmatch, used)) else "memory"
    return f"process {pid} ({name}) of {owner} holds {memory} of GPU {', '.join(gpus)}"


def _processes(answer: Answer) -> Iterator[tuple[str, str, str, str, str]]:
    """Owner, pid, MiB, index of the GPU, program."""
    index = dict(re.findall(r"^gpu (\d{1,9}), (\S+)$", answer.out, flags=re.MULTILINE))
    by_uuid = {uuid: number for number, uuid in index.items()}
    for owner, pid, used, uuid, name in re.findall(
        r"^process (.*?), (\d{1,18}), (.*?), (.*?), (.*)$", answer.out, flags=re.MULTILINE
    ):
        yield owner, pid, used, by_uuid.get(uuid, uuid), name


def _wanted(answer: Answer, facts: Facts, node: Node, visible: str | None) -> frozenset[str] | None:
    """The indexes of the GPUs that the run will use on the node; None for all."""
    if visible is not None:
        uuids = re.findall(r"^gpu (\d{1,9}), (\S+)$", answer.out, flags=re.MULTILINE)
        return devices(visible) | {
            index for index, uuid in uuids for word in devices(visible) if word[:4] == "GPU-" and uuid.startswith(word)
        }
    if node.gpus and node.gpus < facts.gpus:
        return frozenset(str(number) for number in range(node.gpus))
    return None


# --- data and models on the nodes ----------------------------------------------------------------

# ``trainer/agent/talk.py`` takes the fingerprints and explains them.

DATA_CHECK = "gate.data"
_CONTENT_LIMIT = 8 << 20  # characters of an answer
_ENTRY = re.compile(r"-?[0-9]{1,20} \S{1,64}")
_WHY = "Ranks with other data or another model train something else. A rank without the data fails while others wait."
_EXPECTED = "the same content on every node"
_COPY = "copy it there: clusterctl push SOURCE {path} --limit {nodes}"


@dataclass(frozen=True)
class Content:
    """A node's file or folder at a path."""

    state: str = "missing"
    error: str = ""
    names: str = ""
    content: str = ""
    partial: bool = False
    files: int = 0
    bytes: int = 0
    entries: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse an entry that cannot be compared.

        Raises:
            UntrustedError: one is not ``SIZE DIGEST``.
        """
        if not all(isinstance(each, str) and _ENTRY.fullmatch(each) for each in self.entries.values()):
            raise UntrustedError("has an invalid entry")

    def unlike(self, other: Content) -> str | None:
        """How this differs from another one, in a few words; None if the parts that were read are equal."""
        if self.state != other.state:
            return f"is a {self.state}, not a {other.state}"
        if self.entries and other.entries:
            for name in sorted(self.entries.keys() | other.entries.keys()):
                if word := _difference(self.entries.get(name), other.entries.get(name)):
                    return f"{word} {name}" if name else word
        elif self.names and other.names and self.names != other.names:
            return f"has different names or sizes ({self.files} files, not {other.files})"
        elif not (self.partial or other.partial) and self.content != other.content:
            return "has different content"
        return None


def parse_content(text: str) -> dict[str, Content]:
    """Parse the agent's line: the content at each path. Empty if it is not the agent's line."""
    try:
        contents = parse_object(text, limit=_CONTENT_LIMIT)
    except UntrustedError:
        return {}
    return {path: found for path, one in contents.items() if (found := _content(one)) is not None}


def _content(value: Any) -> Content | None:
    if not isinstance(value, dict):
        return None
    try:
        return Content(**conform(Content, value))
    except UntrustedError:
        return None


def compare_content(path: str, found: Mapping[str, Content], *, what: str = "") -> Iterator[Finding]:
    """A finding for every node: FAIL if the path is missing, cannot be read or differs from most nodes.

    Without a majority every node fails, because the right content is unknown.

    Args:
        path: absolute.
        found: the content by node name.
        what: its name in messages, such as ``model_name_or_path``.
    """
    shown = f"{what} {path}" if what else path
    there = {name: each for name, each in found.items() if each.state in {"file", "folder"}}
    groups = _groups(there)
    right = groups[0] if len(groups) == 1 or (groups and 2 * len(groups[0]) > len(found)) else ()
    for name, each in found.items():
        if each.state == "missing":
            observed = f"{shown} is missing; it exists on {fold(there)} only" if there else f"{shown} is missing"
            fix = _COPY.format(path=path, nodes=name) if there else "correct the path, or copy the files there"
            yield _content_fail(name, observed, fix)
        elif name not in there:
            yield _content_fail(name, f"{shown}: {each.error}", "look at it with ls -la; does its file system answer?")
        elif right and name in right:
            observed = f"{shown}: {many(each.files, 'file')}"
            yield Finding(
                DATA_CHECK, name, "OK", f"{observed}, compared by name and size" if each.partial else observed
            )
        elif right:
            how = each.unlike(found[right[0]]) or "is different"
            yield _content_fail(
                name, f"{shown} {how}, compared with {fold(right)}", _COPY.format(path=path, nodes=name)
            )
        else:
            others = next(group for group in groups if name not in group)
            how = each.unlike(found[others[0]]) or "is different"
            yield _content_fail(
                name, f"{shown} {how}, compared with {fold(others)}", _COPY.format(path=path, nodes="NODES")
            )


def _groups(found: Mapping[str, Content]) -> list[tuple[str, ...]]:
    """The nodes grouped by content, the largest group first."""
    groups: list[list[str]] = []
    for name, each in found.items():
        group = next((one for one in groups if each.unlike(found[one[0]]) is None), None)
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    return sorted((tuple(group) for group in groups), key=lambda group: -len(group))


def _difference(mine: str | None, theirs: str | None) -> str:
    """The words before the name of a file that differs; "" if it does not."""
    if mine is None:
        return "lacks"
    if theirs is None:
        return "has the extra file"
    (size, digest), (other_size, other_digest) = mine.split(), theirs.split()
    if size != other_size:
        return f"has {size} bytes, not {other_size}, in"
    return "has different content in" if "-" not in {digest, other_digest} and digest != other_digest else ""


def _content_fail(node: str, observed: str, fix: str) -> Finding:
    return Finding(DATA_CHECK, node, "FAIL", observed, _EXPECTED, _WHY, fix)


# --- messages ------------------------------------------------------------------------------------

_SHOWN = 12  # warnings of one run that are printed


def refusal(
    nodes: Sequence[Node], bad: Mapping[str, str], rest: Sequence[Node], *, exclude: str, way: str
) -> PreflightError:
    """The error for nodes that cannot take part.

    Args:
        nodes: the nodes that the gate asked.
        bad: the nodes that cannot take part, each with its reasons.
        rest: the other nodes.
        exclude: the command that continues with the rest; "" if there is none.
        way: another way to continue; "" if there is none.
    """
    others = rest and exclude
    ways = [f"to continue with {fold(node.name for node in rest)}: {exclude}" if others else "fix the errors above"]
    ways += [way] if way else []
    count = f"{len(bad)} of {len(nodes)} nodes" if len(nodes) > 1 else nodes[0].name
    text = f"{count} cannot take part in the run; nothing was started"
    return PreflightError(text, reasons=bad, hint="; ".join(ways))


def warnings(findings: Iterable[Finding]) -> Iterator[str]:
    """A sentence for every warning, with the nodes that have it."""
    warned: dict[str, list[str]] = {}
    for each in findings:
        if each.verdict == "WARN":
            warned.setdefault(f"{each.observed}{f'; {each.fix}' if each.fix else ''}", []).append(each.node)
    for text, names in list(warned.items())[:_SHOWN]:
        yield f"{fold(names)}: {text}"
    if len(warned) > _SHOWN:
        yield f"{len(warned) - _SHOWN} more warnings: clusterctl check"


def dropped(
    before: Sequence[Node],
    left: Sequence[Node],
    out: Mapping[str, str],
    *,
    spare: Sequence[str],
    asked: int | None,
    typed: CommandLine,
) -> Iterator[str]:
    """The messages about skipped nodes, changed ranks, and spare nodes.

    Args:
        before: the chosen nodes.
        left: the nodes that take part.
        out: the skipped nodes, each with its reasons.
        spare: nodes of the inventory that were not chosen.
        asked: the requested number of nodes, if any.
        typed: the user's command.
    """
    if not out:
        return
    for name, why in out.items():
        yield f"without {name}: {why}"
    moved = renumbered(left, before)
    names = fold(node.name for node in left)
    yield f"continuing with {len(left)} of {len(before)} nodes: {names}" + (f"; {moved}" if moved else "")
    if spare and asked:
        are = "is" if len(spare) == 1 else "are"
        how = again(typed, "train", exclude=fold(out), nodes=str(asked))
        yield f"{fold(spare)} {are} not used and could replace them: {how}"


def renumbered(nodes: Sequence[Node], before: Sequence[Node]) -> str:
    """The changed ranks: ``node03 is rank 1, node04 is rank 2``; empty if none has changed."""
    old = {node.name: rank for rank, node in enumerate(before)}
    moved = [f"{node.name} is rank {rank}" for rank, node in enumerate(nodes) if old[node.name] != rank]
    return (
        ", ".join(moved) if len(moved) <= 8 else f"{fold(node.name for node in nodes)} are ranks 0 to {len(nodes) - 1}"
    )
