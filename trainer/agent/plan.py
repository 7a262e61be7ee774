"""The plan of a run on one node, ``plan-<rank>.json``; relative paths are relative to the folder it lies in.

=============  =====================================================================================
``run``        the run's id; every process carries it as ``CLUSTERCTL_RUN``
``node``       the node's name; carried as ``CLUSTERCTL_NODE``
``node_rank``, ``nnodes``, ``processes``  the node's rank, the number of nodes, of local ranks
``argv``       the command; an element ``{port}`` becomes the attempt's port
``env``        set for it, over the few variables that are inherited; ``MASTER_PORT`` is the attempt's
``unset``      taken out of what is inherited
``cwd``        where it starts
``logs``       the node's own folder: ``events.jsonl``, ``state.json``, ``metrics.jsonl``, ``agent.log``,
               ``run.log`` (every line with its time and rank) and ``launcher.log`` (the command's own output)
``rank_logs``  optional: torchrun's ``--log-dir``
``first_rank`` optional: the global rank of local rank 0
``progress``   optional: LLaMA-Factory's ``trainer_log.jsonl``
``private``    optional: folders to make for this user alone
``grace``      seconds between SIGTERM and SIGKILL; 10. Never more than 2 after a failure or a stop that saves nothing
``port``       ``MASTER_PORT`` of the first attempt
``link``       null for one node, else ``{"host", "port", "token", "nodes", "lost_after"}``, see ``link/links.py``
``hang``       ``{"after": seconds or null, "policy": "stop" or "warn"}``, see ``watch/watch.py``
``resume``     null, or ``{"output": DIR, "argv": ["resume_from_checkpoint={checkpoint}"], "env": {…}}``: where
               checkpoints are written, and how one is handed to the command
``resuming``   true: begin from the newest complete checkpoint
``checkpoint`` "none-ok": when there is none, from the beginning
``restarts``   how often a failed attempt is begun again; 0
``backoff``    seconds before that; 1, doubled each time, at most 60
``save_patience``  seconds that a stop leaves for saving; 600
``prefix``     the release's path
=============  =====================================================================================
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional

from untrusted import UntrustedError, parse_object

LIMIT = 16 << 20  # bytes
NEEDED = {"run": str, "node": str, "argv": list, "env": dict}
BACKOFF_LIMIT = 60.0  # seconds


class PlanError(Exception):
    """A plan that cannot be used, with its path and what is wrong."""


class Plan(NamedTuple):
    """A plan with the folder that its paths are relative to."""

    given: Dict[str, Any]
    folder: Path
    path: Path

    @property
    def run(self) -> str:
        """The run's id."""
        return str(self.given["run"])

    @property
    def node(self) -> str:
        """The node's name."""
        return str(self.given["node"])

    @property
    def rank(self) -> int:
        """The node's rank."""
        return int(self.given.get("node_rank", 0))

    @property
    def nnodes(self) -> int:
        """How many nodes take part."""
        return int(self.given.get("nnodes", 1))

    @property
    def grace(self) -> float:
        """Seconds between SIGTERM and SIGKILL."""
        return float(self.given.get("grace", 10))

    @property
    def logs(self) -> Path:
        """The node's own folder of the run."""
        return self.at("logs") or self.folder

    @property
    def output(self) -> Optional[Path]:
        """Where the run's checkpoints are written, when it can be resumed."""
        resume = self.given.get("resume")
        return self.folder / resume["output"] if resume else None

    @property
    def attempts(self) -> int:
        """How often the command is started at most."""
        return 1 + max(0, int(self.given.get("restarts") or 0))

    def at(self, key: str) -> Optional[Path]:
        """The path that a key names."""
        value = self.given.get(key)
        return self.folder / value if value else None

    def backoff(self, attempt: int) -> float:
        """Seconds to wait before the attempt after this one."""
        return float(min(BACKOFF_LIMIT, float(self.given.get("backoff", 1)) * 2 ** (attempt - 1)))


def load(path: str) -> Plan:
    """Read a plan.

    Raises:
        PlanError: it cannot be read, or is none.
    """
    where = Path(path).absolute()
    try:
        with where.open("rb") as file:
            given = parse_object(file.read(LIMIT + 1), limit=LIMIT)
    except PermissionError:
        raise
    except UntrustedError as error:
        raise PlanError("%s %s" % (path, error)) from error
    except OSError as error:
        raise PlanError("%s: %s" % (path, error)) from error
    wrong = ""
    for key, kind in NEEDED.items():
        if not wrong and not isinstance(given.get(key), kind):
            wrong = "%s is missing or of another kind" % key
    if wrong:
        raise PlanError("%s: %s" % (path, wrong))
    return Plan(given, where.parent, where)
