"""A run's folder goes to every node, and every node says what it is and how it reaches rank 0. Judges nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from provision.errors import ClusterctlError, InterruptedByUser, NodesFailedError
from provision.model import Inventory, Node
from provision.render import render
from provision.run import Facts, Travel, tar_stream
from provision.run.files import sources
from provision.ssh.remote import Connections, fan_out
from provision.tasks.answers import hint, reason, without

LOCAL = "local"  # in place of a release's name: an environment that clusterctl did not deploy
_PREPARE_DEADLINE = 600.0
_PROBE_DEADLINE = 30.0
_WITHDRAW_DEADLINE = 30.0
_ANSWERS = 10.0  # seconds that an interrupted command waits for nodes that may be making the folder
_AT_ONCE = 64  # nodes


@dataclass(frozen=True)
class Answer:
    """What a prepared node said.

    Attributes:
        release: the one its prefix points at, or ``LOCAL``.
        facts: of its agent.
        made: the run's folder was made by this node: no other shares it, or this one was first.
    """

    release: str
    facts: Facts
    made: bool = False

    def prefix(self, inventory: Inventory) -> PurePosixPath:
        """The release's own path, which stays when another one is deployed."""
        return inventory.prefix if self.release == LOCAL else inventory.root / "releases" / self.release


class RefusedError(ClusterctlError):
    """A node that answered, and cannot take part; ``made``: the run's folder is there all the same."""

    def __init__(self, message: str, *, made: bool = False) -> None:
        super().__init__(message)
        self.made = made


Asked = Mapping[str, Answer | ClusterctlError]  # by node name


def run_folder(inventory: Inventory, run: str) -> PurePosixPath:
    """A run's folder on the nodes."""
    return inventory.root / "runs" / run


def prepare(
    inventory: Inventory,
    nodes: Sequence[Node],
    connections: Connections,
    run: str,
    luggage: Travel | None,
    *,
    port: int | None = None,
    scratch: str = "",
) -> Asked:
    """Send the run's folder to every node and ask its agent for facts: one round trip.

    Args:
        inventory: the cluster.
        nodes: in the order of their ranks.
        connections: to them.
        run: its id.
        luggage: what travels; None where the run's folder is there already.
        port: the MASTER_PORT that is wanted; None: any that is free.
        scratch: of a dry run, the temporary folder that the agent alone goes to, in place of the run's folder.

    Returns:
        For each node its answer, a ``RefusedError``, or why it was not reached.

    Raises:
        InterruptedByUser: Ctrl-C. The folders that were made are removed again.
    """
    folder = scratch or str(run_folder(inventory, run))
    agent = sources("agent") if luggage is not None else {}
    master = nodes[0].train_address

    def ask(node: Node) -> Answer:
        probe = ["--master", master, "--rank", str(nodes.index(node))]
        probe += [] if scratch else ["--folder", folder]
        if port is not None:
            probe += ["--port", str(port)]
        script = render(
            "run/prepare.sh.j2",
            prefix=str(inventory.prefix),
            root=str(inventory.root),
            run=folder,
            node=node.name,
            probe=probe,
            sends=luggage is not None,
            scratch=bool(scratch),
        )
        if luggage is None:
            result = connections[node].run(script, deadline=_PROBE_DEADLINE)
        else:
            sent = replace(luggage, texts={}, entries=()) if scratch else luggage
            result = connections[node].run(script, stdin=tar_stream(sent, agent), deadline=_PREPARE_DEADLINE)
        if result.rc != 0:
            said = result.err.strip() or f"the script ended with status {result.rc}"
            raise RefusedError(said, made="folder made" in result.out.splitlines())
        release, folder_is, answer = (*result.out.split("\n", 2), "", "")[:3]
        return Answer(release.removeprefix("release "), Facts.parse(answer), folder_is == "folder made")

    asked: dict[str, Answer | ClusterctlError] = {}
    finished = {node.name: threading.Event() for node in nodes}

    def ask_and_keep(node: Node) -> Answer:
        try:
            asked[node.name] = answer = ask(node)
        except ClusterctlError as error:
            asked[node.name] = error
            raise
        finally:
            finished[node.name].set()
        return answer

    try:
        return fan_out(nodes, ask_and_keep, limit=_AT_ONCE)
    except InterruptedByUser:
        if luggage is not None:
            until = time.monotonic() + _ANSWERS
            for each in finished.values():
                each.wait(max(0.0, until - time.monotonic()))
            # The script of a node without an answer ends with its connection, and removes what it was receiving.
            withdraw(
                inventory, [node for node in nodes if node.name in asked], connections, run, asked, scratch=scratch
            )
        raise


def missing(inventory: Inventory, nodes: Sequence[Node], asked: Asked) -> dict[str, str]:
    """The nodes that gave no answer or have no environment, each with its reason."""
    found = {}
    for node in nodes:
        answer = asked[node.name]
        if isinstance(answer, RefusedError):
            found[node.name] = str(answer)
        elif isinstance(answer, ClusterctlError):
            found[node.name] = reason(answer, inventory, node)
    return found


def unreachable(inventory: Inventory, nodes: Sequence[Node], asked: Asked) -> NodesFailedError | None:
    """The error for nodes that gave no answer at all; None when all did."""
    silent = [name for name, answer in asked.items() if _is_silent(answer)]
    if not silent:
        return None
    return NodesFailedError(
        f"no answer from {len(silent)} of {len(nodes)} nodes; nothing was started",
        reasons=missing(inventory, nodes, asked),
        hint=hint(asked.values(), without(inventory, silent, len(nodes), "train")),
        nothing_done=True,
    )


def withdraw(
    inventory: Inventory,
    nodes: Iterable[Node],
    connections: Connections,
    run: str,
    asked: Asked,
    *,
    scratch: str = "",
) -> None:
    """Remove the run's folder from the nodes that made one: what is not started leaves nothing behind."""
    script = render("run/withdraw.sh.j2", run=scratch or str(run_folder(inventory, run)))
    makers = [node for node in nodes if getattr(asked[node.name], "made", False)]
    fan_out(makers, lambda node: connections[node].run(script, deadline=_WITHDRAW_DEADLINE), limit=_AT_ONCE)


def _is_silent(answer: Answer | ClusterctlError) -> bool:
    return isinstance(answer, ClusterctlError) and not isinstance(answer, RefusedError)
