"""Plans faster settings for a LLaMA-Factory configuration, and writes them.

The data and the model are read from this machine. Nothing is sent and no node is contacted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provision.errors import UsageError
from provision.run.config import misspelled
from provision.run.config_text import Document, commented, read, read_text
from provision.tasks.data_lengths import SAMPLES, measure
from trainer import ds_config
from trainer import plan as plans
from trainer.agent.contract.untrusted import UntrustedError, parse_object
from trainer.plan.factory import Job, Settings, settings_of
from trainer.plan.faster import faster
from trainer.plan.findings import Faster
from trainer.plan.output import request


@dataclass(frozen=True)
class Planned:
    """A configuration with its plan.

    Attributes:
        document: the configuration.
        job: what it trains, and where.
        found: the findings and the faster settings.
    """

    document: Document
    job: Job
    found: Faster


@dataclass(frozen=True)
class Abilities:
    """What the release on the nodes has. By default Liger, which ``train`` checks before it starts."""

    liger: bool = True
    fa2: bool = False


def plan_config(
    config: Path, cluster: plans.Cluster, *, model: str | None = None, abilities: Abilities | None = None
) -> Planned:
    """Plan faster settings for a configuration.

    Args:
        config: the YAML file.
        cluster: the machines.
        model: a config.json, its folder, or a model's name, if the model is not on this machine.
        abilities: what the release has.

    Raises:
        UsageError: the configuration, the model or the data cannot be used.
        PlanError: they cannot be planned.
    """
    document = read(config)
    has = abilities or Abilities()
    job, base = job_of(document, cluster, model=model)
    return Planned(document, job, faster(job, base, liger=has.liger, fa2=has.fa2))


def job_of(
    document: Document, cluster: plans.Cluster, *, model: str | None = None, samples: int = SAMPLES
) -> tuple[Job, Settings]:
    """What a configuration trains, and its settings; ``samples`` are the most records to count.

    Raises:
        UsageError: the configuration, the model or the data cannot be used.
        PlanError: they cannot be planned.
    """
    refuse_other(document)
    folder = model_folder(document)
    shape = _shape(document, folder, model)
    lengths, media = measure(document, folder, samples=samples)
    base = settings_of(document.data, deepspeed_of(document))
    return Job(shape, lengths, cluster, half=cluster.gpu.bf16, media=media), base


def refuse_other(document: Document) -> None:
    """Refuse a configuration that is not one of a training with samples.

    Raises:
        UsageError: a key is misspelled, or the stage has no samples of text.
    """
    for key in document.data:
        if (meant := misspelled(key)) is not None:
            raise UsageError(f"{document.where(key)}: no such key; did you mean {meant}?")
    stage = document.data.get("stage", "sft")
    if stage not in {"sft", "pt"}:
        raise UsageError(
            f"{document.where('stage')}: plan reads the stages sft and pt, not {stage}",
            hint="for the memory of another stage: clusterctl plan MODEL --nodes N",
        )


def model_folder(document: Document) -> Path | None:
    """The model's folder; None if it is not on this machine."""
    value = document.data.get("model_name_or_path")
    if not isinstance(value, str) or not value:
        raise UsageError(f"{document.path}: model_name_or_path is missing")
    folder = Path(os.path.normpath(document.path.absolute().parent / value))
    return folder if (folder / "config.json").is_file() else None


def _shape(document: Document, folder: Path | None, model: str | None) -> plans.Shape:
    if model is not None:
        return plans.load(model)
    value = str(document.data["model_name_or_path"])
    if folder is not None:
        return plans.load(str(folder))
    try:
        return plans.named(Path(value).name)
    except plans.PlanError as error:
        raise UsageError(
            f"{document.where('model_name_or_path')}: {value} is not on this machine",
            hint=f"copy its config.json here, and add: --model-config FILE; it is at {value}/config.json on the nodes",
        ) from error


def deepspeed_of(document: Document) -> Mapping[str, Any] | None:
    """The DeepSpeed configuration that a configuration names; None if there is none.

    Raises:
        UsageError: it cannot be read.
    """
    value = document.data.get("deepspeed")
    if value is None:
        return None
    if not isinstance(value, str):
        raise UsageError(f"{document.where('deepspeed')}: plan reads a file, not {type(value).__name__}")
    file = Path(os.path.normpath(document.path.absolute().parent / value))
    try:
        return parse_object(read_text(file, hint="plan needs to know the ZeRO stage"))
    except UntrustedError as error:
        raise UsageError(f"{file} {error}") from error


def write(planned: Planned, out: Path, *, force: bool = False, head: str = "") -> list[str]:
    """Write the faster configuration, and DeepSpeed's if its stage changes. Returns the files.

    ``head`` is a comment for its first line.

    Raises:
        UsageError: a file exists, or cannot be written.
    """
    refuse_existing(planned.document.path, out, force=force)
    beside = out.with_name(f"{out.stem}.ds.json")
    texts = {out: (f"# {head}\n" if head else "") + text(planned, beside.name)}
    if planned.found.stage is not None:
        texts[beside] = ds_config.text(zero_config(planned))
    try:
        for file, content in texts.items():
            file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}") from error
    return [str(file) for file in texts]


def refuse_existing(config: Path, out: Path, *, force: bool) -> None:
    """Refuse to overwrite files.

    Raises:
        UsageError: a file exists, or it is the configuration itself.
    """
    if out.exists() and out.resolve() == config.resolve():
        raise UsageError(f"{out} is the configuration itself", hint="write another file: --out FILE")
    for file in (out, out.with_name(f"{out.stem}.ds.json"), out.with_name(f"{out.stem}.tune.json")):
        if file.exists() and not force:
            raise UsageError(f"{file} exists", hint="--force, or another name: --out FILE")


def zero_config(planned: Planned) -> dict[str, Any]:
    """DeepSpeed's configuration of the recommended stage."""
    job, best = planned.job, planned.found.best
    training = plans.Training(job.shape, best.method, best.cutoff, precision="bf16" if job.half else "fp16")
    return ds_config.make(request(training, job.cluster, plans.Setup(best.zero or 0)))


def text(planned: Planned, deepspeed: str) -> str:
    """The faster configuration: the old text with changed values, each with its reason above it."""
    changes: dict[str, tuple[Any, str]] = {}
    for finding in planned.found.findings:
        first = next(iter(finding.changes), "")
        for key, value in finding.changes.items():
            reason = f"{finding.what}: {finding.why}" if key == first else f"belongs to {first}"
            changes[key] = (deepspeed if key == "deepspeed" else value, reason)
    return commented(planned.document, changes, "clusterctl plan")


def record(planned: Planned) -> dict[str, Any]:
    """The whole plan, for ``--json``."""
    found, lengths = planned.found, planned.job.lengths
    return {
        "config": str(planned.document.path),
        "model": {
            "name": planned.job.shape.name,
            "parameters": planned.job.shape.parameters,
            "active": planned.job.shape.active,
        },
        "data": {
            "records": lengths.total,
            "counted": len(lengths.tokens),
            "exact": lengths.exact,
            "mean": lengths.mean,
            "p50": lengths.percentile(50),
            "p99": lengths.percentile(99),
            "longest": lengths.longest,
            "padding": found.now.rows.padding,
            "cut": lengths.share_cut(found.base.cutoff),
        },
        "now": _cost(found.now),
        "then": _cost(found.then),
        "findings": [
            {"what": each.what, "why": each.why, "changes": each.changes, "gain": each.gain} for each in found.findings
        ],
    }


def _cost(cost: Any) -> dict[str, float]:
    return {
        "tokens": cost.tokens,
        "memory": cost.memory,
        "samples": cost.samples,
        "seconds": cost.seconds,
        "padding": cost.rows.padding,
    }
