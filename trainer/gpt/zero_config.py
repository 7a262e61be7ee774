"""The configuration that DeepSpeed is given: ``trainer.ds_config`` makes it, a file of the user's says what else it is.

Keys: https://www.deepspeed.ai/docs/config-json/.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

from trainer import ds_config
from trainer.gpt.config import Config
from trainer.gpt.errors import RefusedError

NEVER = 10**9  # steps between DeepSpeed's own lines
PRECISIONS = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


def make(config: Config, stage: int, micro_steps: int, dtype: object, on_gpu: bool) -> Dict[str, Any]:
    """The dictionary for ``deepspeed.initialize``. What is computed in goes by torch's name for it.

    Raises:
        RefusedError: a file that cannot be read, or that says another stage or nvme; fp16 without a GPU.
    """
    precision = PRECISIONS[str(dtype)]
    if precision == "fp16" and not on_gpu:
        raise RefusedError("DeepSpeed computes fp16 on GPUs only", "--dtype bfloat16, or --engine plain")
    said = _read(config.deepspeed_config)
    theirs = said.get("zero_optimization", {}).get("stage", stage)
    if theirs != stage:
        what = "%s is for stage %s" % (config.deepspeed_config, theirs)
        raise RefusedError(what, "--engine zero%s, or without --deepspeed-config" % theirs)
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
    ours = ds_config.make(request)
    zero = ours["zero_optimization"]
    fixed = {  # whatever the file says
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
    made = _over(_over(ours, said), fixed)
    for key in ("offload_optimizer", "offload_param"):
        if stage == 3 and made["zero_optimization"].get(key, {}).get("device") == "nvme":
            what = "%s: %s to nvme, from where no checkpoint can be written" % (config.deepspeed_config, key)
            raise RefusedError(what, "--offload all, which keeps it in the memory of the host")
    return made


def _over(below: Dict[str, Any], above: Dict[str, Any]) -> Dict[str, Any]:
    """Both together; where both have a key or a section's key, it is that above."""
    both = dict(below)
    for key, value in above.items():
        both[key] = {**both.get(key, {}), **value} if isinstance(value, dict) else value
    return both


def _read(path: str) -> Dict[str, Any]:
    """What a file says, without what is the trainer's own business and what transformers would fill in."""
    if not path:
        return {}
    try:
        said = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RefusedError("--deepspeed-config %s: %s" % (path, error), "a file of JSON") from error
    if not isinstance(said, dict):
        raise RefusedError("--deepspeed-config %s: no object" % path, "a file that DeepSpeed itself would take")
    kept: Dict[str, Any] = _without_auto(said)
    for name in ("optimizer", "scheduler", "train_batch_size"):
        kept.pop(name, None)
    for name in ("zero_optimization", "bf16", "fp16"):
        if not isinstance(kept.get(name, {}), dict):
            what = "--deepspeed-config %s: %s is no object" % (path, name)
            raise RefusedError(what, "a file that DeepSpeed itself would take")
    return kept


def _without_auto(said: Any) -> Any:
    if not isinstance(said, dict):
        return said
    return {key: _without_auto(value) for key, value in said.items() if value != "auto"}
