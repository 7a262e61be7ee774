"""LLaMA-Factory: ``llamafactory-cli train CONFIG`` on every node, without ``llamafactory-cli``.

Its launcher (0.9.5, ``llamafactory/launcher.py``) builds a torchrun command as one string and splits it at spaces, so
that a path with a space breaks it, and a signal to it does not reach torchrun. This starts the same torchrun on the
same file, whose ``__main__`` is the training; ``-m`` finds it wherever the release keeps it. Arguments behind the
config, ``KEY=VALUE``, replace its values (``hparams/parser.py``: ``read_args``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from provision.errors import UsageError
from provision.launchers import torchrun
from provision.launchers.kit import Command, Options, plans
from provision.model import Notice
from provision.run import Job, RunSpec
from provision.run.job import of_target
from trainer.agent.contract.plan import Resume

NAME = "llamafactory"
ABOUT = "torchrun on `llamafactory.launcher`, without `llamafactory-cli`"
COMMANDS = ("llamafactory-cli", "lmf", "python -m llamafactory.cli")
KINDS = ("config",)
REQUIRES = ()  # LLaMA-Factory may be a checkout; what is missing shows when the run starts
OPTIONS = Options()
_TRUE = ("1", "y", "true")  # llamafactory.extras.misc.is_env_enabled
# What llamafactory-cli sets unless OPTIM_TORCH is off.
_OPTIMIZED = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
_LOGGERS = {"tensorboard": ("tensorboard", "tensorboardx"), "wandb": ("wandb",)}  # and the packages that they need


def suits(job: Job) -> bool:
    """Whether a job is for this launcher."""
    return job.kind == "config"


def parse(command: str, words: Sequence[str]) -> Job:
    """The job of a typed command, ``llamafactory-cli train CONFIG.yaml``."""
    del command
    if len(words) < 2 or words[0] != "train" or words[1].startswith("-"):
        raise UsageError(
            f"llamafactory-cli {' '.join(words[:1])}: only `train CONFIG.yaml` runs on several nodes",
            hint="clusterctl train CONFIG.yaml",
        )
    return replace(of_target(words[1], words[2:]), launcher=NAME)


def check(spec: RunSpec) -> tuple[Notice, ...]:
    """Notices about a run of this launcher.

    Raises:
        UsageError: the user's environment asks for what is not supported, or this stage cannot be resumed.
    """
    if spec.user_env.get("USE_V1", "0").lower() in _TRUE:
        raise UsageError("USE_V1: LLaMA-Factory's v1 trainers are not supported", hint="remove USE_V1 from train.env")
    why = _no_resume(spec)
    if why and spec.resuming:
        raise UsageError(f"this run cannot be resumed: {why}", hint="start it again: clusterctl train")
    return (Notice(f"a restart starts from the first step: {why}", "warning"),) if why and spec.restarts else ()


def resume(spec: RunSpec) -> Resume | None:
    """How the command resumes; None for a stage that LLaMA-Factory does not resume."""
    return None if _no_resume(spec) else plans.resume(spec)


def _no_resume(spec: RunSpec) -> str | None:
    """Why LLaMA-Factory does not resume from a checkpoint (``hparams/parser.py``, ``ppo/trainer.py``)."""
    stage, how = spec.settings.get("stage", "sft"), spec.settings.get("finetuning_type", "lora")
    if stage == "ppo" or (stage == "rm" and how in ("full", "freeze")):
        return f"LLaMA-Factory does not resume stage {stage} with finetuning_type {how}"
    return None


def command(spec: RunSpec, rank: int) -> Command:
    """The command of one node."""
    env = {"FORCE_TORCHRUN": "1"}
    if spec.user_env.get("OPTIM_TORCH", "1").lower() in _TRUE:
        env |= _OPTIMIZED
    argv = [
        *(f"{spec.prefix}/bin/python", "-m", "torch.distributed.run", *torchrun.options(spec, rank)),
        *("-m", "llamafactory.launcher", spec.config, *_reporting(spec)),
    ]
    return Command(argv, env)


def _reporting(spec: RunSpec) -> list[str]:
    """The run's name and the environment's loggers, unless the config sets them."""
    words = []
    if "run_name" not in spec.settings:
        words.append(f"run_name={spec.id}")
    packages = set(spec.workers[0].facts.packages)
    loggers = [name for name, needed in _LOGGERS.items() if packages & set(needed)]
    if loggers and "report_to" not in spec.settings:
        words.append(f"report_to=[{','.join(loggers)}]")
    return words
