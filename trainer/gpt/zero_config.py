"""The configuration that DeepSpeed is given: what the options say, and below it whatever a file of the user's says.

Keys: https://www.deepspeed.ai/docs/config-json/.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

import torch

from trainer.gpt.config import Config
from trainer.gpt.errors import RefusedError

NEVER = 10**9  # steps between DeepSpeed's own lines
BUCKET = 2 * 10**8  # numbers; below DeepSpeed's 5e8, which costs 2 GB where all of it is used


def make(config: Config, stage: int, micro_steps: int, dtype: torch.dtype, on_gpu: bool) -> Dict[str, Any]:
    """The dictionary for ``deepspeed.initialize``.

    Raises:
        RefusedError: a file that cannot be read, or that says another stage.
    """
    made = _read(config.deepspeed_config)
    zero = dict(made.get("zero_optimization", {}))
    if zero.get("stage", stage) != stage:
        what = "%s is for stage %s" % (config.deepspeed_config, zero["stage"])
        raise RefusedError(what, "--engine zero%s, or without --deepspeed-config" % zero["stage"])
    defaults: Dict[str, Any] = {
        "contiguous_gradients": True,
        "overlap_comm": on_gpu,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
    }
    if stage == 3:
        defaults.update(stage3_prefetch_bucket_size=BUCKET // 4, stage3_param_persistence_threshold=10**5)
        del defaults["allgather_bucket_size"]
    place = {"device": "cpu", "pin_memory": on_gpu}
    if config.offload != "none":
        zero["offload_optimizer"] = place
    if config.offload == "all":
        zero["offload_param"] = place
    made["zero_optimization"] = dict(defaults, **zero, stage=stage)
    for name in ("fp16", "bf16"):
        made.setdefault(name, {})
    made["bf16"] = dict(made["bf16"], enabled=dtype == torch.bfloat16)
    made["fp16"] = dict({"loss_scale": 0, "initial_scale_power": 16}, **made["fp16"])
    made["fp16"]["enabled"] = dtype == torch.float16
    made.update(
        train_micro_batch_size_per_gpu=config.batch_size,
        gradient_accumulation_steps=micro_steps,
        gradient_clipping=config.grad_clip,
        zero_allow_untested_optimizer=True,
        zero_force_ds_cpu_optimizer=on_gpu,
        steps_per_print=NEVER,
    )
    return made


def _read(path: str) -> Dict[str, Any]:
    """What a file says, without what is the trainer's own business and what transformers would fill in."""
    if not path:
        return {}
    try:
        said = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RefusedError("--deepspeed-config %s: %s" % (path, error), "a file of JSON") from error
    if not isinstance(said, dict):
        raise RefusedError("--deepspeed-config %s: no object" % path, "a file that DeepSpeed itself would take")
    kept: Dict[str, Any] = _without_auto(said)
    for name in ("optimizer", "scheduler", "train_batch_size"):
        kept.pop(name, None)
    return kept


def _without_auto(said: Any) -> Any:
    if not isinstance(said, dict):
        return said
    return {key: _without_auto(value) for key, value in said.items() if value != "auto"}
