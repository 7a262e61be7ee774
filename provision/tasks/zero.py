"""``clusterctl train --zero``: DeepSpeed's configuration is made for a training that has none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from provision.errors import UsageError
from provision.launchers import pack
from provision.run import Job, Travel
from provision.run.config_text import read
from trainer import ds_config

CHOICES = ("0", "1", "2", "3", "2-offload", "3-offload")


def packed(job: Job, zero: str | None, *, any_key: bool = False) -> Travel:
    """Everything that goes with a job, with DeepSpeed's configuration beside its config where ``zero`` asks for one.

    ``any_key`` takes a config's keys that look like misspelled ones.

    Raises:
        UsageError: what was given cannot be used; the job is no config, or names a DeepSpeed configuration itself.
    """
    if zero is None:
        return pack(job, any_key=any_key)
    if job.kind != "config":
        raise UsageError(
            "--zero goes with a LLaMA-Factory config: a script is told in its own way",
            hint=f"clusterctl ds-config --for own --stage {zero[0]} --gpu A100 --micro-batch 1 -o ds_config.json",
        )
    given = read(Path(job.target), job.args).data.get("deepspeed")
    if given is not None:
        raise UsageError(f"--zero {zero}: {job.target} has a DeepSpeed configuration: {given}", hint="leave --zero out")
    name = f"ds_zero{zero}.json"
    text = ds_config.text(ds_config.make(request(zero)))
    return pack(replace(job, args=(*job.args, f"deepspeed={name}")), made={name: text.encode()}, any_key=any_key)


def request(zero: str) -> ds_config.Request:
    """What ``--zero`` asks for; the Trainer fills in the rest. With offload, all that the stage can give away."""
    stage, offload = int(zero[0]), "cpu" if zero.endswith("-offload") else "none"
    return ds_config.Request(stage=stage, offload_optimizer=offload, offload_param=offload if stage == 3 else "none")
