"""``clusterctl collect``: the logs of a run and its newest complete checkpoint come from all nodes to one folder here.

::

    DIR/RUN/NODE/…            the node's own logs
    DIR/RUN/output/…          the output folder: what all nodes have of it as one, of its checkpoints only the newest
    DIR/RUN/fp32/…            with --fp32, one set of weights made of a DeepSpeed checkpoint
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provision.errors import ClusterctlError, NodesFailedError, UsageError
from provision.hints import again
from provision.inventory import fold
from provision.model import Emit, Inventory, Node, Notice, Progress, StageFinished, StageStarted
from provision.render import render
from provision.run import plan_name
from provision.run.checkpoint import NEWEST, OFFER, Newest, Sources, newest, sources
from provision.run.record import make_private
from provision.ssh.openssh import bulk
from provision.ssh.remote import Connections, fan_out
from provision.tasks.answers import reason
from provision.tasks.fetch import There, fetch, lacking, listed
from provision.tasks.fp32 import weights
from provision.tasks.prepare import run_folder
from provision.tasks.runs import by_name, find
from trainer import offers
from trainer.untrusted import UntrustedError, parse_object

if TYPE_CHECKING:
    from provision.model import Remote
    from provision.run.found import Run
    from provision.ssh.prompts import Prompts

OUTPUT = "output"
_STAGE = "collect"
_DEADLINE = 300.0
_ANSWER = 64 << 20  # characters
_NONE = Newest()


@dataclass(frozen=True)
class Collected:
    """What came.

    Attributes:
        run: its id.
        folder: where it lies here.
        files: how many came.
        bytes: how many those are.
        there: how many were here already.
        checkpoint: the newest complete one, where it was collected.
        fp32: where the fp32 weights lie here.
        failed: by node name, why not everything came.
    """

    run: str
    folder: Path
    files: int = 0
    bytes: int = 0
    there: int = 0
    checkpoint: Newest = _NONE
    fp32: Path | None = None
    failed: Mapping[str, str] = field(default_factory=dict)


def collect(
    inventory: Inventory,
    nodes: Sequence[Node],
    word: str | None,
    to: Path,
    *,
    only: str | None = None,
    fp32: bool = False,
    prompts: Prompts | None = None,
    emit: Emit,
) -> Collected:
    """Collect a run.

    Args:
        inventory: the cluster.
        nodes: those that are asked for it.
        word: the run; None: the newest.
        to: the folder here in which the run's own is made.
        only: ``logs`` or ``checkpoints``; None: both.
        fp32: also make fp32 weights of a DeepSpeed checkpoint, on rank 0's node.
        prompts: how to ask for a password or about a host key.
        emit: is told about the progress.

    Raises:
        UsageError: no run is meant, or it has no such checkpoint.
        NodesFailedError: no node answered.
    """
    if fp32 and only == "logs":
        raise UsageError("--fp32 needs the checkpoint, and --only logs leaves it out", hint="leave out --only")
    with Connections(inventory, prompts) as connections:
        run, found = find(inventory, nodes, connections, word)
        return _Collection(inventory, run, connections, to / run.id, dict(found.unreachable), emit).all(only, fp32=fp32)


def read_offer(said: Mapping[str, Any], node: str) -> dict[str, Any]:
    """A node's answer to ``OFFER``: its output folder, or null, and what it says about its checkpoints.

    Raises:
        ClusterctlError: it is none.
    """
    output, offer = said.get("output"), said.get("offer") or {}
    wrong = offers.problem(offer)
    if not isinstance(output, str | None) or (output and not output.startswith("/")):
        wrong = "has an output folder that is none"
    if wrong:
        raise ClusterctlError(f"{node}: its checkpoints cannot be read: what it says about them {wrong}")
    return {"output": output, "offer": offer}


class _Collection:
    """One run on its way here."""

    def __init__(
        self,
        inventory: Inventory,
        run: Run,
        connections: Connections,
        here: Path,
        unreachable: Mapping[str, str],
        emit: Emit,
    ) -> None:
        self.inventory, self.run, self.connections, self.here, self.emit = inventory, run, connections, here, emit
        self.nodes = [by_name(inventory)[part.node] for part in run.parts if part.node not in unreachable]
        self.ranks = {part.node: part.rank for part in run.parts}
        self.folder = run_folder(inventory, run.id)
        self.failed = {name: why for name, why in unreachable.items() if name in self.ranks or run.missing}
        self.files = self.bytes = self.there = 0

    def all(self, only: str | None, *, fp32: bool) -> Collected:
        """Everything that is wanted."""
        began = time.monotonic()
        checkpoint, made = _NONE, None
        make_private(self.here)
        self.emit(StageStarted(_STAGE, f"Collecting {self.run.id}", None, "bytes"))
        if only != "checkpoints":
            logs = {part.node: f"{self.folder.parent}/{part.logs}" for part in self.run.parts}
            self._each(lambda node, remote: self._bring(remote, logs[node.name], self.here / node.name, None))
        if only != "logs":
            checkpoint, made = self._output(fp32=fp32, needed=only == "checkpoints" or fp32)
        self.emit(StageFinished(_STAGE, time.monotonic() - began, dict.fromkeys(self.failed, "failed")))
        return Collected(
            self.run.id, self.here, self.files, self.bytes, self.there, checkpoint, made, dict(self.failed)
        )

    def _output(self, *, fp32: bool, needed: bool) -> tuple[Newest, Path | None]:
        """The output folder of all nodes, and what is made of it."""
        said = self._offers()
        places = {name: answer["output"] for name, answer in said.items() if answer["output"]}
        offered: dict[str, Mapping[str, Any]] = {name: said[name]["offer"] for name in places}
        if not places:
            if needed and said:
                raise UsageError(
                    f"where run {self.run.id} keeps its checkpoints is not known",
                    hint="start the next run with --output DIR; to collect the logs alone: "
                    + again(self.inventory.typed, "collect", only="logs", words=(self.run.id,)),
                )
            return _NONE, None
        found = self._newest(offered)
        for name, why in found.refused:
            self.emit(Notice(f"{name} is not taken: {why}", "warning"))
        if found.name is None and needed:
            text, hint = f"run {self.run.id} has no complete checkpoint", f"clusterctl diagnose {self.run.id}"
            if self.failed:  # what they have may complete one
                raise NodesFailedError(f"{text} without {fold(self.failed)}", reasons=self.failed, hint=hint)
            raise UsageError(text, hint=hint)
        chosen = self._take_output(places, offered, found)
        made = None
        if fp32 and found.name is not None:
            if not chosen.zero:
                raise UsageError(
                    f"{found.name} is no checkpoint of DeepSpeed's ZeRO: there is nothing to put together",
                    hint=f"its weights are as they are in {self.here / OUTPUT / found.name}",
                )
            head = next(node for node in self.nodes if node.name in places)  # rank 0's, unless that gave no answer
            made = self.here / "fp32"
            weights(
                bulk(self.inventory, head, self.connections[head]),
                str(self.folder),
                f"{places[head.name]}/{found.name}",
                self.here / OUTPUT / found.name,
                [name for node, each in chosen.files.items() if node != head.name for name in each],
                tag=found.name if chosen.tag else "",
                to=made,
                emit=self.emit,
            )
        return found, made

    def _take_output(
        self, places: Mapping[str, str], offered: Mapping[str, Mapping[str, Any]], found: Newest
    ) -> Sources:
        there: dict[str, dict[str, There]] = {}

        def look(node: Node, remote: Remote) -> None:
            there[node.name] = listed(remote, places[node.name])

        members = [node for node in self.nodes if node.name in places]
        self._each(look, members)
        names = {node.name: frozenset(there[node.name]) for node in members if node.name in there}
        chosen = sources(names, offered, found.name)

        def bring(node: Node, remote: Remote) -> None:
            wanted = {name: there[node.name][name] for name in sorted(chosen.files.get(node.name, ()))}
            self._bring(remote, places[node.name], self.here / OUTPUT, wanted)

        self._each(bring, [node for node in members if chosen.files.get(node.name)])
        return chosen

    def _offers(self) -> dict[str, dict[str, Any]]:
        """By node name in the order of ranks, its output folder and its checkpoints."""

        def ask(node: Node) -> dict[str, Any]:
            plan = f"{self.folder}/{plan_name(self.ranks[node.name])}"
            return read_offer(self._program(self.connections[node], OFFER, [plan]), node.name)

        answers = fan_out(self.nodes, ask)
        for node in self.nodes:
            if isinstance(answer := answers[node.name], ClusterctlError):
                self.failed[node.name] = reason(answer, self.inventory, node)
        return {name: answer for name, answer in answers.items() if isinstance(answer, dict)}

    def _newest(self, offered: Mapping[str, Mapping[str, Any]]) -> Newest:
        world = int(self.run.head.number("world_size") or len(self.run.parts))
        by_rank = {str(self.ranks[name]): offer for name, offer in offered.items()}
        head = next(node for node in self.nodes if node.name in offered)
        said = self._program(self.connections[head], NEWEST, [str(world)], json.dumps(by_rank).encode())
        return newest(said, {one["name"] for offer in offered.values() for one in offer.get("checkpoints", ())})

    def _program(self, remote: Remote, program: str, arguments: Sequence[str], stdin: bytes = b"") -> dict[str, Any]:
        script = render("run/agent_python.sh.j2", run=str(self.folder), program=program, arguments=list(arguments))
        result = remote.run(script, stdin=[stdin], deadline=_DEADLINE)
        try:
            return parse_object(result.out, limit=_ANSWER)
        except UntrustedError:
            why = (result.err.strip().splitlines() or [f"it ended with status {result.rc}"])[-1]
            raise ClusterctlError(f"{remote.node.name}: its checkpoints cannot be read: {why}") from None

    def _each(self, work: Any, nodes: Sequence[Node] | None = None) -> None:
        """Do the same with many nodes at once; those where it fails are kept with their reasons."""

        def one(node: Node) -> None:
            work(node, bulk(self.inventory, node, self.connections[node]))

        members = self.nodes if nodes is None else nodes
        for node, answer in zip(members, fan_out(members, one).values(), strict=True):
            if isinstance(answer, UsageError):  # this machine's own: it would be the same for all
                raise answer
            if isinstance(answer, ClusterctlError):
                self.failed[node.name] = reason(answer, self.inventory, node)

    def _bring(self, remote: Remote, folder: str, here: Path, wanted: Mapping[str, There] | None) -> None:
        """Bring the files of a folder here; all of them unless some are named."""
        there = listed(remote, folder) if wanted is None else dict(wanted)
        missing = lacking(there, here)
        self.there += len(there) - len(missing)
        self.bytes += fetch(remote, folder, missing, here)
        self.files += len(missing)
        self.emit(Progress(_STAGE, self.bytes))
