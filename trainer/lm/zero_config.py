"""DeepSpeed's configuration: made by ``trainer.ds_config``, with other keys from the user's file.

Keys: https://www.deepspeed.ai/docs/config-json/.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

from trainer import ds_config
from trainer.lm.config import Config
from trainer.lm.errors import RefusedError

NEVER = 10**9  # steps between DeepSpeed's log lines
PRECISIONS = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


def make(config: Config, stage: int, micro_steps: int, dtype: object, on_gpu: bool) -> Dict[str, Any]:
    """Return the dictionary for ``deepspeed.initialize``. ``dtype`` is torch's name of the data type.

    Raises:
        RefusedError: the file cannot be read or names another stage or nvme, or fp16 without a GPU.
    """
    precision = PRECISIONS[str(dtype)]
    if precision == "fp16" and not on_gpu:
        raise RefusedError("DeepSpeed supports fp16 only on GPUs", "use --dtype bfloat16, or --engine plain")
    user_config = _read(config.deepspeed_config)
    user_stage = user_config.get("zero_optimization", {}).get("stage", stage)
    if user_stage != stage:
        what = "%s is for stage %s" % (config.deepspeed_config, user_stage)
        raise RefusedError(what, "use --engine zero%s, or remove --deepspeed-config" % user_stage)
    request = ds_config.Request(
        stage=stage,
        target="own",
        precision=precision,
        offload_optimizer="none" if config.offload == "none" else "cpu",
        offload_param="cpu" if config.offload == "all" else "none",
        pin_memory=on_gpu,
        overlap=on_gpu,
        round_robin=False,  # not measured; DeepSpeed's default
        micro_batch=config.batch_size,
        accumulation=micro_steps,
        steps_per_print=NEVER,
    )
    default = ds_config.make(request)
    zero = default["zero_optimization"]
    fixed = {  # overrides the file
        "zero_optimization": {key: zero[key] for key in zero if key == "stage" or key.startswith("offload")},
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": config.grad_clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": on_gpu,
        "steps_per_print": NEVER,
    }
    merged = _over(_over(default, user_config), fixed)
    for key in ("offload_optimizer", "offload_param"):
        if stage == 3 and merged["zero_optimization"].get(key, {}).get("device") == "nvme":
            what = "%s: %s to nvme, which checkpoints cannot be written from" % (config.deepspeed_config, key)
            raise RefusedError(what, "use --offload all, which uses host memory")
    return merged


def _over(below: Dict[str, Any], above: Dict[str, Any]) -> Dict[str, Any]:
    """Merge two configurations, section by section. ``above`` takes precedence."""
    both = dict(below)
    for key, value in above.items():
        both[key] = {**both.get(key, {}), **value} if isinstance(value, dict) else value
    return both


def _read(path: str) -> Dict[str, Any]:
    """Read a file, without keys that the trainer sets itself and without values that transformers fills in."""
    if not path:
        return {}
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RefusedError("--deepspeed-config %s: %s" % (path, error), "name a JSON file") from error
    if not isinstance(config, dict):
        raise RefusedError("--deepspeed-config %s: not a JSON object" % path, "use a file that DeepSpeed accepts")
    kept: Dict[str, Any] = _without_auto(config)
    for name in ("optimizer", "scheduler", "train_batch_size"):
        kept.pop(name, None)
    for name in ("zero_optimization", "bf16", "fp16"):
        if not isinstance(kept.get(name, {}), dict):
            what = "--deepspeed-config %s: %s is not an object" % (path, name)
            raise RefusedError(what, "use a file that DeepSpeed accepts")
    return kept


def _without_auto(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {key: _without_auto(value) for key, value in config.items() if value != "auto"}
