"""Starts a run's agents on all nodes and follows them to the run's end: what ``train`` and ``resume`` have in common.

The user may detach from the run, stop it, or continue to follow it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from provision.errors import ClusterctlError, InterruptedByUser, NodesFailedError, RunFailedError
from provision.inventory import fold
from provision.launchers import filled
from provision.masking import mask_plan
from provision.model import Emit, Node
from provision.render import render
from provision.run import fields, node_history, plan_name, record, world_size
from provision.run.follow import Follower, parsed
from provision.run.record import TrainResult, output_of
from provision.session.streams import Pool, Stream, Streams
from provision.stages import Stage
from provision.tasks.runs import find_all, problems, stop_on
from trainer.agent.contract import effective
from trainer.agent.contract.plan import Plan

if TYPE_CHECKING:
    from provision.session import Outcome, Session

Choice = Literal["detach", "stop", "continue"]
Ask = Callable[[], Choice]

_START_DEADLINE = 90.0
# Seconds for an agent, beyond its grace, to see every process exit after the other nodes have ended.
PATIENCE = 75.0
LAST_WORD = 10.0  # seconds for a node without a connection to come back after all others have ended
FORSAKEN = 900.0  # seconds without any node until the command gives up; the run may still be running
LOOK = 1.0
SAME = 1.0  # seconds within which a second interrupt is the same one: a wrapper forwards the terminal's interrupt too


class HungUp(KeyboardInterrupt):
    """SIGTERM or SIGHUP: a command that follows a run detaches from it; any other command is interrupted."""


@dataclass(frozen=True)
class Following:
    """How a run is followed.

    Attributes:
        detach: leave it once it has started.
        ask: what Ctrl-C does; None: stop.
        enough: leave it once this is true of its last step, None before the first one.
    """

    detach: bool = False
    ask: Ask | None = None
    enough: Callable[[int | None], bool] | None = None


@dataclass
class Start:
    """A run that is about to start.

    Attributes:
        session: the command's session.
        nodes: in the order of their ranks, spares last.
        run: its id.
        plans: what each agent receives, in the same order.
        about: additional fields of the record.
        interfaces: by node, the interface to rank 0, for the record.
        left: by node, what a stop could not end or verify.
    """

    session: Session
    nodes: Sequence[Node]
    run: str
    plans: Sequence[Plan]
    about: Mapping[str, Any]
    interfaces: Mapping[str, str | None] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict, init=False)

    def follow(self, following: Following) -> TrainResult:
        """Start the agents, and follow them until the run ends or the user detaches.

        Raises:
            RunFailedError: the run failed, or could not be started; every node was stopped.
            InterruptedByUser: it was stopped, by Ctrl-C or by another command.
            NodesFailedError: no node can be reached any more; the run may still be running.
        """
        folder = record.folder_of(self.session.inventory.path, self.run)
        names = [node.name for node in self.nodes]
        attempts = self.plans[0].attempts
        active = self.plans[0].nnodes
        follower = Follower(self.run, names, folder, attempts=attempts, active=active, emit=self.session.emit)
        there = PurePosixPath(str(self.about["folder"]))
        described = {
            **self.about,
            "run": self.run,
            "inventory": self.session.inventory.path.name,
            "nodes": names[:active],
            "spares": names[active:],
            "plans": {plan.node: mask_plan(plan).to_object() for plan in filled(self.plans, self.interfaces)},
            "expected": (band := self.plans[0].expected) and band.to_object(),
            "who": record.author(),
            "began": record.now(),
        }
        earlier = node_history.named((record.read(folder) or {}).get("named"))
        record.write(folder, {**described, "named": earlier, "state": "running", "attached": True})
        outcome = "failed"
        shown = Stage(self.session.emit, "train", f"Training {self.run}", None, "steps")
        try:
            try:
                shown.start()
                offsets = self.start_agents(there)
            except (KeyboardInterrupt, InterruptedByUser):
                self._stop()
                outcome = "failed" if self.left else "stopped"
                raise self._interrupted() from None
            # Shown also if this command is interrupted in the middle of a stop.
            outcome, shown.running = "detached", "no longer followed"
            outcome = Attachment(self.nodes, follower, there, offsets).follow(
                self.session.connections,
                self.session.emit,
                until=_until(follower, following),
                stop=self._stop,
                ask=following.ask,
            )
            if outcome == "detached":
                shown.running = "still running"
            elif follower.state != "running":
                shown.running = ""
        finally:
            follower.close()
            seconds, shown.states = shown.seconds, follower.shown
            state = {"ended": follower.state, "detached": "running"}.get(outcome, outcome)
            figures = {"seconds": round(seconds, 1), "losses": follower.losses, "steps": follower.steps}
            why = dict(follower.failures)
            figures |= {"spent": follower.spent, "named": _named(earlier, follower)}
            for name, reason in follower.replaced.items():
                node_history.exclude(self.session.inventory.path, name, reason, self.run)
            record.write(
                folder,
                {
                    **described,
                    **figures,
                    "nodes": list(follower.members),
                    "state": state,
                    "attached": False,
                    "why": why,
                },
            )
            shown.finish()
        if outcome == "ended":
            pattern = self.plans[0].pattern or ""
            if "(?P<step>" in pattern and follower.steps is None:
                self.session.warn(f"no line of the log matched the pattern {pattern}")
            self._verdict(follower)
        elif following.detach and follower.unheard:
            raise NodesFailedError(
                f"whether run {self.run} started on {fold(follower.unheard)} is not known; it is running on the others",
                reasons=follower.unheard,
                hint=f"clusterctl status {self.run}; clusterctl stop {self.run}",
            )
        return self._result(follower, "finished" if outcome == "ended" else "detached", seconds)

    def start_agents(self, there: PurePosixPath) -> Mapping[str, int]:
        """Start every node's agent in one round trip. If one cannot start, all are stopped.

        Returns:
            By node name, the byte at which this attempt's events start.
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
            result = self.session.run(node, script, deadline=_START_DEADLINE)
            answer = answer_of(result.out)
            if result.rc != 0 or answer.get("error"):
                why = answer.get("error") or result.err.strip() or f"the agent ended with status {result.rc}"
                raise ClusterctlError(str(why))
            return answer.get("at") or 0

        outcome = self.session.each(start, on=self.nodes, limit=len(self.nodes), changes=True)
        self.refuse_failed(outcome)
        return outcome.ok

    def refuse_failed(self, outcome: Outcome[Any]) -> None:
        """Stop every node if an agent could not be started.

        Raises:
            RunFailedError: one could not.
        """
        if outcome.failed:
            self._stop()
            stopped = "every node was stopped" if not self.left else "some agents may still be running"
            raise RunFailedError(
                f"run {self.run} could not be started; {stopped}",
                reasons={**self.left, **outcome.reasons},
                hint=f"clusterctl stop {self.run}" if self.left else f"clusterctl diagnose {self.run}",
            )

    def _stop(self) -> None:
        """Stop the run on every node; ``left`` has the nodes where it may still be running."""
        ranks = {node.name: rank for rank, node in enumerate(self.nodes)}
        self.left = problems(stop_on(self.session, self.run, self.nodes, ranks))

    def _interrupted(self, saved: int | None = None) -> InterruptedByUser:
        """The error after a stop."""
        if self.left:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.left.items())
            text = f"run {self.run} was interrupted, and may still be running: {reasons}"
            return InterruptedByUser(text, hint=f"clusterctl stop {self.run}")
        text = f"run {self.run} was interrupted and stopped on every node"
        text += f"; its work is saved at step {saved}" if saved is not None else ""
        return InterruptedByUser(text, hint=self._resume)

    @property
    def _resume(self) -> str:
        """The command that resumes the run, if it can be resumed."""
        can = self.plans[0].resume
        return f"to continue from its newest checkpoint: clusterctl resume {self.run}" if can else ""

    def _verdict(self, follower: Follower) -> None:
        if follower.state == "stopped" or (self.left and follower.state == "running"):
            raise self._interrupted(follower.saved)
        if follower.state == "running":
            raise NodesFailedError(
                f"{fold(follower.unheard)} can no longer be reached; run {self.run} may still be running there",
                reasons=follower.failures,
                hint=f"clusterctl logs -f {self.run}; clusterctl status {self.run}",
            )
        if follower.state == "failed":
            lost = [name for name, state in follower.states.items() if state == "lost"]
            hints = (
                f"to stop any processes that are left: clusterctl stop {self.run}" if lost else "",
                f"clusterctl diagnose {self.run}",
                self._resume,
                f"the logs of all ranks are in {follower.folder}",
            )
            raise RunFailedError(
                f"run {self.run} failed; every node was stopped"
                + (f", but whether {', '.join(lost)} was is not known" if lost else ""),
                reasons=follower.failures,
                hint="; ".join(part for part in hints if part),
            )

    def _result(self, follower: Follower, state: str, seconds: float) -> TrainResult:
        return TrainResult(
            run=self.run,
            state=state,
            folder=follower.folder,
            nodes=follower.members if state == "finished" else tuple(node.name for node in self.nodes),
            world_size=world_size(self.plans[: self.plans[0].nnodes]),
            seconds=seconds,
            steps=follower.steps,
            spent=effective.read(follower.spent),
            first_loss=follower.losses[0] if follower.losses else None,
            last_loss=follower.losses[-1] if follower.losses else None,
            output=output_of(self.plans[0], str(self.about["folder"])),
            network=self._network() if state == "finished" else "",
            unsent=self.about.get("unsent", {}),
        )

    def _network(self) -> str:
        """Which network NCCL used, if there were GPUs."""
        if not any("NCCL_DEBUG_FILE" in plan.env for plan in self.plans):
            return ""
        found = find_all(self.session, on=self.nodes, word=self.run, need_answers=False).runs
        return "; ".join(found[self.run].networks) if self.run in found else ""


def _named(earlier: Mapping[str, int], follower: Follower) -> dict[str, int]:
    """By node, the failures of the run that named it: before, at restarts, and at the end."""
    ended = list(follower.failures) if follower.state == "failed" else []
    return dict(Counter(earlier) + follower.named + Counter(ended))


def _until(follower: Follower, following: Following) -> Callable[[], bool] | None:
    """When the command leaves the run; None: at its end."""
    enough = following.enough
    if enough is not None:
        return lambda: enough(follower.steps)
    return (lambda: follower.started) if following.detach else None


def answer_of(out: str) -> dict[str, Any]:
    """The agent's line, the last one that is a JSON object."""
    for line in reversed(out.splitlines()):
        content = fields.read(line)
        if content is not None:
            return content
    return {}


def stop_detached(session: Session, result: TrainResult) -> None:
    """Stop a run that the command has left because it has trained enough.

    Raises:
        NodesFailedError: it may still be running.
    """
    if result.state != "detached":
        return
    nodes = [next(node for node in session.nodes if node.name == name) for name in result.nodes]
    left = problems(stop_on(session, result.run, nodes, {node.name: rank for rank, node in enumerate(nodes)}))
    if left:
        raise NodesFailedError(
            f"run {result.run} may still be running", reasons=left, hint=f"clusterctl stop {result.run}"
        )


class Attachment:
    """Follows the agents of a run on ``nodes``, which are in the order of their ranks.

    ``folder`` is the run's folder on the nodes; ``offsets`` are the first bytes of ``events.jsonl`` to read, by node.
    """

    def __init__(
        self, nodes: Sequence[Node], follower: Follower, folder: PurePosixPath, offsets: Mapping[str, int]
    ) -> None:
        self.nodes = tuple(nodes)
        self.follower = follower
        self._folder = folder
        self._offsets = {node.name: offsets.get(node.name, 0) for node in nodes}

    def follow(
        self,
        pool: Pool,
        emit: Emit,
        *,
        until: Callable[[], bool] | None = None,
        stop: Callable[[], object],
        ask: Ask | None = None,
    ) -> Literal["ended", "detached"]:
        """Follow the run until it ends, or until the user detaches.

        Args:
            pool: the connections.
            emit: receives notices about lost connections.
            until: detach as soon as this is true.
            stop: stops the run on every node.
            ask: what Ctrl-C does; None: stop.

        Raises:
            InterruptedByUser: a second Ctrl-C, while the run was being stopped.
            NodesFailedError: no node could be reached for ``FORSAKEN`` seconds.
        """
        streams = Streams([self._stream(node, pool) for node in self.nodes], emit)
        streams.start()
        try:
            self._until_over(streams, until, stop, ask)
        except HungUp:
            pass
        finally:
            streams.close()
        return "ended" if self.follower.over else "detached"  # a signal after the last event changes nothing

    def _until_over(
        self, streams: Streams, until: Callable[[], bool] | None, stop: Callable[[], object], ask: Ask | None
    ) -> None:
        """Wait, and do what Ctrl-C asks for. Raises ``HungUp`` to detach."""
        # The stop has its own thread: this one still reads events.
        stopper = threading.Thread(target=stop, name="stop", daemon=True)
        stopping = 0.0
        while True:
            try:
                self._wait(streams, until)
            except KeyboardInterrupt as signal:  # noqa: PERF203 - one round for each Ctrl-C
                if isinstance(signal, HungUp) or (self.follower.over and not stopping):
                    raise HungUp from None
                if not stopping:
                    choice = ask() if ask else "stop"
                    if choice == "detach":
                        raise HungUp from None
                    if choice == "stop":
                        stopping = time.monotonic()
                        stopper.start()
                elif time.monotonic() - stopping > SAME:
                    raise InterruptedByUser(
                        f"interrupted while run {self.follower.run} was being stopped",
                        hint=f"clusterctl stop {self.follower.run}",
                    ) from None
            else:
                if stopping:
                    stopper.join()
                return

    def _stream(self, node: Node, pool: Pool) -> Stream:
        rank = self.nodes.index(node)

        def script() -> str:
            agent, plan = f"{self._folder}/agent", f"{self._folder}/{plan_name(rank)}"
            arguments = ["-IS", agent, "follow", plan, "--from", self._offsets[node.name]]
            return render("run/agent_python.sh.j2", run=str(self._folder), arguments=arguments)

        def line(text: str) -> bool:
            event = parsed(text)
            offset = event.pop("at", None)
            self.follower.take(node.name, event)
            if isinstance(offset, int):
                self._offsets[node.name] = offset  # last, so that an event that was not processed is read again
            return self.follower.ended(node.name)

        return Stream(node, pool, script, line)

    def _wait(self, streams: Streams, until: Callable[[], bool] | None) -> None:
        """Wait until the run ends or ``until`` is true. Nodes that cannot be reached are given up eventually."""
        follower = self.follower
        first_end: float | None = None
        while not (follower.over or (until and until())):
            streams.check()
            for stream in streams.streams:
                if stream.failure and not follower.ended(stream.node.name):
                    follower.lost(stream.node.name, stream.failure)
            going = [stream for stream in streams.streams if not follower.ended(stream.node.name)]
            members = [name for name in follower.members if name not in follower.unheard]
            if not any(map(follower.ended, members)):  # no node has reported its end
                first_end = None
                self._forsaken(going)
            else:
                first_end = time.monotonic() if first_end is None else first_end
                self._give_up(going, time.monotonic() - first_end)
            follower.turned.wait(LOOK)
            follower.turned.clear()

    def _give_up(self, going: Sequence[Stream], waited: float) -> None:
        """Give up nodes that are still running ``waited`` seconds after the others ended."""
        for stream in going:
            if min(waited, stream.away()) > LAST_WORD:
                self.follower.lost(stream.node.name, "no connection; what became of the run there is not known")
            elif waited > PATIENCE:
                self.follower.lost(stream.node.name, "its agent has not ended, but another node's agent has")

    def _forsaken(self, going: Sequence[Stream]) -> None:
        if going and all(stream.away() > FORSAKEN for stream in going):
            raise NodesFailedError(
                f"no connection to any node of run {self.follower.run} for {FORSAKEN / 60:.0f} min; "
                "whether it is still running is not known",
                reasons={},
                hint=f"clusterctl logs -f {self.follower.run}",
            )
