"""The stages of services on nodes: one script a node, in one round trip, and what is known of every node afterwards."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from provision.errors import NodesFailedError
from provision.hints import again
from provision.model import Emit, Node, Progress, Result, StageFinished, StageStarted, Step, StepResult
from provision.script import FROM_INPUT, parse
from provision.services.kit import plans
from provision.services.kit.scripts import script, verifying
from provision.ssh.remote import Connections, fan_out
from provision.tasks.answers import failures


class Work:
    """What is known of every node while stages are carried out."""

    def __init__(self, connections: Connections, nodes: Iterable[Node], deadline: float, emit: Emit) -> None:
        self.steps: dict[str, list[StepResult]] = {node.name: [] for node in nodes}
        self.failed: dict[str, str] = {}
        self.wrong: set[str] = set()  # nodes that failed by what a step said, not for want of an answer
        self.seconds: dict[str, float] = {}
        self._nodes = tuple(nodes)
        self._connections, self._deadline, self._emit = connections, deadline, emit

    @property
    def changed(self) -> bool:
        """Whether a step changed anything so far."""
        return any(step.state == "changed" for steps in self.steps.values() for step in steps)

    def done(self) -> dict[str, tuple[StepResult, ...]]:
        """What became of every step."""
        return {name: tuple(steps) for name, steps in self.steps.items()}

    def carry_out(self, stage: str, title: str, steps: Mapping[str, tuple[Step, ...]], *, dry_run: bool) -> None:
        """One stage, on the nodes that have steps in it and have not failed."""
        self._run(stage, title, steps, lambda mine, token: script(mine, token, dry_run=dry_run))

    def verify(self, plan: plans.Plan) -> None:
        """Ask everything of every node at once; what is wrong with one service keeps no other from being asked."""
        together = {
            node.name: tuple(step for stage in plans.STAGES for step in plan.steps.get(stage, {}).get(node.name, ()))
            for node in self._nodes
        }
        self._run("verify", "Verifying services", together, verifying)

    def raise_failed(self, command: str, *, dry_run: bool = False) -> None:
        """One error for all nodes that failed; the hint is the command that the user typed, which may be a deploy."""
        if self.failed:
            typed = self._connections.inventory.typed
            # A dry run keeps no list of failed nodes, and services that stop a deploy leave all of its nodes undone.
            flags = () if dry_run or typed.command not in {"", command} else ("--retry-failed",)
            others = "; the others are done" if len(self.failed) < len(self._nodes) else ""
            raise NodesFailedError(
                f"{command} failed on {len(self.failed)} of {len(self._nodes)} nodes{others}",
                reasons=self.failed,
                hint="fix what is named, then: " + again(typed, typed.command or command, *flags),
            )

    def _run(
        self,
        stage: str,
        title: str,
        steps: Mapping[str, tuple[Step, ...]],
        compiled: Callable[[Sequence[Step], str], str],
    ) -> None:
        nodes = [node for node in self._nodes if steps.get(node.name) and node.name not in self.failed]
        if not nodes:
            return
        began = time.monotonic()
        self._emit(StageStarted(stage, title, len(nodes), "nodes"))
        tokens = {node.name: secrets.token_hex(8) for node in nodes}
        finished = itertools.count(1)

        def work(node: Node) -> Result:
            text = compiled(steps[node.name], tokens[node.name]).encode("utf-8", "surrogateescape")
            remote = self._connections[node]
            result = remote.run(FROM_INPUT, stdin=[text], root=True, deadline=self._deadline)
            self._emit(Progress(stage, next(finished), len(nodes)))
            return result

        answers = fan_out(nodes, work)
        results = {
            name: parse(tokens[name], answer.out) for name, answer in answers.items() if isinstance(answer, Result)
        }
        for name, each in results.items():
            self.steps[name] += each
            if any(step.state == "failed" for step in each):
                self.wrong.add(name)
        self.failed |= failures(self._connections.inventory, nodes, answers, tokens)
        self.seconds[stage] = time.monotonic() - began
        states = {node.name: "failed" if node.name in self.failed else _state(results[node.name]) for node in nodes}
        self._emit(StageFinished(stage, self.seconds[stage], states))


def _state(results: Sequence[StepResult]) -> str:
    for state in ("changed", "would change"):
        if count := sum(step.state == state for step in results):
            return f"{state} ({count} of {len(results)} steps)"
    return "as it should be"
