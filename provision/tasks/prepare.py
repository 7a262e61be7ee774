"""A run's folder goes to every node, and every node says whether and how it can take part."""

from __future__ import annotations

import importlib.resources
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath

from provision.errors import ClusterctlError, NodesFailedError, PreflightError
from provision.inventory import fold
from provision.model import Emit, Inventory, Node, StageFinished, StageStarted
from provision.render import render
from provision.run import Facts, Travel, tar_stream
from provision.ssh.remote import Connections, fan_out
from provision.tasks.answers import hint, reason

PREPARE_DEADLINE = 600.0
WITHDRAW_DEADLINE = 30.0


@dataclass(frozen=True)
class Answer:
    """What a prepared node said: the release its prefix points at, and the facts of its agent."""

    release: str
    facts: Facts


class _RefusedError(ClusterctlError):
    """A node that answered, and cannot take part."""


def run_folder(inventory: Inventory, run: str) -> PurePosixPath:
    """A run's folder on the nodes."""
    return inventory.root / "runs" / run


@contextmanager
def prepared(
    inventory: Inventory, nodes: Sequence[Node], connections: Connections, run: str, luggage: Travel, emit: Emit
) -> Iterator[Mapping[str, Answer]]:
    """Every node with the run's folder, and its answer; when the run is refused after all, the folders go again.

    Raises:
        PreflightError: nodes that cannot take part.
        NodesFailedError: nodes that cannot be reached.
    """
    began = time.monotonic()
    emit(StageStarted("prepare", "Preparing nodes", len(nodes), "nodes"))
    asked = _ask(inventory, nodes, connections, run, luggage)
    try:
        answers = _judge(inventory, nodes, asked)
        states = {name: f"{answer.facts.interface}, {_processors(answer.facts)}" for name, answer in answers.items()}
        emit(StageFinished("prepare", time.monotonic() - began, states))
        yield answers
    except ClusterctlError:
        script = render("run/withdraw.sh.j2", run=str(run_folder(inventory, run)))
        holders = [node for node in nodes if isinstance(asked[node.name], Answer)]
        fan_out(holders, lambda node: connections[node].run(script, deadline=WITHDRAW_DEADLINE))
        raise


def _ask(
    inventory: Inventory, nodes: Sequence[Node], connections: Connections, run: str, luggage: Travel
) -> Mapping[str, Answer | ClusterctlError]:
    """Send the run's folder to every node and ask its agent for facts: one round trip."""
    folder = str(run_folder(inventory, run))
    agent = _agent_files()
    master = nodes[0].train_address

    def ask(node: Node) -> Answer:
        probe = ["--master", master, "--rank", str(nodes.index(node)), "--folder", folder]
        if inventory.train.port is not None:
            probe += ["--port", str(inventory.train.port)]
        script = render(
            "run/prepare.sh.j2",
            prefix=str(inventory.prefix),
            root=str(inventory.root),
            run=folder,
            probe=probe,
        )
        result = connections[node].run(script, stdin=tar_stream(luggage, agent), deadline=PREPARE_DEADLINE)
        if result.rc != 0:
            raise _RefusedError(result.err.strip() or f"the script ended with status {result.rc}")
        release, _, answer = result.out.partition("\n")
        return Answer(release.removeprefix("release "), Facts.parse(answer))

    return fan_out(nodes, ask)


def _judge(
    inventory: Inventory, nodes: Sequence[Node], answers: Mapping[str, Answer | ClusterctlError]
) -> dict[str, Answer]:
    """The answers, if all nodes can take part; one error names all that cannot."""
    unreachable: dict[str, str] = {}
    refused: dict[str, str] = {}
    good: dict[str, Answer] = {}
    for node in nodes:
        answer = answers[node.name]
        if isinstance(answer, _RefusedError):
            refused[node.name] = str(answer)
        elif isinstance(answer, ClusterctlError):
            unreachable[node.name] = reason(answer, inventory, node)
        else:
            good[node.name] = answer
    deploy = f"clusterctl deploy --inventory {inventory.path.name}"
    if unreachable:
        raise NodesFailedError(
            f"no answer from {len(unreachable)} of {len(nodes)} nodes; nothing was started",
            reasons={**unreachable, **refused},
            hint=hint(answers.values(), f"to go on without: clusterctl train --exclude {fold(unreachable)}"),
        )
    if refused:
        raise PreflightError(
            f"{len(refused)} of {len(nodes)} nodes cannot take part; nothing was started", reasons=refused, hint=deploy
        )
    if len({answer.release for answer in good.values()}) > 1:
        raise PreflightError(
            "the nodes have different environments; nothing was started",
            reasons={name: f"has release {answer.release}" for name, answer in good.items()},
            hint=deploy,
        )
    return good


def _processors(facts: Facts) -> str:
    """What a node trains on, in two words."""
    return f"{facts.gpus} GPU{'s' if facts.gpus > 1 else ''}" if facts.gpus else f"no GPU, {facts.cpus} cores"


def _agent_files() -> dict[str, bytes]:
    """The agent's source files, by their names in the run's folder."""
    folder = importlib.resources.files("trainer") / "agent"
    return {f"agent/{item.name}": item.read_bytes() for item in folder.iterdir() if item.name.endswith(".py")}
