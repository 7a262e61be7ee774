"""Reads the plan of a run on this node (``contract/plan.py``) and resolves its paths.

``NodePlan.logs`` is the node's folder of the run. It holds ``events.jsonl``, ``state.json``, ``metrics.jsonl``,
``agent.log``, ``run.log`` (every line with its time and rank) and ``launcher.log`` (the output of the command itself).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Optional

from .contract.plan import LIMIT, Plan, PlanError, from_json
from .contract.untrusted import UntrustedError


class NodePlan(NamedTuple):
    """A plan, the folder that its paths are relative to, and its file."""

    data: Plan
    folder: Path
    path: Path

    @property
    def run(self) -> str:
        """The run's id."""
        return self.data.run

    @property
    def node(self) -> str:
        """The node's name."""
        return self.data.node

    @property
    def rank(self) -> int:
        """The node's rank."""
        return self.data.node_rank

    @property
    def grace(self) -> float:
        """Seconds between SIGTERM and SIGKILL."""
        return self.data.grace

    @property
    def host(self) -> Optional[str]:
        """The address of rank 0's node; None for a run on one node."""
        return self.data.link.host if self.data.link else None

    @property
    def cwd(self) -> Path:
        """The folder in which the command starts."""
        return self.folder / self.data.cwd

    @property
    def logs(self) -> Path:
        """The node's folder of the run."""
        return self.folder / self.data.logs

    @property
    def rank_logs(self) -> Path:
        """The folder for the output of ranks."""
        return self.folder / self.data.rank_logs if self.data.rank_logs else self.logs / "ranks"

    @property
    def progress(self) -> Optional[Path]:
        """The trainer's own log. Only rank 0 reads it: nodes may share its folder."""
        return self.folder / self.data.progress if self.data.progress and self.rank == 0 else None

    @property
    def output(self) -> Optional[Path]:
        """The folder of the checkpoints; None for a run that cannot be resumed."""
        return self.folder / self.data.resume.output if self.data.resume else None


def load(path: str) -> NodePlan:
    """Read a plan.

    Raises:
        PlanError: it cannot be read, or is not a plan.
        PermissionError: it belongs to another user.
    """
    where = Path(path).absolute()
    try:
        with where.open("rb") as file:
            plan = from_json(file.read(LIMIT + 1))
    except PermissionError:
        raise
    except (PlanError, OSError) as error:
        raise PlanError("%s: %s" % (path, error)) from error
    except UntrustedError as error:
        raise PlanError("%s %s" % (path, error)) from error
    return NodePlan(plan, where.parent, where)
