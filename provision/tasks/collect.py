"""``clusterctl collect``: brings a run's logs and its newest complete checkpoint from all nodes to one folder here.

::

    DIR/RUN/NODE/…            the node's own logs
    DIR/RUN/output/…          the output folder: the files of all nodes together, of its checkpoints only the newest
    DIR/RUN/fp32/…            with --fp32, one set of weights, converted from a checkpoint in parts
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Collection as Names
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from provision.errors import ClusterctlError, NodesFailedError, UsageError
from provision.inventory import fold
from provision.model import Node, Notice
from provision.render import quote, render
from provision.run import plan_name, record
from provision.run.checkpoint import NEWEST, OFFER, Conversion, Newest, Sources, conversion, newest, sources
from provision.run.effective import Judged
from provision.run.record import make_private
from provision.ssh.openssh import bulk
from provision.tasks.runs import RunStatus, by_name, find, logs_folder, other_failures, run_folder
from provision.transfer.fetch import RemoteFile, fetch, lacking, list_files
from trainer.agent.contract import offers
from trainer.agent.contract.untrusted import UntrustedError, parse_object

if TYPE_CHECKING:
    from provision.model import Remote
    from provision.run.found import Run
    from provision.session import Outcome, Session
    from provision.stages import Stage

OUTPUT = "output"
_DEADLINE = 300.0
_FP32_DEADLINE = 4 * 3600.0  # a model of many billion parameters is read and written in full
_REMOVE_DEADLINE = 120.0
_ANSWER = 64 << 20  # characters
_PIECE = 1 << 20
_NONE = Newest()
_BY_HAND = {
    "zero": "deepspeed.utils.zero_to_fp32 {} OUTPUT",
    "dcp": "torch.distributed.checkpoint.format_utils dcp_to_torch {} weights.pt",
}
# Arguments: a folder with .metadata, the file to write. torch joins all parts in memory
# (torch.distributed.checkpoint.format_utils, since torch 2.3), then the model's tensors remain.
_DCP = """\
import os, sys, torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
joined = sys.argv[2] + ".joined"
dcp_to_torch_save(sys.argv[1], joined)
state = torch.load(joined, map_location="cpu", weights_only=False, mmap=True)
for key in ("model", "state_dict", "app"):
    if isinstance(state.get(key), dict):
        state = state[key]
weights = {}
def add(prefix, values):
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            weights[prefix + key] = value.float() if value.is_floating_point() else value
        elif isinstance(value, dict) and key not in ("optimizer", "optim"):
            add(prefix + key + ".", value)
add("", state)
if not weights:
    sys.exit("it has no tensors outside an optimizer's state")
torch.save(weights, sys.argv[2])
os.unlink(joined)
"""
T = TypeVar("T")


@dataclass(frozen=True)
class Collected:
    """What arrived.

    Attributes:
        run: its id.
        folder: the local folder.
        files: how many arrived.
        bytes: their size.
        there: how many were here before.
        checkpoint: the newest complete one, if it was collected.
        fp32: the local folder of the fp32 weights.
        failed: by node name, why not everything arrived.
        judged: where the run's time went; None if its agents were older.
    """

    run: str
    folder: Path
    files: int = 0
    bytes: int = 0
    there: int = 0
    checkpoint: Newest = _NONE
    fp32: Path | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    judged: Judged | None = None


def collect(session: Session, word: str | None, to: Path, *, only: str | None = None, fp32: bool = False) -> Collected:
    """Collect a run.

    Args:
        session: the command's session.
        word: the run; None: the newest.
        to: the local folder that will contain the run's.
        only: ``logs`` or ``checkpoints``; None: both.
        fp32: also make one set of fp32 weights, on rank 0's node, if the checkpoint has them in parts.

    Raises:
        UsageError: no run matches, or it has no such checkpoint.
        NodesFailedError: no node answered.
    """
    if fp32 and only == "logs":
        raise UsageError("--fp32 needs the checkpoint, and --only logs skips it", hint="omit --only")
    run, found = find(session, word)
    mine = record.folder_of(session.inventory.path, run.id)
    if run.spent is not None:
        record.change(mine, spent=run.spent.to_object())
    with session.stage("collect", f"Collecting {run.id}", None, "bytes") as shown:
        collection = Collection(session, run, to / run.id, found.unreachable, shown)
        collected = collection.collect(only, fp32=fp32)
        if kept := record.read(mine):
            record.write(to / run.id, kept)  # for ``report``, on machines without it
        shown.states = dict.fromkeys(collected.failed, "failed")
    if only != "logs" and run.ended and not collected.failed:  # ``runs prune`` may then remove it without a question
        mark = {"checkpoint": collected.checkpoint.name, "began": run.head.number("began")}
        record.change(mine, collected=mark)
    judged = RunStatus(run, {}, other_failures(session, run.id)).judged
    return replace(collected, judged=judged)


def read_offer(answer: Mapping[str, Any], node: str) -> dict[str, Any]:
    """A node's answer to ``OFFER``: its output folder, or null, and its checkpoints.

    Raises:
        ClusterctlError: the answer is damaged.
    """
    output, offer = answer.get("output"), answer.get("offer") or {}
    wrong = offers.problem(offer)
    if not isinstance(output, str | None) or (output and not output.startswith("/")):
        wrong = "has an invalid output folder"
    if wrong:
        raise ClusterctlError(f"{node}: its checkpoints cannot be read: its answer about them {wrong}")
    return {"output": output, "offer": offer}


class Collection:
    """Fetches one run. ``failed`` has the nodes with missing files."""

    def __init__(
        self, session: Session, run: Run, here: Path, unreachable: Mapping[str, str], shown: Stage | None = None
    ) -> None:
        self.session, self.run, self.here, self._shown = session, run, here, shown
        self.nodes = [by_name(session.inventory)[part.node] for part in run.parts if part.node not in unreachable]
        self.ranks = {part.node: part.rank for part in run.parts}
        self.folder = run_folder(session.inventory, run.id)
        self.failed = {name: why for name, why in unreachable.items() if name in self.ranks or run.missing}
        self.files = self.bytes = self.there = 0

    def collect(self, only: str | None, *, fp32: bool) -> Collected:
        """Fetch the selected files."""
        checkpoint, weights = _NONE, None
        make_private(self.here)
        if only != "checkpoints":
            logs = {part.node: logs_folder(self.session.inventory, part) for part in self.run.parts}
            self._each(lambda remote: self._bring(remote, logs[remote.node.name], self.here / remote.node.name, None))
        if only != "logs":
            checkpoint, weights = self._output(fp32=fp32, needed=only == "checkpoints" or fp32)
        return Collected(
            self.run.id, self.here, self.files, self.bytes, self.there, checkpoint, weights, dict(self.failed)
        )

    def _output(self, *, fp32: bool, needed: bool) -> tuple[Newest, Path | None]:
        """Fetch the output folder of all nodes, and the weights converted from it."""
        answers = self.offers()
        places = {name: answer["output"] for name, answer in answers.items() if answer["output"]}
        offered: dict[str, Mapping[str, Any]] = {name: answers[name]["offer"] for name in places}
        if not places:
            if needed and answers:
                raise UsageError(
                    f"where run {self.run.id} keeps its checkpoints is not known",
                    hint="start the next run with --output DIR; to collect only the logs: "
                    + self.session.again(command="collect", only="logs", words=(self.run.id,)),
                )
            return _NONE, None
        found = self.newest(offered)
        for name, why in found.refused:
            self.session.warn(f"{name} is skipped: {why}")
        if found.error and needed:
            raise UsageError(f"run {self.run.id} has no newest checkpoint: {found.error}")
        if found.name is None and needed:
            text, hint = f"run {self.run.id} has no complete checkpoint", f"clusterctl diagnose {self.run.id}"
            if self.failed:  # their files may complete one
                raise NodesFailedError(f"{text} without {fold(self.failed)}", reasons=self.failed, hint=hint)
            raise UsageError(text, hint=hint)
        chosen = self.take_output(places, offered, found)
        if not fp32 or found.name is None:
            return found, None
        convert = conversion(found.name, chosen.inside(found.name))
        here = self.here / OUTPUT / found.name
        if convert.how == "impossible":
            raise UsageError(
                f"{found.name} cannot be converted to one set of weights: {convert.why}",
                hint=f"the checkpoint itself is in {here}",
            )
        if convert.how == "none":
            self.session.emit(Notice(f"{found.name} has whole weights, so nothing is converted: {here}", "info"))
            return found, None
        head = next(node for node in self.nodes if node.name in places)  # rank 0's, if it answered
        foreign = [name for node, each in chosen.files.items() if node != head.name for name in each]
        return found, self.weights(head, places[head.name], found.name, foreign, convert)

    def take_output(
        self, places: Mapping[str, str], offered: Mapping[str, Mapping[str, Any]], found: Newest
    ) -> Sources:
        """Bring the output folder's files, each from one node that has it."""
        lists = self._each(lambda remote: list_files(remote, places[remote.node.name]), places).ok
        chosen = sources({name: frozenset(files) for name, files in lists.items()}, offered, found.name)

        def bring(remote: Remote) -> None:
            name = remote.node.name
            wanted = {path: lists[name][path] for path in sorted(chosen.files.get(name, ()))}
            self._bring(remote, places[name], self.here / OUTPUT, wanted)

        self._each(bring, [name for name in lists if chosen.files.get(name)])
        return chosen

    def weights(self, head: Node, output: str, checkpoint: str, foreign: Sequence[str], convert: Conversion) -> Path:
        """Make one set of fp32 weights with the packed environment's own DeepSpeed or torch, and bring it here.

        The files of other nodes are on this machine; the node receives the missing ones. It works in a temporary
        folder; the run's checkpoint stays as it is.

        Raises:
            NodesFailedError: the conversion failed.
        """
        remote, run, to = (
            bulk(self.session.inventory, head, self.session.connections[head]),
            self.folder,
            self.here / "fp32",
        )
        here = self.here / OUTPUT / checkpoint
        inside = [each.removeprefix(f"{checkpoint}/") for each in foreign if each.startswith(f"{checkpoint}/")]
        name = checkpoint.rpartition("/")[2]
        script = render(
            "run/to_fp32.sh.j2",
            run=str(run),
            checkpoint=f"{output}/{checkpoint}",
            tag=name if convert.tag else "",
            shards=f"/{convert.folder}" if convert.how == "dcp" else "",
            program=_DCP,
        )
        with self.session.stage("fp32", f"Converting to fp32 weights on {head.name}", None, "bytes") as shown:
            try:
                result = remote.run(script, stdin=_tar(here, sorted(inside)), deadline=_FP32_DEADLINE)
                if result.rc != 0:
                    raise NodesFailedError(
                        f"converting to fp32 weights failed on {head.name}; the checkpoint itself was collected",
                        reasons={head.name: "\n".join(result.err.strip().splitlines()[-5:]) or f"status {result.rc}"},
                        hint=f"by hand: python -m {_BY_HAND[convert.how]}".format(here / convert.folder),
                    )
                fetch(remote, f"{run}/fp32/weights", lacking(list_files(remote, f"{run}/fp32/weights"), to), to)
            finally:
                remote.run(f"rm -rf -- {quote(run)}/fp32", deadline=_REMOVE_DEADLINE)
            shown.states = {head.name: "done"}
        return to

    def offers(self) -> Mapping[str, dict[str, Any]]:
        """By node name in the order of ranks, its output folder and its checkpoints."""

        def ask(node: Node) -> dict[str, Any]:
            plan = f"{self.folder}/{plan_name(self.ranks[node.name])}"
            return read_offer(self._program(node, OFFER, [plan]), node.name)

        outcome = self.session.each(ask, on=self.nodes)
        self.failed |= outcome.reasons
        return outcome.ok

    def newest(self, offered: Mapping[str, Mapping[str, Any]]) -> Newest:
        """The newest checkpoint that is complete over all nodes."""
        world = int(self.run.head.number("world_size") or len(self.run.parts))
        by_rank = {str(self.ranks[name]): offer for name, offer in offered.items()}
        head = next(node for node in self.nodes if node.name in offered)
        answer = self._program(head, NEWEST, [str(world)], json.dumps(by_rank).encode())
        return newest(answer, {one["name"] for offer in offered.values() for one in offer.get("checkpoints", ())})

    def _program(self, node: Node, program: str, arguments: Sequence[str], stdin: bytes = b"") -> dict[str, Any]:
        argv = ["-I", "-c", program, f"{self.folder}/agent", *arguments]  # the program imports the agent's modules
        script = render("run/agent_python.sh.j2", run=str(self.folder), arguments=argv)
        result = self.session.run(node, script, stdin=stdin, deadline=_DEADLINE)
        try:
            return parse_object(result.out, limit=_ANSWER)
        except UntrustedError:
            why = (result.err.strip().splitlines() or [f"it ended with status {result.rc}"])[-1]
            raise ClusterctlError(f"{node.name}: its checkpoints cannot be read: {why}") from None

    def _each(self, work: Callable[[Remote], T], names: Names[str] | None = None) -> Outcome[T]:
        """Do the same with many nodes at once, over connections for many bytes."""

        def one(node: Node) -> T:
            return work(bulk(self.session.inventory, node, self.session.connections[node]))

        outcome = self.session.each(one, on=[node for node in self.nodes if names is None or node.name in names])
        for failure in outcome.failed.values():
            if isinstance(failure.error, UsageError):  # this machine's own: it would be the same for all nodes
                raise failure.error
        self.failed |= outcome.reasons
        return outcome

    def _bring(self, remote: Remote, folder: str, here: Path, wanted: Mapping[str, RemoteFile] | None) -> None:
        """Fetch the files of a folder: the named ones, or all."""
        there = list_files(remote, folder) if wanted is None else dict(wanted)
        missing = lacking(there, here)
        self.there += len(there) - len(missing)
        self.bytes += fetch(remote, folder, missing, here)
        self.files += len(missing)
        if self._shown:
            self._shown.progress(self.bytes)


def _tar(folder: Path, names: Sequence[str]) -> Iterator[bytes]:
    """Files of a folder as a tar; in GNU format, which every tar reads."""
    for name in names:
        path = folder / name
        info = tarfile.TarInfo(name)
        info.size, info.mtime = path.stat().st_size, int(path.stat().st_mtime)
        yield info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        left = info.size
        with path.open("rb") as file:
            while left and (piece := file.read(min(_PIECE, left))):
                left -= len(piece)
                yield piece
        yield bytes(left + -info.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
