"""``clusterctl run``: one command on many nodes, and what each of them said."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError, NodesFailedError, UsageError
from provision.hints import again
from provision.model import CommandLine, Emit, Inventory, Node, Progress, Result, StageFinished, StageStarted
from provision.render import words as quoted
from provision.ssh.remote import Connections, fan_out
from provision.tasks.answers import hint, reason

if TYPE_CHECKING:
    from provision.ssh.prompts import Prompts

AT_ONCE = 64  # nodes; what clush and pdsh come near to as well (64 and 32)


@dataclass(frozen=True)
class Commanded:
    """What became of a command.

    Attributes:
        command: as sh has read it.
        results: by node name, what it printed and how it ended, where it ran to its end.
        failed: by node name, why it did not, or that its exit status was not 0.
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
    """The line of sh that stands for a command line.

    One word is a line of sh already, as with ssh, pdsh and clush: ``'uptime | cut -c1-9'``. Several are an argv, and
    each reaches the program as it was given.

    Raises:
        UsageError: there is nothing to run.
    """
    if not any(word.strip() for word in words):
        raise UsageError("there is no command to run", hint="clusterctl run -- nvidia-smi -L")
    return words[0] if len(words) == 1 else quoted(words)


def run_command(
    inventory: Inventory,
    nodes: Sequence[Node],
    words: Sequence[str],
    *,
    root: bool = False,
    deadline: float | None = None,
    prompts: Prompts | None = None,
    emit: Emit,
) -> Commanded:
    """Run a command on every node, on many at once; none waits for another. It reads nothing.

    Args:
        inventory: the cluster.
        nodes: those of its nodes that are meant.
        words: see ``command_line``.
        root: run it as root.
        deadline: seconds that it may take on a node; None: any time.
        prompts: how to ask for a password or about a host key.
        emit: is told about the progress.

    Raises:
        UsageError: there is nothing to run.
        InterruptedByUser: Ctrl-C; what ran was told to end.
    """
    line = command_line(words)
    began = time.monotonic()
    emit(StageStarted("run", f"Running {_short(line)}", len(nodes), "nodes"))
    lock = threading.Lock()
    done = 0

    def work(node: Node) -> Result:
        nonlocal done
        try:
            return pool[node].run(line, deadline=deadline, root=root)
        finally:
            with lock:
                done += 1
                emit(Progress("run", done, len(nodes)))

    with Connections(inventory, prompts) as pool:
        answers = fan_out(nodes, work, limit=AT_ONCE)
    failed = {}
    for node in nodes:
        answer = answers[node.name]
        if isinstance(answer, ClusterctlError):
            failed[node.name] = reason(answer, inventory, node)
        elif answer.rc:
            failed[node.name] = f"exit status {answer.rc}"
    emit(
        StageFinished(
            "run",
            time.monotonic() - began,
            summary=f"{len(nodes) - len(failed)} of {len(nodes)} succeeded",
            failed=len(failed),
        )
    )
    given = inventory.typed
    typed = given if given.command else CommandLine("run", {"--root": ()} if root else {}, tuple(words))
    return Commanded(
        line,
        {name: answer for name, answer in answers.items() if isinstance(answer, Result)},
        failed,
        hint(answers.values(), "to run it again there: " + again(typed, "run", "--retry-failed")),
    )


def _short(line: str) -> str:
    text = " ".join(line.split())
    return text if len(text) <= 50 else text[:49] + "…"
