"""Slurm as data: the job that a run asks for, and what Slurm's programs answer.

Pure text functions. ``tasks/slurm.py`` runs the programs on nodes. The formats are those of Slurm 22.05 and later with
``-h -o``: ``--json`` is missing from many builds. Every answer has a limit, and a line that does not fit is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from provision.errors import UsageError
from provision.inventory import fold
from provision.inventory.document import shown
from provision.inventory.names import MAX_NODES, expand
from provision.model import Node
from trainer.agent.contract.untrusted import UntrustedError, parse_object

LIMIT = 1 << 20  # bytes that are read of an answer: 4,096 nodes in several partitions
NODES_FORMAT = "%N|%o|%n|%R|%T|%G"  # sinfo: name, address, host name, partition, state, generic resources
JOB_FORMAT = "%i|%T|%N|%r"  # squeue: id, state, nodes, reason
WARNING = 120  # seconds before the end of its time in which a job may save
_SHORT = 4  # minutes of a job that are too few for that warning
_LIST = 65_536  # characters of a list of nodes
_WORDS = 64  # arguments for sbatch
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+@-]{0,99}")
_TIME = re.compile(r"(?:([0-9]{1,4})-)?([0-9]{1,7})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?")
_JOB = re.compile(r"[1-9][0-9]{0,9}")

# The words of sinfo's %T, without the marks behind it.
_READY = ("idle",)
_BUSY = ("mixed", "allocated", "completing", "planned", "reserved")

# States of a job in which it has its nodes, in which it may still get them, and reasons why it never will.
RUNNING = "RUNNING"
WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
NEVER = frozenset({
    "AccountNotAllowed", "AssocGrpJobsLimit", "AssocMaxJobsLimit", "BadConstraints", "InvalidAccount", "InvalidQOS",
    "JobHeldAdmin", "JobHeldUser", "PartitionDown", "PartitionInactive", "PartitionNodeLimit", "PartitionTimeLimit",
    "QOSNotAllowed",
})  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What the user asks of Slurm.

    Attributes:
        partition: None: Slurm's default.
        time: the limit, as Slurm writes it; None: the partition's.
        account: None: the user's default.
        arguments: further arguments of sbatch, which override clusterctl's.
    """

    partition: str | None = None
    time: str | None = None
    account: str | None = None
    arguments: tuple[str, ...] = ()

    def to_object(self) -> dict[str, Any]:
        """The options as JSON."""
        return {
            "partition": self.partition,
            "time": self.time,
            "account": self.account,
            "arguments": list(self.arguments),
        }


@dataclass(frozen=True)
class SlurmNode:
    """A node as Slurm knows it.

    Attributes:
        name: Slurm's name.
        address: where Slurm reaches it.
        hostname: what it calls itself.
        partitions: the partitions that have it.
        state: such as ``idle``.
        gpus: the GPUs that Slurm gives out there; 0 where it does not know them.
    """

    name: str
    address: str = ""
    hostname: str = ""
    partitions: tuple[str, ...] = ()
    state: str = ""
    gpus: int = 0

    @property
    def preference(self) -> int | None:
        """0: it can start a job now; 1: later; None: it is down or drained."""
        if self.state in _READY:
            return 0
        return 1 if self.state in _BUSY else None


@dataclass(frozen=True)
class Job:
    """A job in Slurm's queue."""

    id: str
    state: str
    nodes: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Allocation:
    """The job in which this command runs, and the names that Slurm gives its nodes."""

    job: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Chosen:
    """The nodes for a job.

    Attributes:
        nodes: in the order of their ranks.
        names: by the inventory's name, Slurm's name.
        gpus: the GPUs to ask for on each node; 0: none.
        survives: whether the run continues without a lost node, so Slurm must not end the job then.
        least: the nodes with which a requeued job may start: the others may be lost.
    """

    nodes: tuple[Node, ...]
    names: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    survives: bool = False
    least: int = 0

    def surviving(self, spares: int, min_nodes: int | None) -> Chosen:
        """The same nodes for a run that continues without lost nodes, if it has spares or a minimal number of nodes.

        Only a majority of the run's agents may decide, see ``trainer/agent/supervisor/roster.py``.
        """
        count = len(self.nodes)
        least = max(count - spares if min_nodes is None else min_nodes, count // 2 + 1)
        return replace(self, survives=bool(spares) or min_nodes is not None, least=min(least, count))


def check_options(options: Options) -> None:
    """Refuse options that Slurm would misread.

    Raises:
        UsageError: an option cannot be used.
    """
    for name, value in (("partition", options.partition), ("account", options.account)):
        if value is not None and not all(_WORD.fullmatch(part) for part in value.split(",")):
            raise UsageError(f"--{name} {shown(value)}: not a name of Slurm's", hint="see its names: sinfo -s")
    if options.time is not None and minutes(options.time) is None:
        raise UsageError(
            f"--time {shown(options.time)}: not a time of Slurm's",
            hint="--time 90 (minutes), --time 12:00:00 or --time 2-12:00:00",
        )
    if len(options.arguments) > _WORDS:
        raise UsageError(f"--sbatch-arg: more than {_WORDS}", hint="use fewer")
    for word in options.arguments:
        if not re.fullmatch(r"-[^\x00-\x1f\x7f]{1,500}", word):
            raise UsageError(
                f"--sbatch-arg {shown(word)}: not an option of sbatch", hint="one word: --sbatch-arg=--qos=high"
            )


def minutes(text: str) -> float | None:
    """A time as Slurm writes it, in minutes: ``90``, ``90:30``, ``1:30:00``, ``2-12``; None for another text."""
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    days, first, second, third = (None if part is None else int(part) for part in found.groups())
    if days is not None:
        return days * 1440 + first * 60 + (second or 0) + (third or 0) / 60 if first is not None else None
    if third is not None and first is not None and second is not None:
        return first * 60 + second + third / 60
    return (first or 0) + (second or 0) / 60


def arguments(options: Options, run: str, chosen: Chosen) -> list[str]:
    """The arguments of sbatch. The user's come last, so that they override the others.

    The job has its nodes alone, with all of their memory. It names them, so that Slurm requeues it onto the nodes that
    have the run's folder and its checkpoints.
    """
    names = ",".join(chosen.names[node.name] for node in chosen.nodes)
    words = ["--parsable", f"--job-name={run}", f"--nodes={len(chosen.nodes)}", f"--nodelist={names}"]
    words += ["--ntasks-per-node=1", "--exclusive", "--mem=0", "--requeue", "--open-mode=append"]
    words += ["--output=/dev/null", "--chdir=/", *(["--no-kill"] if chosen.survives else [])]
    limit = None if options.time is None else minutes(options.time)
    if limit is None or limit > _SHORT:
        words.append(f"--signal=B:USR1@{WARNING}")
    words += [f"--gpus-per-node={chosen.gpus}"] if chosen.gpus else []
    for name in ("partition", "time", "account"):
        value = getattr(options, name)
        words += [] if value is None else [f"--{name}={value}"]
    return [*words, *options.arguments]


def read_allocation(env: Mapping[str, str]) -> Allocation | None:
    """The allocation in which this command runs, from its environment; None outside of one.

    Raises:
        UsageError: the variables are not Slurm's.
    """
    job, nodes = env.get("SLURM_JOB_ID"), env.get("SLURM_JOB_NODELIST")
    if not job or not nodes:
        return None
    names = read_names(nodes)
    if not _JOB.fullmatch(job) or not names:
        raise UsageError(
            f"SLURM_JOB_ID={shown(job)} and SLURM_JOB_NODELIST={shown(nodes)}: not an allocation of Slurm's",
            hint="unset them, or choose the inventory's nodes: --on ssh",
        )
    return Allocation(job, names)


def read_names(text: str) -> tuple[str, ...]:
    """Slurm's short form of node names, such as ``gpu[01-04,07],login``; empty where it cannot be read."""
    found: list[str] = []
    for part in re.findall(r"(?:\[[^\[\]]*\]|[^,\[\]])+", text[:_LIST]):
        try:
            found += expand(part)
        except ValueError:
            return ()
        if len(found) > MAX_NODES or not all(_WORD.fullmatch(name) for name in found):
            return ()
    return tuple(dict.fromkeys(found))


def read_nodes(text: str) -> tuple[SlurmNode, ...]:
    """The answer of ``sinfo -h -N -o NODES_FORMAT``: a line for each node and partition."""
    found: dict[str, SlurmNode] = {}
    for line in text[:LIMIT].splitlines():
        parts = line.split("|")
        if len(parts) != 6 or not _WORD.fullmatch(parts[0]) or len(found) >= MAX_NODES:
            continue
        name, address, hostname, partition, state, resources = parts
        before = found.get(name)
        partitions = (*(before.partitions if before else ()), partition)
        # Behind the word are marks such as * (no answer), and after + further words such as +drain.
        plain = re.sub(r"[^a-z+]", "", state.lower()) if "*" not in state else "unknown"
        found[name] = SlurmNode(name, address, hostname, partitions, plain, _gpus(resources))
    return tuple(found.values())


def _gpus(resources: str) -> int:
    """The GPUs of ``gpu:h100:8(S:0-1),shard:4``."""
    counts = re.findall(r"(?:^|,)gpu(?::[A-Za-z][\w.-]*)?:([0-9]{1,4})(?=[(,]|$)", resources)
    return min(sum(map(int, counts)), 1024)


def read_job(text: str, job: str) -> Job | None:
    """The answer of ``squeue -h -o JOB_FORMAT``; None if it has not the job, which has ended then."""
    for line in text[:LIMIT].splitlines():
        parts = line.split("|", 3)
        if len(parts) == 4 and parts[0] == job and re.fullmatch(r"[A-Z_]{1,40}", parts[1]):
            return Job(job, parts[1], read_names(parts[2]), parts[3][:200].strip("() "))
    return None


def read_submitted(text: str) -> str | None:
    """The id in the answer of ``sbatch --parsable``: ``12`` or ``12;cluster``, after lines of plug-ins."""
    for line in reversed(text[:LIMIT].splitlines()):
        job = line.strip().partition(";")[0]
        if _JOB.fullmatch(job):
            return job
    return None


def read_options(text: str) -> Options | None:
    """The options that a run was started with, from the file on its nodes; None if there are none."""
    try:
        given = parse_object(text)
        words = given["arguments"] if isinstance(given.get("arguments"), list) else []
        texts = [given.get(key) for key in ("partition", "time", "account")]
        partition, time, account = (value if isinstance(value, str) else None for value in texts)
        options = Options(partition, time, account, tuple(str(word) for word in words if isinstance(word, str)))
        check_options(options)
    except (UntrustedError, UsageError):
        return None
    return options


def match(nodes: Iterable[Node], theirs: Iterable[SlurmNode]) -> dict[str, SlurmNode]:
    """By the inventory's name, the node as Slurm knows it. A name decides before an address or a host name."""
    known = tuple(theirs)
    tables: list[dict[str, SlurmNode]] = [{}, {}, {}]
    for each in known:
        for table, key in zip(tables, (each.name, each.address, each.hostname), strict=True):
            if key:
                table.setdefault(key, each)
    found: dict[str, SlurmNode] = {}
    taken: set[str] = set()
    for node in nodes:
        names = (node.name, node.address, _short(node.name), _short(node.address))
        hit = next((table[name] for name in names for table in tables if name in table), None)
        if hit is not None and hit.name not in taken:
            found[node.name] = hit
            taken.add(hit.name)
    return found


def _short(name: str) -> str:
    """A host's name without its domain; an address stays."""
    return name if re.fullmatch(r"[0-9.]+|.*:.*", name) else name.partition(".")[0]


def choose(
    nodes: Sequence[Node],
    theirs: Sequence[SlurmNode],
    options: Options,
    count: int | None,
    per_node: int | None = None,
    spares: int = 0,
) -> Chosen:
    """The nodes of a job: those that can start now before the busy ones, else in the inventory's order.

    Args:
        nodes: the nodes that the user chose.
        theirs: all nodes as Slurm knows them.
        options: what the user asks of Slurm.
        count: how many, with the spares; None: all.
        per_node: the GPUs to ask for on each node; None: all that Slurm has there.
        spares: how many of them are spares, for the error.

    Raises:
        UsageError: the partition does not exist, or has too few of the nodes.
    """
    known = match(nodes, theirs)
    partitions = sorted({name for each in theirs for name in each.partitions})
    wanted = None if options.partition is None else set(options.partition.split(","))
    if wanted is not None and not wanted & set(partitions):
        listed = ", ".join(partitions[:20]) or "none"
        raise UsageError(f"--partition {options.partition}: Slurm has no such partition", hint=f"it has: {listed}")
    where = "Slurm" if wanted is None else f"partition {options.partition}"
    why: dict[str, list[str]] = {}
    usable = []
    for node in nodes:
        each = known.get(node.name)
        if each is None:
            why.setdefault("Slurm does not know", []).append(node.name)
        elif wanted is not None and not wanted & set(each.partitions):
            why.setdefault("not in the partition", []).append(node.name)
        elif each.preference is None:
            why.setdefault(each.state or "unknown state", []).append(node.name)
        else:
            usable.append(node)
    needed = len(nodes) if count is None else count
    if len(usable) < needed:
        reasons = "; ".join(f"{text}: {fold(names)}" for text, names in why.items())
        fewer = f"--nodes {len(usable) - spares}" if len(usable) > spares else "fewer --spares"
        raise UsageError(
            f"{where} has {len(usable)} of the {needed} nodes that the run needs"
            + (f", {spares} of them as spares" if spares else "")
            + (f" ({reasons})" if reasons else ""),
            hint=f"{fewer}, or see: sinfo -N -l" if usable else "see: sinfo -N -l; names must match",
        )
    order = {node.name: index for index, node in enumerate(nodes)}
    first = sorted(usable, key=lambda node: (known[node.name].preference or 0, order[node.name]))[:needed]
    members = tuple(sorted(first, key=lambda node: order[node.name]))
    has = min(known[node.name].gpus for node in members)
    return Chosen(
        members, {node.name: known[node.name].name for node in members}, min(has, per_node or has) if has else 0
    )


def inside(
    nodes: Sequence[Node], allocation: Allocation, count: int | None, spares: int = 0
) -> tuple[Chosen, tuple[str, ...]]:
    """The nodes of an allocation, in the inventory's order, and the names of its nodes that match none.

    Args:
        nodes: the nodes that the user chose.
        allocation: the job in which this command runs.
        count: how many nodes, with the spares; None: all of the allocation's.
        spares: how many of them are spares, for the error.

    Raises:
        UsageError: it has fewer of the nodes, or none.
    """
    known = match(nodes, [SlurmNode(name) for name in allocation.names])
    members = tuple(node for node in nodes if node.name in known)
    other = tuple(name for name in allocation.names if name not in {each.name for each in known.values()})
    if not members or (count is not None and count > len(members)):
        wanted = "" if count is None else f"--nodes {count - spares}: "
        wanted = wanted if not wanted or not spares else f"{wanted[:-2]} and --spares {spares}: "
        has = f"{len(members)} of the chosen nodes" + (f": {fold(node.name for node in members)}" if members else "")
        more = f"; {fold(other)} of it {'is' if len(other) == 1 else 'are'} not among them" if other else ""
        raise UsageError(
            f"{wanted}Slurm job {allocation.job} has {has}{more}",
            hint=f"--nodes {max(1, len(members) - spares)}, or a larger allocation: salloc --nodes={count}"
            if members
            else "their names must match the inventory's; or train outside of the job: --on ssh",
        )
    chosen = members[:count]
    return Chosen(chosen, {node.name: known[node.name].name for node in chosen}), other
