"""Watches the output folder of one node: when its checkpoints have changed, and whether any are recognised."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from ..run_files import NodePlan

BUSY = 30.0  # seconds after which an offer is made although files still change: a program that is always saving
DOUBTFUL = 60.0  # seconds after which a checkpoint that is not complete, or not recognised, is reported
LARGE = 1 << 20  # bytes of files that are no known checkpoint, from which they are reported


class Watcher:
    """Sees that the checkpoints in this node's output folder changed, and that they are quiet again."""

    def __init__(self, plan: NodePlan, *, spare: bool = False) -> None:
        self.plan = plan
        self._spare = spare  # it has no ranks
        self._signs: Any = None
        self._offered: Any = None
        self._offered_at = 0.0
        self._strange: Optional[float] = None  # since when there are large files, but no checkpoint
        self._doubted = False

    def look(self, now: float) -> Optional[Dict[str, Any]]:
        """A new offer, if there is one."""
        from ..checkpoints import selection  # noqa: PLC0415
        from . import held  # noqa: PLC0415

        output = self.plan.output
        assert output is not None
        before, self._signs = self._signs, selection.signs(output)
        known, files = self._signs
        if known or sum(size for _, size, _ in files) < LARGE:
            self._strange = None
        elif self._strange is None:
            self._strange = now
        quiet = self._signs == before or now - self._offered_at >= BUSY
        if not quiet or before is None or self._signs == self._offered:
            return None
        self._offered, self._offered_at = self._signs, now
        first, processes = (0, 0) if self._spare else (self.plan.data.first_rank, self.plan.data.processes)
        found = selection.offer(output, first, processes)
        return dict(found, copies=held.offers(output))

    def doubts(self, now: float) -> List[str]:
        """What the user should know about the output folder, once."""
        if self._strange is None or now - self._strange < DOUBTFUL or self._doubted:
            return []
        self._doubted = True
        return [
            "no checkpoint is recognised in %s, so none is copied to other nodes. Its files must be as in "
            "docs/runs.md, section Resuming" % self.plan.output
        ]
