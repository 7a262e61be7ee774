"""``clusterctl plan CONFIG.yaml --tune``: measures candidates on the nodes, one short run each, and keeps the fastest.

A candidate is the configuration with other values, which ``train`` starts as any run. The first one is the
configuration as it is: it trains for the given time after its first step. Every other one trains until it has taken
about the same samples. Then the run is stopped and its log is read. Nothing is saved, and its folder is removed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provision.errors import ClusterctlError, NodesFailedError, RunFailedError
from provision.launchers import from_words
from provision.model import Notice
from provision.render import quote
from provision.run import Job as RunJob
from provision.run.config import TRAINER_LOG
from provision.run.history import Wanted
from provision.tasks import train
from provision.tasks.expected import card_of
from provision.tasks.gate import GateOptions
from provision.tasks.history import prune
from provision.tasks.plan_config import Abilities, Planned, plan_config
from provision.tasks.runs import problems, stop_on
from provision.tasks.start import Following
from trainer.plan import Cluster
from trainer.plan.factory import Settings, estimate
from trainer.plan.faster import faster
from trainer.plan.findings import explain, free, keys
from trainer.plan.tuning import Candidate, Measured, candidates, corrected, fastest, judged, measured, rows_of_log

if TYPE_CHECKING:
    from provision.run import Facts
    from provision.session import Session

_LOG = 16 << 20  # bytes of a log
_DEADLINE = 60.0
_START = 1800.0  # seconds to the first step
_SLOWER = 3.0  # times the given seconds that a candidate may take for the same samples
_LEAST = 10  # steps of a candidate, unless they take longer than three times the given seconds
_LINE = 200  # characters of a reason
# No candidate writes into the user's folders, evaluates or saves. Counted tokens make the log's times exact.
_QUIET = {
    "output_dir": "tune",
    "logging_steps": 1,
    "logging_strategy": "steps",
    "save_strategy": "no",
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "include_num_input_tokens_seen": "all",
    "plot_loss": False,
    "report_to": "none",
}


@dataclass(frozen=True)
class Tuned:
    """The result.

    Attributes:
        planned: the configuration with its plan for the nodes as they are.
        results: every candidate, in the order in which they ran.
        best: the fastest with an equal loss; None if the configuration itself could not be measured.
    """

    planned: Planned
    results: tuple[Measured, ...]
    best: Measured | None

    @property
    def gain(self) -> float | None:
        """How many times faster the best is than the configuration; None if that is not known."""
        base = self.results[0]
        return self.best.epochs / base.epochs if self.best is not None and base.epochs else None


def tune(
    session: Session,
    config: Path,
    cluster: Cluster,
    *,
    model: str | None,
    seconds: float,
    most: int,
    liger: bool = True,
) -> Tuned:
    """Measure candidates on the session's nodes.

    Args:
        session: the command's session.
        config: the LLaMA-Factory configuration.
        cluster: the machines as the options describe them; the nodes replace what they know better.
        model: the model's config.json, if it is only on the nodes.
        seconds: how long the configuration as it is trains.
        most: the number of candidates.
        liger: use liger-kernel if the release has it.

    Raises:
        UsageError: the configuration, the model or the data cannot be used.
        PreflightError: nodes cannot take part; nothing was started.
        NodesFailedError: nodes do not answer.
        InterruptedByUser: it was stopped.
    """
    facts = _facts(session, config)
    has, cluster = abilities(facts), _cluster(session, facts, cluster)
    has = replace(has, liger=has.liger and liger)
    planned = plan_config(config, cluster, model=model, abilities=has)
    first = Candidate("as it is", planned.found.base)
    session.emit(Notice(f"candidate 1: {first.name}"))
    base = _measure(session, planned, first, Limit(seconds, None), None)
    session.emit(Notice(line(base)))
    if base.dropped:
        return Tuned(planned, (base,), None)  # nothing can be compared with it
    job = corrected(planned.job, base)
    planned = replace(planned, job=job, found=faster(job, planned.found.base, liger=has.liger, fa2=has.fa2))
    has_deepspeed = all("deepspeed" in each.packages for each in facts)
    chosen = candidates(job, planned.found, liger=has.liger, fa2=has.fa2, deepspeed=has_deepspeed, most=most)
    results = [replace(base, tokens=base.epochs * _tokens(planned))]
    for number, candidate in enumerate(chosen[1:], 2):
        session.emit(Notice(f"candidate {number} of {len(chosen)}: {candidate.name}"))
        steps = max(_LEAST, round(base.steps * _samples(planned, first, candidate)))
        results.append(_measure(session, planned, candidate, Limit(seconds, steps), base.until))
        session.emit(Notice(line(results[-1])))
    judged_results = judged(results)
    return Tuned(planned, tuple(judged_results), fastest(judged_results))


def _tokens(planned: Planned) -> float:
    """Tokens of an epoch, without padding."""
    lengths = planned.job.lengths
    return lengths.cut(planned.found.base.cutoff).mean * lengths.total


def _samples(planned: Planned, first: Candidate, other: Candidate) -> float:
    """How many steps of a candidate have the samples of one step of the first."""
    one, another = (estimate(planned.job, each.settings).samples for each in (first, other))
    return one / another


def line(result: Measured) -> str:
    """A sentence about a measured candidate."""
    name = result.candidate.name
    if result.dropped:
        return f"{name}: dropped: {result.dropped}"
    return f"{name}: {result.tokens:,.0f} tokens/s, loss {result.loss:.4f} after {result.steps} steps"


def abilities(facts: Sequence[Facts]) -> Abilities:
    """What the releases of all nodes have."""
    common = set.intersection(*(set(each.packages) for each in facts))
    return Abilities(liger="liger_kernel" in common, fa2="flash_attn" in common)


class Limit:
    """When a candidate has trained enough: after ``steps``; None: ``seconds`` after its first step.

    The first candidate takes at least ``_LEAST`` steps. None takes longer than ``_SLOWER`` times the seconds.
    """

    def __init__(self, seconds: float, steps: int | None) -> None:
        self._seconds, self._steps = seconds, steps
        self._began = time.monotonic()
        self._first: float | None = None

    def __call__(self, step: int | None) -> bool:
        """Whether it is enough after this step."""
        now = time.monotonic()
        if step is None:
            return now - self._began > _START
        self._first = now if self._first is None else self._first
        took = now - self._first
        if took >= _SLOWER * self._seconds:
            return True
        return step >= self._steps if self._steps is not None else took >= self._seconds and step >= _LEAST


def _facts(session: Session, config: Path) -> tuple[Facts, ...]:
    """What the nodes say about themselves and their release."""
    asked = train.Training(from_words((str(config),)), gate=GateOptions())
    spec, _, _ = train.dry_run(session, asked)
    return tuple(worker.facts for worker in spec.workers)


def _cluster(session: Session, facts: Sequence[Facts], given: Cluster) -> Cluster:
    """The machines with the nodes' own number and kind of GPUs."""
    gpus = min(each.gpus for each in facts) or 1
    cluster = replace(given, nodes=len(facts), gpus=gpus, cores=min(each.cpus for each in facts))
    found = card_of(session, session.nodes[0])
    return replace(cluster, gpu=found[0], memory=found[1]) if found else cluster


def _measure(session: Session, planned: Planned, candidate: Candidate, limit: Limit, until: float | None) -> Measured:
    """Run a candidate, and read its log."""
    asked = _training(planned, candidate)
    before = time.monotonic()
    try:
        result = train.train(session, replace(asked, following=Following(enough=limit)))
    except RunFailedError as error:
        return Measured(candidate, dropped=why_failed(error))
    head = session.nodes[0]
    if result.state == "detached":
        nodes = [next(node for node in session.nodes if node.name == name) for name in result.nodes]
        head = nodes[0]
        left = problems(stop_on(session, result.run, nodes, {node.name: rank for rank, node in enumerate(nodes)}))
        if left:
            raise NodesFailedError(
                f"run {result.run} may still be running", reasons=left, hint=f"clusterctl stop {result.run}"
            )
    log = session.run(head, f"head -c {_LOG} -- {quote(f'{result.output}/{TRAINER_LOG}')}", deadline=_DEADLINE).out
    found = measured(candidate, rows_of_log(log), _tokens(planned), until=until)
    prune(session, Wanted(), lambda plan, more: (*plan.runs, *more), words=[result.run])
    if found.dropped and time.monotonic() - before > _START:
        return replace(found, dropped=f"no step within {_START / 60:.0f} minutes")
    return found


def why_failed(error: RunFailedError) -> str:
    """One line about a failed candidate: the node's line about memory, else its last error, else the first reason."""
    rows = [row.strip() for reason in error.reasons.values() for row in reason.splitlines() if row.strip()]
    memory = [row for row in rows if "out of memory" in row.lower()]
    errors = [row for row in reversed(rows) if re.match(r"[\w.]*(Error|Exception)\b", row)]
    return ("out of memory: " if memory else "") + (memory or errors or rows or [str(error)])[0][:_LINE]


def _training(planned: Planned, candidate: Candidate) -> train.Training:
    """The run of a candidate."""
    base, settings = planned.found.base, candidate.settings
    also = free(planned.job, base) if settings != base else {}
    words = [str(planned.document.path), *overrides(planned.document.data, base, settings, also)]
    zero = None if settings.zero == base.zero else str(settings.zero)
    job: RunJob = from_words(tuple(words))
    job = replace(job, env={**job.env, "RECORD_VRAM": "1"})
    return train.Training(job, tuple(words), name="tune", zero=zero)


def overrides(config: Mapping[str, Any], base: Settings, settings: Settings, also: Mapping[str, Any]) -> Iterator[str]:
    """The ``KEY=VALUE`` of a candidate; ``also`` are more keys."""
    values: dict[str, Any] = {**_QUIET, **also, **keys(base, settings)}
    if settings.zero != base.zero and config.get("deepspeed") is not None:
        values["deepspeed"] = None  # train writes another one
    if config.get("resume_from_checkpoint") is not None:
        values["resume_from_checkpoint"] = None
    for key, value in values.items():
        yield f"{key}={json.dumps(value)}"  # quoted, because YAML reads a bare no as false


def record(tuned: Tuned) -> dict[str, Any]:
    """The measurements, for ``--json`` and the record."""
    return {
        "candidates": [
            {
                "name": each.candidate.name,
                "settings": asdict(each.candidate.settings),
                "tokens": each.tokens,
                "loss": each.loss if each.steps else None,
                "loss_error": each.error,
                "memory": each.memory,
                "steps": each.steps,
                "dropped": each.dropped,
            }
            for each in tuned.results
        ],
        "best": None if tuned.best is None else tuned.best.candidate.name,
        "gain": tuned.gain,
    }


def with_best(tuned: Tuned, best: Measured) -> Planned:
    """The plan with the measured best settings as its recommendation."""
    planned = tuned.planned
    found = explain(planned.job, planned.found.base, best.candidate.settings)
    return replace(planned, found=found)


def head(tuned: Tuned, best: Measured) -> str:
    """The first line of the faster configuration."""
    base = tuned.results[0]
    speed = f"{best.tokens:,.0f} tokens/s against {base.tokens:,.0f} ({tuned.gain or 0:.2f} x)"
    return f"clusterctl plan --tune measured {speed}, loss {best.loss:.4f} against {base.loss:.4f}"


def refuse_unmeasured(tuned: Tuned) -> Measured:
    """The best candidate.

    Raises:
        ClusterctlError: no candidate could be measured, so nothing is written.
    """
    if tuned.best is None or tuned.results[0].dropped:
        first = tuned.results[0]
        raise ClusterctlError(
            f"the configuration as it is could not be measured: {first.dropped}; no candidate can be compared with it",
            hint="correct it first: clusterctl train, then clusterctl diagnose",
        )
    return tuned.best
