"""What a run's program wrote for other tools: ``clusterctl collect --wandb``, and the folders for ``tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from provision.errors import NodesFailedError, UsageError
from provision.model import Node
from provision.render import quote
from provision.run import plan_name
from provision.run.record import make_private
from provision.run.written import Places, offline_runs, outermost, places
from provision.ssh.openssh import bulk
from provision.ssh.remote import reading
from provision.tasks.runs import by_name, find, run_folder
from provision.transfer.fetch import RemoteFile, fetch, lacking, list_files
from trainer.agent.contract.plan import LIMIT
from trainer.agent.contract.untrusted import UntrustedError, parse_object

if TYPE_CHECKING:
    from provision.run.found import Run
    from provision.session import Session

FOLDER = "wandb"
_DEADLINE = 60.0


@dataclass(frozen=True)
class WandbRuns:
    """The result of ``collect --wandb``.

    Attributes:
        run: the run's id.
        folders: the offline W&B runs on this machine.
        files: how many files arrived.
        bytes: their size.
        there: how many were here before.
        failed: by node name, why not everything arrived.
    """

    run: str
    folders: tuple[Path, ...]
    files: int = 0
    bytes: int = 0
    there: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Listed:
    """A node's offline W&B runs: by folder, the files by their names in it."""

    places: Places
    runs: Mapping[str, Mapping[str, RemoteFile]]


def collect_wandb(session: Session, word: str | None, to: Path) -> WandbRuns:
    """Copy a run's offline W&B runs to ``to/RUN/wandb/NODE/``.

    Args:
        session: the command's session.
        word: the run; None: the newest.
        to: the local folder that will contain the run's.

    Raises:
        UsageError: no run matches, or it has no offline W&B run.
        NodesFailedError: no node answered.
    """
    run, found = find(session, word)
    here = to / run.id / FOLDER
    nodes = [by_name(session.inventory)[part.node] for part in run.parts if part.node not in found.unreachable]
    ranks = {part.node: part.position for part in run.parts}
    arrived = {"files": 0, "bytes": 0, "there": 0}
    with session.stage("collect", f"Collecting the W&B runs of {run.id}", None, "bytes") as shown:
        outcome = session.each(lambda node: _list(session, node, run, ranks[node.name]), on=nodes)
        failed = found.silent(run) | outcome.reasons
        wanted = _targets({name: listed.runs for name, listed in outcome.ok.items()})
        if not any(wanted.values()):
            shown.states = dict.fromkeys(failed, "failed")
            raise _none(session, run, [listed.places for listed in outcome.ok.values()], failed)
        make_private(to / run.id)

        def bring(node: Node) -> dict[str, int]:
            remote = bulk(session.inventory, node, session.connections[node])
            mine = {"files": 0, "bytes": 0, "there": 0}
            for folder, (name, files) in wanted[node.name].items():
                missing = lacking(files, here / name)
                mine["bytes"] += fetch(remote, folder, missing, here / name)
                mine["files"] += len(missing)
                mine["there"] += len(files) - len(missing)
            return mine

        brought = session.each(bring, on=[node for node in nodes if wanted.get(node.name)])
        for failure in brought.failed.values():
            if isinstance(failure.error, UsageError):  # this machine's own: it would be the same for all nodes
                raise failure.error
        failed |= brought.reasons
        for mine in brought.ok.values():
            arrived = {key: value + mine[key] for key, value in arrived.items()}
        shown.progress(arrived["bytes"])
        shown.states = dict.fromkeys(failed, "failed")
    folders = tuple(here / name for node in brought.ok for name, _ in wanted[node].values())
    if run.live:
        session.warn(f"run {run.id} is running: repeat the command after its end, for the rest of its W&B runs")
    return WandbRuns(run.id, folders, arrived["files"], arrived["bytes"], arrived["there"], failed)


def _list(session: Session, node: Node, run: Run, rank: int) -> _Listed:
    folder = run_folder(session.inventory, run.id)
    where = read_places(session, node, folder, rank)
    remote = bulk(session.inventory, node, session.connections[node])
    files = {
        f"{root}/{name}": file
        for root in outermost([str(folder), where.output, *where.wandb])
        for name, file in list_files(remote, root).items()
    }
    return _Listed(
        where,
        {base: {name: files[f"{base}/{name}"] for name in names} for base, names in offline_runs(files).items()},
    )


def _targets(
    listed: Mapping[str, Mapping[str, Mapping[str, RemoteFile]]],
) -> dict[str, dict[str, tuple[str, Mapping[str, RemoteFile]]]]:
    """By node and folder there, the folder's name here and its files. A shared folder is fetched from one node."""
    seen: set[tuple[str, frozenset[tuple[str, RemoteFile]]]] = set()  # a path and its files: equal if nodes share it
    wanted: dict[str, dict[str, tuple[str, Mapping[str, RemoteFile]]]] = {}
    for node, runs in listed.items():
        wanted[node] = {}
        used: set[str] = set()
        for base, files in runs.items():
            name = PurePosixPath(base).name
            key = base, frozenset(files.items())
            if key in seen:
                continue
            seen.add(key)
            count = sum(each == name or each.startswith(f"{name}.") for each in used)
            local = name if not count else f"{name}.{count}"
            used.add(local)
            wanted[node][base] = f"{node}/{local}", files
    return wanted


def _none(session: Session, run: Run, found: list[Places], failed: Mapping[str, str]) -> UsageError | NodesFailedError:
    text = f"run {run.id} wrote no offline W&B run"
    if failed:
        return NodesFailedError(f"{text} on the nodes that answered", reasons=failed, hint=session.again())
    modes = sorted({each.mode for each in found if each.mode not in {"", "offline"}})
    if modes:
        return UsageError(
            f"{text}: it was started with WANDB_MODE={modes[0]}",
            hint="remove WANDB_MODE from train.env and --env, and start it again: clusterctl sets it to offline",
        )
    return UsageError(
        text,
        hint="in the configuration, set report_to: wandb (in a script, call wandb.init); the environment needs wandb: "
        f"clusterctl run -- {session.inventory.prefix}/bin/python -m wandb --version",
    )


def read_places(session: Session, node: Node, folder: PurePosixPath, rank: int) -> Places:
    """The places in the plan of a run on a node; none if the plan is missing or damaged."""
    script = f"cat -- {quote(folder / plan_name(rank))} 2>/dev/null"
    out = session.run(node, script, deadline=_DEADLINE).out
    with reading(node):
        try:
            return places(parse_object(out, limit=LIMIT), folder)
        except UntrustedError:
            return Places()


def tensorboard_of(session: Session, word: str | None) -> tuple[Node, dict[str, str]]:
    """The node of a run's rank 0, and its folders with files for TensorBoard, by short names.

    Raises:
        UsageError: no run matches, or several do.
        NodesFailedError: no node answered.
    """
    run, _ = find(session, word)
    node = by_name(session.inventory)[run.head.node]
    folder = run_folder(session.inventory, run.id)
    where = read_places(session, node, folder, run.head.position)
    named = {str(folder): run.id, where.output: "output", where.tensorboard: "logs"}
    return node, {named[path]: path for path in outermost(named)}
