"""LLaMA-Factory: ``llamafactory-cli train CONFIG`` on every node, without ``llamafactory-cli``.

Its launcher (0.9.5, ``llamafactory/launcher.py``) builds a torchrun command as one string and splits it at spaces, so
that a path with a space breaks it, and a signal to it does not reach torchrun. This starts the same torchrun on the
same file, whose ``__main__`` is the training; ``-m`` finds it wherever the release keeps it. What stands behind the
config, ``KEY=VALUE``, takes the place of what it says (``hparams/parser.py``: ``read_args``).
"""

from __future__ import annotations

from typing import Any

from provision.errors import UsageError
from provision.launchers._plans import launched, plan
from provision.launchers.torchrun import options
from provision.model import Notice
from provision.run import Launch, RunSpec

_TRUE = ("1", "y", "true")  # llamafactory.extras.misc.is_env_enabled
# What llamafactory-cli sets unless OPTIM_TORCH is off.
_OPTIMIZED = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
_LOGGERS = {"tensorboard": ("tensorboard", "tensorboardx"), "wandb": ("wandb",)}  # and the packages that they need


def launch(spec: RunSpec) -> Launch:
    """One plan for each node.

    Raises:
        UsageError: the user's environment asks for what is not supported, or this stage cannot be resumed.
    """
    env = spec.user_env
    if env.get("USE_V1", "0").lower() in _TRUE:
        raise UsageError("USE_V1: LLaMA-Factory's v1 trainers are not supported", hint="take USE_V1 out of train.env")
    more = []
    if why := _no_resume(spec):
        if spec.resuming:
            raise UsageError(f"this run cannot be resumed: {why}", hint="start it again: clusterctl train")
        if spec.restarts:
            more.append(Notice(f"a restart begins from the first step: {why}", "warning"))
    return launched(spec, [_plan(spec, rank) for rank in range(len(spec.workers))], *more)


def _no_resume(spec: RunSpec) -> str | None:
    """Why LLaMA-Factory would not go on from a checkpoint (``hparams/parser.py``, ``ppo/trainer.py``)."""
    stage, how = spec.settings.get("stage", "sft"), spec.settings.get("finetuning_type", "lora")
    if stage == "ppo" or (stage == "rm" and how in ("full", "freeze")):
        return f"LLaMA-Factory does not resume stage {stage} with finetuning_type {how}"
    return None


def _plan(spec: RunSpec, rank: int) -> dict[str, Any]:
    defaults = {"FORCE_TORCHRUN": "1"}
    if spec.user_env.get("OPTIM_TORCH", "1").lower() in _TRUE:
        defaults |= _OPTIMIZED
    argv = [
        *(f"{spec.prefix}/bin/python", "-m", "torch.distributed.run", *options(spec, rank)),
        *("-m", "llamafactory.launcher", spec.config, *_reporting(spec)),
    ]
    made = plan(spec, rank, argv, defaults)
    if _no_resume(spec):
        made["resume"] = None
    return made


def _reporting(spec: RunSpec) -> list[str]:
    """The run's name, and the loggers that the environment has; what the config says itself stays."""
    said = []
    if "run_name" not in spec.settings:
        said.append(f"run_name={spec.id}")
    packages = set(spec.workers[0].facts.packages)
    loggers = [name for name, needed in _LOGGERS.items() if packages & set(needed)]
    if loggers and "report_to" not in spec.settings:
        said.append(f"report_to=[{','.join(loggers)}]")
    return said
