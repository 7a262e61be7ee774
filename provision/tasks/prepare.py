"""Sends a run's folder to every node, and collects the facts that the gate judges: hardware, and the path to rank 0."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError, InterruptedByUser, NodesFailedError
from provision.model import Inventory, Node
from provision.render import quote, render
from provision.run import Facts, RunFiles, tar_stream
from provision.run.files import sources
from provision.session import Failure, Outcome
from provision.tasks.runs import run_folder

if TYPE_CHECKING:
    from provision.session import Session

LOCAL = "local"  # instead of a release's name: an environment that clusterctl did not deploy
_PREPARE_DEADLINE = 600.0
_PROBE_DEADLINE = 30.0
_REMOVE_DEADLINE = 30.0
_ANSWERS = 10.0  # seconds that an interrupted command waits for nodes that may be creating the folder


@dataclass(frozen=True)
class Answer:
    """A prepared node.

    Attributes:
        release: the node's current release, or ``LOCAL``.
        facts: the facts from its agent.
        created: whether this node created the run's folder, which it may share with other nodes.
    """

    release: str
    facts: Facts
    created: bool = False

    def prefix(self, inventory: Inventory) -> PurePosixPath:
        """The release's path, which does not change with the next deploy."""
        return inventory.prefix if self.release == LOCAL else inventory.root / "releases" / self.release


class RefusedError(ClusterctlError):
    """A node answered and cannot take part. ``made``: it created the run's folder."""

    def __init__(self, message: str, *, created: bool = False) -> None:
        super().__init__(message)
        self.created = created


def prepare(
    session: Session,
    nodes: Sequence[Node],
    run: str,
    files: RunFiles | None,
    *,
    port: int | None = None,
    scratch: str = "",
) -> Outcome[Answer]:
    """Send the run's folder to every node and ask its agent for facts, in one round trip.

    Args:
        session: the command's session.
        nodes: in the order of their ranks.
        run: its id.
        files: the files to send; None if the nodes have the run's folder.
        port: the requested MASTER_PORT; None: any free one.
        scratch: the temporary folder of a dry run, which receives only the agent; empty for the run's folder.

    Raises:
        InterruptedByUser: Ctrl-C; the folders are removed again.
    """
    folder = scratch or str(run_folder(session.inventory, run))
    agent = sources("agent") if files is not None else {}
    digest = hashlib.sha256(repr(sorted(agent.items())).encode()).hexdigest()[:16]

    def ask(node: Node) -> Answer:
        probe = ["--master", nodes[0].train_address, "--rank", str(nodes.index(node))]
        probe += [] if scratch else ["--folder", folder]
        probe += [] if port is None else ["--port", str(port)]
        script = render(
            "run/prepare.sh.j2",
            prefix=str(session.inventory.prefix),
            root=str(session.inventory.root),
            run=folder,
            node=node.name,
            probe=probe,
            sends=files is not None,
            scratch=bool(scratch),
            digest=digest,
        )
        if files is None:
            result = session.run(node, script, deadline=_PROBE_DEADLINE)
        else:
            sent = replace(files, texts={}, entries=()) if scratch else files
            remote = session.connections[node]
            result = remote.run(script, stdin=tar_stream(sent, agent), deadline=_PREPARE_DEADLINE)
        if result.rc != 0:
            why = result.err.strip() or f"the script ended with status {result.rc}"
            raise RefusedError(why, created="folder made" in result.out.splitlines())
        release, folder_is, answer = (*result.out.split("\n", 2), "", "")[:3]
        return Answer(release.removeprefix("release "), Facts.parse(answer), folder_is == "folder made")

    asked = _Asked(session, nodes)
    try:
        return session.work(
            "prepare", "Preparing nodes", asked.keep(ask), on=nodes, state=lambda answer: _state(answer.facts)
        )
    except (InterruptedByUser, KeyboardInterrupt):
        if files is not None:
            # On a node without an answer, the script ends with its connection and removes partial files.
            remove_folders(asked.outcome(), nodes, run, scratch=scratch)
        raise


class _Asked:
    """The answers so far: an interrupted command must know which nodes created the folder."""

    def __init__(self, session: Session, nodes: Sequence[Node]) -> None:
        self._session = session
        self._ok: dict[str, Answer] = {}
        self._failed: dict[str, Failure] = {}
        self._finished = {node.name: threading.Event() for node in nodes}

    def keep(self, ask: Callable[[Node], Answer]) -> Callable[[Node], Answer]:
        """Wrap ``ask`` to keep its answers."""

        def one(node: Node) -> Answer:
            try:
                self._ok[node.name] = answer = ask(node)
            except ClusterctlError as error:
                self._failed[node.name] = Failure.of(error, self._session.inventory, node)
                raise
            finally:
                self._finished[node.name].set()
            return answer

        return one

    def outcome(self) -> Outcome[Answer]:
        """The answers, after a short wait for nodes that may be creating the folder."""
        until = time.monotonic() + _ANSWERS
        for each in self._finished.values():
            each.wait(max(0.0, until - time.monotonic()))
        return Outcome(self._session, dict(self._ok), dict(self._failed))


def unreachable(asked: Outcome[Answer]) -> NodesFailedError | None:
    """The error for nodes that did not answer; None if all did."""
    silent = [name for name, failure in asked.failed.items() if not isinstance(failure.error, RefusedError)]
    if not silent:
        return None
    total = len(asked.ok) + len(asked.failed)
    return NodesFailedError(
        f"no answer from {len(silent)} of {total} nodes; nothing was started",
        reasons=asked.reasons,
        hint=asked.hint(asked.session.without(silent, total)),
        nothing_done=True,
    )


def remove_folders(asked: Outcome[Answer], nodes: Iterable[Node], run: str, *, scratch: str = "") -> None:
    """Remove the run's folder from the nodes that created it, because a run that does not start must leave nothing."""
    session = asked.session
    created = {name for name, answer in asked.ok.items() if answer.created}
    created |= {name for name, failure in asked.failed.items() if getattr(failure.error, "created", False)}
    script = f"rm -rf -- {quote(scratch or run_folder(session.inventory, run))}"
    owners = [node for node in nodes if node.name in created]
    session.each(lambda node: session.run(node, script, deadline=_REMOVE_DEADLINE), on=owners)


def _state(facts: Facts) -> str:
    """A short description of a prepared node."""
    gpus = f"{facts.gpus} GPU{'s' if facts.gpus > 1 else ''}" if facts.gpus else f"no GPU, {facts.cpus} cores"
    return f"{facts.interface or 'no interface'}, {gpus}"
