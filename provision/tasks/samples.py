"""``clusterctl metrics --prometheus``: the newest sample of a run on each of its nodes, as Prometheus text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from provision.inventory import fold
from provision.tasks.runs import find
from trainer.agent.contract.prometheus import Source, exposition

if TYPE_CHECKING:
    from provision.run.found import Part
    from provision.session import Session


def prometheus(session: Session, word: str | None) -> str:
    """The samples of a run in one round trip; of nodes where it has ended, the last step and loss.

    Args:
        session: the command's session.
        word: the run's id or a part of it; None: the newest.

    Raises:
        UsageError: no run matches, or several do.
        NodesFailedError: no node answered.
    """
    run, found = find(session, word)
    if silent := found.silent(run):
        session.warn(f"no samples from {fold(silent)}: no answer")
    return exposition([source_of(part) for part in run.parts])


def source_of(part: Part) -> Source:
    """A part's newest sample, and the state that its agent wrote where it has no sample."""
    newest = part.samples[-1] if part.live and part.samples else {}
    return Source(part.run, part.node, part.live, {**part.fields, **newest})
