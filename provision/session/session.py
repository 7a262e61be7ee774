"""One command's session: its nodes, its connections, and the methods that run a stage on them.

A stage runs on several nodes at once. ``ask`` reads, ``apply`` changes nodes by steps, ``work`` calls any function,
and ``each`` does so without showing it. All return an ``Outcome``. A stage measures its time, shows its progress, and
separates failures from values; tasks contain none of that.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

from provision import hints
from provision.errors import ClusterctlError
from provision.inventory import fold
from provision.model import (
    UNTYPED,
    CommandLine,
    Emit,
    Event,
    Inventory,
    Node,
    Notice,
    Result,
    StageFinished,
    Step,
    StepResult,
    ignore,
)
from provision.script import FROM_INPUT, compile_steps, parse
from provision.session.lock import Lock, Sharing, hold
from provision.session.outcome import Failure, Outcome, StepsFailedError, first_failure
from provision.ssh.prompts import Prompts, WithoutSudo
from provision.ssh.remote import Connections, fan_out, reading
from provision.stages import Stage, Unit, stage

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


T = TypeVar("T")
Script = str | Callable[[Node], str]
Compile = Callable[[Sequence[Step], str], str]  # steps and a token to a script

AT_ONCE = 64  # nodes; close to what clush and pdsh do (64 and 32)
_QUARTER = 4
_FEW = 8  # unfinished nodes that are named in the progress


def steps_at_once(nodes: int) -> int:
    """How many of so many nodes carry out steps at a time. Steps take longer on a node than here: a quarter of many."""
    return max(AT_ONCE, nodes // _QUARTER)


class Session:
    """A command's nodes and connections. As a context manager it closes its connections at the end.

    Attributes:
        inventory: the cluster.
        nodes: the nodes that the user chose.
        dry_run: nothing may be changed on any node.
        seconds: how long each finished stage took, by its key.
        typed: the command as the user typed it, for hints.
    """

    def __init__(
        self,
        inventory: Inventory,
        nodes: Sequence[Node] | None = None,
        *,
        typed: CommandLine = UNTYPED,
        prompts: Prompts | None = None,
        emit: Emit = ignore,
        dry_run: bool = False,
        asks_sudo: bool = True,
        connections: Connections | None = None,
    ) -> None:
        """Prepare a session; it connects when a stage needs to.

        Args:
            inventory: the cluster.
            nodes: the chosen nodes; None for all.
            typed: the command as the user typed it.
            prompts: ask the user about host keys and passwords; None: the user cannot be asked.
            emit: receives events.
            dry_run: nothing may be changed.
            asks_sudo: the prompts may ask for the sudo password.
            connections: use these and leave them open, instead of opening new ones.
        """
        self.inventory = inventory
        self.nodes = tuple(inventory.nodes if nodes is None else nodes)
        self.dry_run = dry_run
        self.seconds: dict[str, float] = {}
        self.typed = typed
        self._emit = emit
        self._prompts = prompts if asks_sudo or prompts is None else WithoutSudo(prompts)
        self._connections = connections
        self._lent = connections is not None

    @property
    def connections(self) -> Connections:
        """One connection per node, opened on first use."""
        if self._connections is None:
            self._connections = Connections(self.inventory, self._prompts, self.warn)
        return self._connections

    @property
    def can_ask(self) -> bool:
        """Whether the user can be asked questions."""
        return self._prompts is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connections is not None and not self._lent:
            self._connections.close()

    def emit(self, event: Event) -> None:
        """Pass an event on, and keep the times of stages."""
        if isinstance(event, StageFinished):
            self.seconds[event.stage] = self.seconds.get(event.stage, 0.0) + event.seconds
        self._emit(event)

    def disconnect(self) -> None:
        """Close all connections at once, as if this machine were gone; the next use opens new ones."""
        if self._connections is not None and not self._lent:
            self._connections.close()
            self._connections = None

    # --- stages ----------------------------------------------------------------------------------

    def ask(
        self,
        key: str,
        title: str,
        script: Script,
        read: Callable[[Node, str], T],
        *,
        on: Iterable[Node] | None = None,
        stdin: bytes | None = None,
        deadline: float | None = None,
        state: Callable[[T], str] | None = None,
    ) -> Outcome[T]:
        """Run a read-only script and parse its output.

        Args:
            key: names the stage in events and in results.
            title: names it to the user.
            script: the script, or a function that returns one for a node.
            read: parses a node's output; an error of it is the node's failure.
            on: the nodes; None for the session's.
            stdin: bytes for the script.
            deadline: seconds for each node.
            state: describes a node's value; None shows nothing about nodes that succeeded.
        """

        def one(node: Node) -> T:
            out = self.run(
                node, script if isinstance(script, str) else script(node), stdin=stdin, deadline=deadline
            ).out
            with reading(node):
                return read(node, out)

        return self.work(key, title, one, on=on, state=state)

    def apply(
        self,
        key: str,
        title: str,
        steps: Mapping[str, Sequence[Step]],
        *,
        lock: Lock | None = None,
        root: bool = False,
        deadline: float | None = None,
        compiled: Compile | None = None,
        state: str | Callable[[tuple[StepResult, ...]], str] = "done",
    ) -> Outcome[tuple[StepResult, ...]]:
        """Carry out steps, in one script for each node.

        Args:
            key: names the stage in events and in results.
            title: names it to the user.
            steps: by node name. Nodes without steps are skipped.
            lock: run only while this lock is held.
            root: run as root.
            deadline: seconds for each node.
            compiled: compiles the script; None for ``compile_steps``.
            state: describes a node that succeeded.
        """

        def one(node: Node) -> tuple[StepResult, ...]:
            token = secrets.token_hex(8)
            text = (compiled or _compile)(steps[node.name], token)
            text = lock.guarded(text) if lock else text
            if root:
                stdin = text.encode("utf-8", "surrogateescape")
                result = self.run(node, FROM_INPUT, stdin=stdin, root=True, deadline=deadline)
            else:
                result = self.run(node, text, deadline=deadline)
            done = parse(token, result.out)
            if why := first_failure(done) or (_why(result) if result.rc else ""):
                raise StepsFailedError(why, done)
            return done

        shown = state if callable(state) else lambda _: state
        nodes = [node for node in self.nodes if steps.get(node.name)]
        return self.work(key, title, one, on=nodes, state=shown, limit=steps_at_once(len(nodes)), changes=True)

    def work(
        self,
        key: str,
        title: str,
        function: Callable[[Node], T],
        *,
        on: Iterable[Node] | None = None,
        state: Callable[[T], str] | None = None,
        wrong: Callable[[T], bool] | None = None,
        limit: int = AT_ONCE,
        changes: bool = False,
    ) -> Outcome[T]:
        """Call a function for every node and show the progress.

        A ``ClusterctlError`` is the failure of its node only.

        Args:
            key: names the stage in events and in results.
            title: names it to the user.
            function: what to do with a node.
            on: the nodes; None for the session's.
            state: describes a node's value; None shows nothing about nodes that succeeded.
            wrong: whether a value is shown as a failure.
            limit: how many nodes at a time.
            changes: the function changes nodes; see ``Outcome``.
        """
        nodes = self._chosen(on)
        if not nodes:
            return Outcome(self, {}, changes=changes)
        with self.stage(key, title, len(nodes), "nodes") as shown:
            outcome = self.each(_watched(function, nodes, shown), on=nodes, limit=limit, changes=changes)
            shown.states = {name: failure.kind for name, failure in outcome.failed.items()}
            bad = sum(map(wrong, outcome.ok.values())) if wrong else 0
            shown.failed = len(outcome.failed) + bad
            if state:
                shown.states |= {name: text for name, value in outcome.ok.items() if (text := state(value))}
        return outcome

    def each(
        self,
        function: Callable[[Node], T],
        *,
        on: Iterable[Node] | None = None,
        limit: int = AT_ONCE,
        changes: bool = False,
    ) -> Outcome[T]:
        """Like ``work``, without showing it: for quick work, or a part of another stage."""
        nodes = self._chosen(on)
        _ = self.connections  # created in this thread
        ok: dict[str, T] = {}
        failed: dict[str, Failure] = {}
        answers = fan_out(nodes, function, limit=limit)
        for node in nodes:
            answer = answers[node.name]
            if isinstance(answer, ClusterctlError):
                failed[node.name] = Failure.of(answer, self.inventory, node)
            else:
                ok[node.name] = answer
        return Outcome(self, ok, failed, changes=changes)

    def stage(
        self, key: str, title: str, total: int | None = None, unit: Unit = "nodes"
    ) -> AbstractContextManager[Stage]:
        """Show work that is not done node by node, such as a transfer."""
        return stage(self.emit, key, title, total, unit)

    def locked(self, lock: Lock, on: Iterable[Node] | None = None) -> AbstractContextManager[Sharing]:
        """Hold a lock on nodes while the block runs; see ``lock.hold``."""
        return hold(self, self._chosen(on), lock)

    # --- one node ----------------------------------------------------------------------------------

    def run(
        self, node: Node, script: str, *, stdin: bytes | None = None, root: bool = False, deadline: float | None = None
    ) -> Result:
        """Run a script on one node; see ``model.Remote.run``."""
        given = None if stdin is None else [stdin]
        return self.connections[node].run(script, stdin=given, root=root, deadline=deadline)

    def output(
        self, node: Node, script: str, *, stdin: bytes | None = None, root: bool = False, deadline: float | None = None
    ) -> str:
        """The output of a script that must succeed.

        Raises:
            ClusterctlError: it failed; the message is its error output.
        """
        result = self.run(node, script, stdin=stdin, root=root, deadline=deadline)
        if result.rc:
            raise ClusterctlError(_why(result))
        return result.out

    # --- hints and warnings ------------------------------------------------------------------------

    @property
    def command(self) -> str:
        """The name of the command."""
        return self.typed.command or "the command"

    def again(
        self,
        *flags: str,
        command: str = "",
        words: tuple[str, ...] | None = None,
        drop: tuple[str, ...] = (),
        **changes: str,
    ) -> str:
        """The user's command with changes, or another command for the same inventory; see ``hints.again``."""
        return hints.again(self.typed, command or self.typed.command, *flags, words=words, drop=drop, **changes)

    def without(self, silent: Collection[str], asked: int) -> str:
        """How to continue without nodes that did not answer, of ``asked`` nodes."""
        if len(silent) == asked:
            return "no node answered: check address, user and key in the inventory, then: clusterctl check"
        return "to continue without: " + self.again(exclude=fold(silent))

    def warn(self, text: str) -> None:
        """Show a warning."""
        self.emit(Notice(text, "warning"))

    def _chosen(self, on: Iterable[Node] | None) -> tuple[Node, ...]:
        return self.nodes if on is None else tuple(on)


def _compile(steps: Sequence[Step], token: str) -> str:
    return compile_steps(steps, token=token)


def _why(result: Result) -> str:
    return result.err.strip() or f"the script ended with status {result.rc}"


def _watched(function: Callable[[Node], T], nodes: Sequence[Node], shown: Stage) -> Callable[[Node], T]:
    """``function``, which also reports the number of finished nodes, and names the last few others."""
    waiting = {node.name for node in nodes}
    lock = threading.Lock()

    def one(node: Node) -> T:
        try:
            return function(node)
        finally:
            with lock:
                waiting.discard(node.name)
                few = 0 < len(waiting) <= _FEW
                note = f"waiting for {fold(each.name for each in nodes if each.name in waiting)}" if few else ""
                shown.progress(len(nodes) - len(waiting), note)

    return one
