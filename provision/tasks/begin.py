"""The agents of a run are started on all nodes and followed: what ``train`` and ``resume`` have in common."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from provision.errors import ClusterctlError, InterruptedByUser, NodesFailedError, RunFailedError
from provision.inventory import fold
from provision.masking import mask_plan
from provision.model import Emit, Inventory, Node, StageFinished, StageStarted
from provision.render import render
from provision.run import fields, plan_name, record, world_size
from provision.run.follow import Follower
from provision.run.record import TrainResult, output_of
from provision.ssh.remote import Connections, fan_out
from provision.tasks.answers import reason
from provision.tasks.attach import Ask, Attachment
from provision.tasks.runs import find_all
from provision.tasks.stop import stop_on
from trainer.contract import Plan

if TYPE_CHECKING:
    from provision.run.proof import Proof

_START_DEADLINE = 90.0


@dataclass(frozen=True)
class Following:
    """How a run is followed: ``detach`` leaves it alone once it has begun; ``ask`` is what Ctrl-C does, None: stop."""

    detach: bool = False
    ask: Ask | None = None


@dataclass
class Beginning:
    """A run that is about to begin.

    Attributes:
        inventory: the cluster.
        connections: to its nodes.
        nodes: in the order of their ranks.
        run: its id.
        plans: what each agent is given, in the same order.
        about: what the record says besides.
    """

    inventory: Inventory
    connections: Connections
    nodes: Sequence[Node]
    run: str
    plans: Sequence[Plan]
    about: Mapping[str, Any]
    left: dict[str, str] = field(default_factory=dict, init=False)  # by node, what a stop could not end or prove

    def go(self, following: Following, emit: Emit) -> TrainResult:
        """Start the agents, and follow them to the end or until somebody lets go of them.

        Raises:
            RunFailedError: the run failed, or could not be started; every node was stopped.
            InterruptedByUser: it was stopped, by Ctrl-C or by another command.
            NodesFailedError: no node can be reached any more; the run may go on.
        """
        folder = record.folder_of(self.inventory.path, self.run)
        names = [node.name for node in self.nodes]
        attempts = self.plans[0].attempts
        follower = Follower(self.run, names, folder, attempts=attempts, emit=emit)
        there = PurePosixPath(str(self.about["folder"]))
        described = {
            **self.about,
            "run": self.run,
            "inventory": self.inventory.path.name,
            "nodes": names,
            "plans": {plan.node: mask_plan(plan.to_object()) for plan in self.plans},
            "who": record.author(),
            "began": record.now(),
        }
        record.write(folder, {**described, "state": "running", "attached": True})
        began = time.monotonic()
        outcome, left_as = "failed", ""
        try:
            try:
                emit(StageStarted("train", f"Training {self.run}", None, "steps"))
                offsets = self._start(there, emit)
            except (KeyboardInterrupt, InterruptedByUser):
                self._stop(emit)
                outcome = "failed" if self.left else "stopped"
                raise self._interrupted() from None
            attachment = Attachment(self.nodes, follower, there, offsets)
            outcome, left_as = "detached", "followed no more"  # also when it is left behind in the midst of a stop
            outcome = attachment.follow(
                self.connections,
                emit,
                until=(lambda: follower.started) if following.detach else None,
                stop=lambda: self._stop(emit),
                ask=following.ask,
            )
            if outcome == "detached":
                left_as = "goes on"
            elif follower.state != "running":
                left_as = ""
        finally:
            follower.close()
            seconds = time.monotonic() - began
            state = {"ended": follower.state, "detached": "running"}.get(outcome, outcome)
            told = {"seconds": round(seconds, 1), "losses": follower.losses, "steps": follower.steps}
            record.write(
                folder, {**described, **told, "state": state, "attached": False, "why": dict(follower.failures)}
            )
            emit(StageFinished("train", seconds, follower.states, goes_on=left_as))
        if outcome == "ended":
            self._verdict(follower)
        elif following.detach and follower.unheard:
            raise NodesFailedError(
                f"whether run {self.run} started on {fold(follower.unheard)} is not known; it is running on the others",
                reasons=follower.unheard,
                hint=f"clusterctl status {self.run}; clusterctl stop {self.run}",
            )
        return self._result(follower, folder, "finished" if outcome == "ended" else "detached", seconds)

    def _start(self, there: PurePosixPath, emit: Emit) -> dict[str, int]:
        """Start every node's agent: one round trip. When one cannot be, none is left.

        Returns:
            By node name, the byte at which the events of this time begin.
        """
        ranks = {node.name: rank for rank, node in enumerate(self.nodes)}

        def start(node: Node) -> int:
            plan = self.plans[ranks[node.name]]
            script = render(
                "run/start.sh.j2",
                plan=plan.to_json(),
                name=plan_name(ranks[node.name]),
                run=str(there),
                release=plan.prefix,
            )
            result = self.connections[node].run(script, deadline=_START_DEADLINE)
            said = _said(result.out)
            if result.rc != 0 or said.get("error"):
                why = said.get("error") or result.err.strip() or f"the agent ended with status {result.rc}"
                raise ClusterctlError(str(why))
            return said.get("at") or 0

        answers = fan_out(self.nodes, start, limit=len(self.nodes))
        failed = {
            node.name: reason(answer, self.inventory, node)
            for node in self.nodes
            if isinstance(answer := answers[node.name], ClusterctlError)
        }
        if failed:
            self._stop(emit)
            raise RunFailedError(
                f"run {self.run} could not be started; "
                + ("every node was stopped" if not self.left else "what was started is not all proved to be gone"),
                reasons={**self.left, **failed},
                hint=f"clusterctl stop {self.run}" if self.left else f"clusterctl diagnose {self.run}",
            )
        return {name: answer for name, answer in answers.items() if isinstance(answer, int)}

    def _stop(self, emit: Emit) -> None:
        """Stop the run on every node; ``left`` has those where it may still be."""
        ranks = {node.name: rank for rank, node in enumerate(self.nodes)}
        answers = stop_on(self.inventory, self.run, self.nodes, ranks, self.connections, emit=emit)
        self.left = {
            node.name: text for node in self.nodes if (text := _problem(answers[node.name], self.inventory, node))
        }

    def _interrupted(self, saved: int | None = None) -> InterruptedByUser:
        """What is said after a stop."""
        if self.left:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.left.items())
            text = f"run {self.run} was interrupted, and it is not proved to be gone everywhere: {reasons}"
            return InterruptedByUser(text, hint=f"clusterctl stop {self.run}")
        text = f"run {self.run} was interrupted and stopped on every node"
        text += f"; its work is saved at step {saved}" if saved is not None else ""
        return InterruptedByUser(text, hint=self._resume)

    @property
    def _resume(self) -> str:
        """The command that goes on with the run, where there is a way to."""
        can = self.plans[0].resume
        return f"to go on from its newest checkpoint: clusterctl resume {self.run}" if can else ""

    def _verdict(self, follower: Follower) -> None:
        if follower.state == "stopped" or (self.left and follower.state == "running"):
            raise self._interrupted(follower.saved)
        if follower.state == "running":
            raise NodesFailedError(
                f"nobody gets through to {fold(follower.unheard)} any more; run {self.run} may go on there",
                reasons=follower.failures,
                hint=f"clusterctl logs -f {self.run}; clusterctl status {self.run}",
            )
        if follower.state == "failed":
            lost = [name for name, state in follower.states.items() if state == "lost"]
            raise RunFailedError(
                f"run {self.run} failed; every node was stopped"
                + (f", but of {', '.join(lost)} that is not known" if lost else ""),
                reasons=follower.failures,
                hint="; ".join(
                    part
                    for part in (
                        f"to end what may be left: clusterctl stop {self.run}" if lost else "",
                        f"clusterctl diagnose {self.run}",
                        self._resume,
                        f"the logs of all ranks are in {follower.folder}",
                    )
                    if part
                ),
            )

    def _result(self, follower: Follower, folder: Path, state: str, seconds: float) -> TrainResult:
        return TrainResult(
            run=self.run,
            state=state,
            folder=folder,
            nodes=tuple(node.name for node in self.nodes),
            world_size=world_size(self.plans),
            seconds=seconds,
            steps=follower.steps,
            first_loss=follower.losses[0] if follower.losses else None,
            last_loss=follower.losses[-1] if follower.losses else None,
            output=output_of(self.plans[0], str(self.about["folder"])),
            network=self._network() if state == "finished" else "",
        )

    def _network(self) -> str:
        """Which network NCCL has used, where there were GPUs."""
        if not any("NCCL_DEBUG_FILE" in plan.env for plan in self.plans):
            return ""
        found = find_all(self.inventory, self.nodes, self.connections, word=self.run, need_answers=False).runs
        return "; ".join(found[self.run].networks) if self.run in found else ""


def _said(out: str) -> dict[str, Any]:
    """The agent's line, the last one that is a JSON object."""
    for line in reversed(out.splitlines()):
        content = fields.read(line)
        if content is not None:
            return content
    return {}


def _problem(answer: Proof | ClusterctlError, inventory: Inventory, node: Node) -> str:
    return reason(answer, inventory, node) if isinstance(answer, ClusterctlError) else answer.problem
