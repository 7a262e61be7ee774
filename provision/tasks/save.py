"""``clusterctl save``: lets a running trainer save a checkpoint and continue."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from provision.errors import NodesFailedError, UsageError
from provision.render import render
from provision.run.found import Run
from provision.session import Session
from provision.tasks.runs import by_name, find, refuse_others

PROGRAM = r" -m trainer\.(lm|vlm) "  # in the command line of a process that saves on SIGUSR2
_DEADLINE = 30.0
_ASKED = re.compile(r"^asked [0-9]+$", re.MULTILINE)


@dataclass(frozen=True)
class Saved:
    """A request to save.

    Attributes:
        run: the run's id.
        node: the node of the processes.
        processes: how many processes got it.
        step: the run's step before.
    """

    run: str
    node: str
    processes: int
    step: int | None = None


def save_run(
    session: Session,
    word: str | None,
    *,
    others_too: bool = False,
    ask: Callable[[Sequence[Run]], Run] | None = None,
) -> Saved:
    """Ask the ranks of rank 0's node to save after their step: the trainer's ranks decide together.

    Args:
        session: the command's session.
        word: the run; None: the only one that is running.
        others_too: accept another user's run, which only root may signal.
        ask: chooses among running runs if no word was given; None without a terminal.

    Raises:
        UsageError: no run matches, or several do; it is over; its program cannot save without stopping.
        PreflightError: the run is another user's.
        NodesFailedError: no node answered, or rank 0's node did not.
    """
    run, found = find(session, word, live_first=True, ask=ask)
    refuse_others(session, run, found, others_too=others_too, command="save")
    if not run.live:
        raise UsageError(f"run {run.id} is {run.state}: it saves nothing more", hint=f"clusterctl status {run.id}")
    node = by_name(session.inventory).get(run.head.node)
    if node is None or run.head.rank != 0:
        raise NodesFailedError(
            f"rank 0 of {run.id} was not asked to save",
            reasons=found.silent(run) or {run.head.node: "it is not the node of rank 0"},
            nothing_done=True,
        )
    script = render(
        "run/save.sh.j2", mark=f"CLUSTERCTL_RUN={run.id}", name=f"CLUSTERCTL_NODE={node.name}", program=PROGRAM
    )
    count = len(_ASKED.findall(session.run(node, script, deadline=_DEADLINE).out))
    if not count:
        raise UsageError(
            f"run {run.id} cannot save without stopping: only trainer.lm and trainer.vlm can, after they have loaded",
            hint=f"to save and stop: clusterctl stop --save {run.id}",
        )
    step = run.reporter.number("step")
    return Saved(run.id, node.name, count, None if step is None else int(step))
