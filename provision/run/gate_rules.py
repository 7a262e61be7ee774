"""What of the nodes' own facts lets a run hang, crash or get into another's way. Pure: facts in, findings out.

The checks of ``provision/checks`` judge what their probes brought; this judges what the run's agent has said.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from provision.checks.kit.measures import detail, heard
from provision.model import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from provision.checks import Answer
    from provision.model import Node
    from provision.run import Facts

DISK_LEAST = 256 << 20  # bytes without which not even the logs and the tokenized data have room
DISK_SMALL = 5 << 30

# What a check fails for that need not stop a run, and why.
_SOFT = {
    "gpu.xid": "since the node was started; the GPU may have been reset since",
    "ib.state": "NCCL uses TCP meanwhile",
}
_SOFT_WITHOUT_GPUS = {"mem.shm": "it is small for data loaders with several workers"}
# Warnings that say nothing about the run that is to be started.
_QUIET = frozenset({"lim.memlock"})


def reachable(nodes: Sequence[Node], facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Whether every node has a way to rank 0 and an interface that carries it, and rank 0 a port."""
    master = nodes[0]
    for rank, node in enumerate(nodes):
        told = facts[node.name]
        if told.port_free is False:
            said, fix = told.error or "the port is in use", "name another train.port, or none: then a free one is found"
            yield _fail("gate.port", node, said, fix)
        elif told.error:
            yield _fail("gate.master", node, told.error, f"clusterctl check --level 1 --only net --limit {node.name}")
        elif len(nodes) > 1 and told.interface == "lo":
            said = f"{master.train_address} means {told.master_ip} there, an address no other node can reach"
            fix = f"give {master.name} an address (data_address) on the network, or correct /etc/hosts on {node.name}"
            yield _fail("gate.master", node, said, fix)
        elif told.rank != rank:
            yield _fail("gate.rank", node, f"it takes itself for rank {told.rank}, and is {rank}", "start again")
        elif len(nodes) > 1 and told.hostname_resolves == "loopback":
            said = f"its host name {told.hostname} is a loopback address; this run names its interfaces, others hang"
            yield _warn("gate.master", node, said, f"write its network address for {told.hostname} into /etc/hosts")
        else:
            yield Finding("gate.master", node.name, "OK", f"over {told.interface}")


def machines(nodes: Sequence[Node], facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Whether every node is a machine of its own: of two names for one, one would wait for a rank that never comes."""
    seen: dict[tuple[str, str | None], str] = {}
    for node in nodes:
        told = facts[node.name]
        twin = seen.setdefault((told.boot_id, told.ip), node.name) if told.boot_id else node.name
        if twin != node.name:
            yield _fail("gate.machine", node, f"is the same machine as {twin}", "correct its address in the inventory")


def releases(nodes: Sequence[Node], found: Mapping[str, str]) -> Iterator[Finding]:
    """Whether all nodes have one environment: FAIL where it is not that of most, on all where none is."""
    (usual, count), *others = Counter(found[node.name] for node in nodes).most_common()
    settled = not others or 2 * count > len(nodes)
    for node in nodes:
        if not settled or found[node.name] != usual:
            said = f"has release {found[node.name]}" + (f", {count} others have {usual}" if settled else "")
            yield _fail("gate.release", node, said, "clusterctl deploy")


def room(nodes: Sequence[Node], facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Whether the disk of the run's folder has room, and each process its GPU."""
    for node in nodes:
        told = facts[node.name]
        free = f"{told.disk_free / (1 << 30):.1f} GiB free for the run's folder"
        if told.disk_free < DISK_LEAST:
            yield _fail("gate.disk", node, free, "clusterctl prune, or see what fills the disk: df -h")
        elif told.disk_free < DISK_SMALL:
            yield _warn("gate.disk", node, free, "a checkpoint may not fit; clusterctl prune, or another output_dir")
        if told.gpus and node.gpus and node.gpus > told.gpus:
            said = f"{told.gpus} GPUs, and gpus: {node.gpus} in the inventory"
            yield _fail(
                "gate.gpus", node, said, f"correct gpus:, or see clusterctl check --only gpu --limit {node.name}"
            )


def runs(nodes: Sequence[Node], facts: Mapping[str, Facts], visible: Mapping[str, str]) -> Iterator[Finding]:
    """Other runs on the same GPUs, and what is left of runs that have lost their agent.

    Args:
        nodes: that shall take part.
        facts: of each.
        visible: by node name, the CUDA_VISIBLE_DEVICES that the run will have; all GPUs of nodes not named.
    """
    for node in nodes:
        told = facts[node.name]
        for run in told.runs:
            whose = f"{run['run']} of {run['user']}"
            mine, others = visible.get(node.name), run["visible"]
            apart = mine is not None and others is not None and not devices(mine) & devices(others)
            is_bad = bool(told.gpus) and not apart
            if not run["agent"]:
                count = len(run["pids"])
                said = f"{count} process{'es' if count > 1 else ''} left of run {whose}, whose agent is gone"
                fix = f"to end them: clusterctl stop {run['run']}"
            else:
                where = "on the same GPUs" if is_bad else "on other GPUs" if told.gpus else "on the same cores"
                said = f"run {whose} is at work {where}"
                fix = f"wait for it (clusterctl status {run['run']}), or clusterctl stop {run['run']}"
            yield (_fail if is_bad else _warn)("gate.runs", node, said, fix)


def devices(visible: str) -> frozenset[str]:
    """The GPUs that a CUDA_VISIBLE_DEVICES names."""
    return frozenset(word for word in (each.strip() for each in visible.split(",")) if word and word != "-1")


def linked(nodes: Sequence[Node], answers: Mapping[str, Answer], port: int | None) -> Iterator[Finding]:
    """Whether the agents of all nodes reach that of rank 0, which is at another port than MASTER_PORT."""
    master = nodes[0]
    tried = {node.name: heard(answers[node.name]).to(master.name, "link") for node in nodes[1:] if node.name in answers}
    failed = {name: one for name, one in tried.items() if one and one.state != "open"}
    everybody = len(failed) > 1 and len(failed) == len(tried)
    for node in nodes[1:]:
        if node.name in failed and port:
            said, fix = detail(failed[node.name], master, port)
            if not everybody:
                yield _fail("gate.link", node, said, fix)
    if everybody and port:
        said, fix = detail(next(iter(failed.values())), master, port)
        yield _fail("gate.link", master, f"none of {len(failed)} nodes reaches the agent's port: {said}", fix)


def weighed(findings: Iterable[Finding], facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """The findings of checks as they count for a run: what does not stop one is a warning, what means nothing is OK."""
    for each in findings:
        told = facts.get(each.node)
        soft = _SOFT.get(each.check) or (_SOFT_WITHOUT_GPUS.get(each.check) if told and not told.gpus else None)
        if each.verdict == "FAIL" and soft:
            yield replace(each, verdict="WARN", observed=f"{each.observed} ({soft})")
        elif each.verdict == "WARN" and each.check in _QUIET:
            yield replace(each, verdict="OK")
        else:
            yield each


def reasons(nodes: Sequence[Node], findings: Iterable[Finding], verdict: str = "FAIL") -> dict[str, str]:
    """Why nodes cannot take part, in the order of the nodes: every finding with its fix, a line each."""
    found: dict[str, list[str]] = {}
    for each in findings:
        if each.verdict == verdict:
            fix = f"; {each.fix}" if each.fix else ""
            found.setdefault(each.node, []).append(f"{each.observed}{fix} ({each.check})")
    return {node.name: "\n".join(dict.fromkeys(found[node.name])) for node in nodes if node.name in found}


def hopeless(nodes: Sequence[Node], facts: Mapping[str, Facts]) -> tuple[str, ...]:
    """Nodes that no ``--force`` helps: without an interface or a port there is nothing to write into their plan."""
    without = [node.name for rank, node in enumerate(nodes) if facts[node.name].interface is None
               or (rank == 0 and facts[node.name].port is None)]  # fmt: skip
    return tuple(without)


def _fail(check: str, node: Node, observed: str, fix: str) -> Finding:
    return Finding(check, node.name, "FAIL", observed, fix=fix)


def _warn(check: str, node: Node, observed: str, fix: str) -> Finding:
    return Finding(check, node.name, "WARN", observed, fix=fix)
