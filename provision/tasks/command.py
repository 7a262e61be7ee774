"""``clusterctl run``: runs one command on many nodes and collects their output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from provision.errors import NodesFailedError, UsageError
from provision.hints import again
from provision.model import CommandLine, Result
from provision.render import words as quoted

if TYPE_CHECKING:
    from provision.session import Session


@dataclass(frozen=True)
class Commanded:
    """What became of a command.

    Attributes:
        command: the line of sh.
        results: by node name, the output and exit status, if the command finished.
        failed: by node name, why it did not finish, or its exit status if that is not 0.
        hint: what to do about the failures.
    """

    command: str
    results: Mapping[str, Result]
    failed: Mapping[str, str]
    hint: str = ""

    def raise_failed(self) -> None:
        """Raise one error for all nodes that failed.

        Raises:
            NodesFailedError: there are some.
        """
        if self.failed:
            count = len({*self.results, *self.failed})
            raise NodesFailedError(
                f"the command failed on {len(self.failed)} of {count} nodes", reasons=self.failed, hint=self.hint
            )


def command_line(words: Sequence[str]) -> str:
    """A command line as a line of sh.

    One word is a line of sh, as with ssh, pdsh and clush: ``'uptime | cut -c1-9'``. Several words are a program and
    its arguments, which reach it unchanged.

    Raises:
        UsageError: there is no command.
    """
    if not any(word.strip() for word in words):
        raise UsageError("no command to run", hint="clusterctl run -- nvidia-smi -L")
    return words[0] if len(words) == 1 else quoted(words)


def run_command(
    session: Session, words: Sequence[str], *, root: bool = False, deadline: float | None = None
) -> Commanded:
    """Run a command on many nodes at once. It gets no input.

    Args:
        session: the command's session.
        words: see ``command_line``.
        root: run it as root.
        deadline: seconds on each node; None: no limit.

    Raises:
        UsageError: there is no command.
        InterruptedByUser: Ctrl-C; the command was stopped everywhere.
    """
    line = command_line(words)
    outcome = session.work(
        "run",
        f"Running {_short(line)}",
        lambda node: session.run(node, line, deadline=deadline, root=root),
        wrong=lambda result: result.rc != 0,
    )
    bad = {name: f"exit status {result.rc}" for name, result in outcome.ok.items() if result.rc}
    every = {**outcome.reasons, **bad}
    failed = {node.name: every[node.name] for node in session.nodes if node.name in every}
    typed = session.typed if session.typed.command else CommandLine("run", {"--root": ()} if root else {}, tuple(words))
    return Commanded(
        line, outcome.ok, failed, outcome.hint("to run it again there: " + again(typed, "run", "--retry-failed"))
    )


def _short(line: str) -> str:
    text = " ".join(line.split())
    return text if len(text) <= 50 else text[:49] + "…"
