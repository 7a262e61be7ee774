"""What a run is expected to take, at its launch: the user's numbers, an earlier run's, or the plan's estimate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError
from provision.run.config_text import read
from provision.run.expected import measured_band, typed_band
from provision.tasks.plan_config import job_of
from provision.tasks.runs import find
from trainer import ds_config
from trainer.agent.contract.expected import BASIS, Expected
from trainer.plan import Cluster, PlanError
from trainer.plan.band import PROGRAM, of_factory, of_lm

if TYPE_CHECKING:
    from provision.model import Node
    from provision.run import RunSpec
    from provision.session import Session

NONE = "none"  # of --expected
_DEADLINE = 60.0
_RECORDS = 2000  # records of the data whose lengths are counted: their mean is exact to a few per cent


def expect(session: Session, spec: RunSpec, typed: str | None) -> Expected:
    """What a run is judged by. Without a range, its basis says why there is none.

    Args:
        session: the command's session.
        spec: the run.
        typed: an earlier run, ``LOW-HIGH`` seconds per step, or ``none``; None: the estimate.

    Raises:
        UsageError: no run matches, several do, or it has no measurement.
        NodesFailedError: no node answered for the earlier run.
    """
    if typed == NONE:
        return Expected("none was wanted: --expected none")
    if typed is not None:
        run = None if (band := typed_band(typed)) else find(session, typed, on=session.inventory.nodes)[0]
        return band or measured_band(run.id if run else "", run.head.fields.get("measured") if run else None)
    try:
        return _estimate(session, spec)
    except (ClusterctlError, PlanError) as error:  # a run does not fail because it cannot be estimated
        return Expected(f"no estimate: {' '.join(str(error).split())}"[:BASIS])


def card_of(session: Session, node: Node) -> tuple[ds_config.Gpu, float] | None:
    """A node's first GPU with its GiB; None if it has none, or an unknown one."""
    script = "nvidia-smi --query-gpu=name,memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1; true"
    name, _, memory = session.run(node, script, deadline=_DEADLINE).out.strip().partition(",")
    try:
        gpu, gib = ds_config.find(name), float(memory) / 1024
    except (ds_config.ConfigError, ValueError):
        return None
    return replace(gpu, memory=round(gib)), gib


def _estimate(session: Session, spec: RunSpec) -> Expected:
    """The plan's estimate.

    Raises:
        PlanError: there is none; the text says why.
    """
    job = spec.job
    is_lm = job.kind == "module" and job.target == PROGRAM
    if not is_lm and job.kind != "config":
        raise PlanError(f"the plan knows only LLaMA-Factory's configurations and {PROGRAM}")
    if len(spec.workers) > 1:
        raise PlanError("the speed of the network between the nodes is not known")
    worker = spec.workers[0]
    if not worker.facts.gpus:
        raise PlanError(f"{worker.node.name} has no GPU")
    found = card_of(session, worker.node)
    if found is None:
        raise PlanError(f"the plan does not know the GPUs of {worker.node.name}")
    gpu, gib = found
    cluster = Cluster(1, worker.processes, gpu, gib)
    if is_lm:
        return of_lm(job.args, cluster)
    return of_factory(*job_of(read(Path(job.target), job.args), cluster, samples=_RECORDS))
