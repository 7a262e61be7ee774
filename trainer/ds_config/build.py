"""Builds DeepSpeed's configuration from a request, with the keys of version 0.19 (``runtime/zero/config.py``).

The size of a bucket: an all-reduce in a ring of W ranks takes 2 (W - 1) steps, each with a latency that does not depend
on its size. A bucket is large enough when the latencies are less than a twentieth of its time. A larger one only costs
memory: 2 bytes per element, again during the reduction, and twice with ``overlap_comm``. A bucket is never less than
hidden^2, the Trainer's value for "auto" (transformers 5.6, ``integrations/deepspeed.py``), and never more than
DeepSpeed's default.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional

from trainer.ds_config.request import Request, check, check_bounds, precision_of

AUTO = "auto"
FILLED = frozenset({  # keys that transformers' Trainer fills in (transformers 5.6, integrations/deepspeed.py)
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay"),
    *("scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps"),
    *("scheduler.params.total_num_steps", "fp16.enabled", "bf16.enabled"),
    *("zero_optimization.reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"),
    "zero_optimization.stage3_param_persistence_threshold",
})  # fmt: skip
_LIVE = 1_000_000_000  # DeepSpeed's default, written out because users look for it


def make(request: Request) -> Dict[str, Any]:
    """Build the configuration.

    Raises:
        ConfigError: a number is outside its range, or options contradict each other.
    """
    check_bounds(request)
    check(request)
    config: Dict[str, Any] = {
        **_batch(request),
        **_optimizer(request),
        "zero_allow_untested_optimizer": True,  # ZeRO has only tested torch's AdamW and Adagrad
        **_precision(request),
        "zero_optimization": _zero(request),
    }
    if "nvme" in (request.offload_optimizer, request.offload_param):
        # From the example of the documentation (deepspeed.ai/docs/config-json/#asynchronous-io): requests of 1 MiB,
        # eight at a time.
        config["aio"] = {"block_size": 1 << 20, "queue_depth": 8, "single_submit": False, "overlap_events": True}
    if request.steps_per_print is not None:
        config["steps_per_print"] = request.steps_per_print
    return config


def notices(request: Request) -> List[str]:
    """Return what the user should know about a configuration."""
    messages = []
    if request.auto and (request.micro_batch or request.accumulation or request.clip or request.lr):
        messages.append("values that are not auto must equal the training's arguments")
    if request.stage == 0 and request.precision != "fp32":
        messages.append("stage 0 in 16 bits: Adam in DeepSpeed 0.19 starts with an empty step; use stage 1 to avoid it")
    if request.overlap and request.stage in {1, 2}:
        messages.append(
            "overlap_comm in stages 1 and 2: watch grad_norm for NaN (DeepSpeed issues 5347, 7188 and 8061)"
        )
    if "cpu" in (request.offload_optimizer, request.offload_param):
        messages.append(
            "offload compiles cpu_adam at the first start, unless the environment has it: pack-env --with-ops"
        )
    if request.offload_optimizer == "nvme" or request.offload_param == "nvme":
        messages.append("nvme compiles async_io at the first start, which needs libaio's headers on every node")
    return messages


def autos(config: Dict[str, Any], above: str = "") -> List[str]:
    """List the keys whose value is "auto", with dots."""
    found = []
    for key, value in config.items():
        if isinstance(value, dict):
            found += autos(value, f"{above}{key}.")
        elif value == AUTO:
            found.append(above + key)
    return found


def _batch(request: Request) -> Dict[str, Any]:
    if request.auto:
        return {
            "train_batch_size": AUTO,  # follows from the others and the number of ranks
            "train_micro_batch_size_per_gpu": request.micro_batch or AUTO,
            "gradient_accumulation_steps": request.accumulation or AUTO,
            "gradient_clipping": AUTO if request.clip is None else request.clip,
        }
    return {
        "train_micro_batch_size_per_gpu": request.micro_batch,
        "gradient_accumulation_steps": request.accumulation or 1,
        "gradient_clipping": 1.0 if request.clip is None else request.clip,
    }


def _optimizer(request: Request) -> Dict[str, Any]:
    if not request.optimizer:
        return {}
    auto = AUTO if request.auto else None
    params = {"lr": request.lr or auto, "weight_decay": auto if request.weight_decay is None else request.weight_decay}
    if request.auto and request.lr is None:
        params |= {"betas": AUTO, "eps": AUTO}
    if request.offload_optimizer == "none":
        params["torch_adam"] = True  # DeepSpeed would compile its own with nvcc, which nodes lack
    section: Dict[str, Any] = {"optimizer": {"type": "AdamW", "params": _given(params)}}
    if request.schedule != "none":
        section["scheduler"] = {"type": request.schedule, "params": _given(_schedule(request, auto))}
    return section


def _schedule(request: Request, auto: Any) -> Dict[str, Any]:
    warmup = auto if request.warmup is None else request.warmup
    if request.schedule == "WarmupCosineLR":  # its rates are fractions of the optimizer's
        return {"warmup_num_steps": warmup, "total_num_steps": request.steps or auto}
    steps = {} if request.schedule == "WarmupLR" else {"total_num_steps": request.steps or auto}
    return {"warmup_min_lr": 0, "warmup_max_lr": request.lr or auto, "warmup_num_steps": warmup, **steps}


def _given(params: Dict[str, Any]) -> Dict[str, Any]:
    return {key: value for key, value in params.items() if value is not None}


def _precision(request: Request) -> Dict[str, Any]:
    precision = precision_of(request)
    fp16 = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
    if precision == "auto":
        return {"fp16": {"enabled": AUTO, **fp16}, "bf16": {"enabled": AUTO}}
    if precision == "fp16":
        return {"fp16": {"enabled": True, **fp16}, "bf16": {"enabled": False}}
    return {"fp16": {"enabled": False}, "bf16": {"enabled": precision == "bf16"}}


def _zero(request: Request) -> Dict[str, Any]:
    zero: Dict[str, Any] = {"stage": request.stage}
    for key, device in (("offload_optimizer", request.offload_optimizer), ("offload_param", request.offload_param)):
        if device != "none":
            path = {"nvme_path": request.nvme_path} if device == "nvme" else {}
            zero[key] = {"device": device, **path, "pin_memory": request.pin_memory}
    bucket: Any = request.reduce_bucket or reduce_elements(request.hidden, request.link, request.world)
    if request.stage == 3:
        return {**zero, **_stage3(request, bucket)}
    zero |= {
        "allgather_partitions": True,
        "allgather_bucket_size": request.allgather_bucket or bucket,
        "overlap_comm": bool(request.overlap),
        "reduce_scatter": True,
        "reduce_bucket_size": bucket,
        "contiguous_gradients": True,
    }
    offloads = request.offload_optimizer != "none"
    if request.round_robin if request.round_robin is not None else offloads:
        zero["round_robin_gradients"] = True
    return zero


def _stage3(request: Request, bucket: Any) -> Dict[str, Any]:
    known = request.hidden is not None
    if request.auto and not known and request.reduce_bucket is None and request.link is None:
        bucket = AUTO
    sizes: Dict[str, Any] = {"reduce_bucket_size": bucket}
    if known:
        sizes["stage3_prefetch_bucket_size"] = prefetch_elements(request.hidden or 0)
        sizes["stage3_param_persistence_threshold"] = persistence_elements(request.hidden or 0)
    elif request.auto:
        sizes |= {"stage3_prefetch_bucket_size": AUTO, "stage3_param_persistence_threshold": AUTO}
    return {
        "overlap_comm": request.overlap is not False,
        "contiguous_gradients": True,
        "sub_group_size": _LIVE,
        **sizes,
        "stage3_max_live_parameters": _LIVE,
        "stage3_max_reuse_distance": _LIVE,
        "stage3_gather_16bit_weights_on_model_save": True,
    }


DEFAULT = 500_000_000  # elements; deepspeed 0.19 runtime/zero/config.py
ORDINARY = 200_000_000  # if neither the link nor the model is known
LEAST = 5_000_000
_SHARE = 20
_FAST = 100.0  # GB/s; above it is NVLink
_LATENCY = (20e-6, 5e-6)  # seconds a step: through a network card, and through NVLink; estimates
_WORLD = 8


def reduce_elements(hidden: Optional[int], link: Optional[float], world: Optional[int]) -> int:
    """Elements of a bucket for a model of ``hidden``, over ``link`` GB/s, with ``world`` ranks; None if unknown."""
    if link is None:
        return ORDINARY if hidden is None else _bounded(max(ORDINARY // 4, hidden * hidden))
    steps = 2 * max((world or _WORLD) - 1, 1)
    waiting = steps * _LATENCY[link > _FAST]
    return _bounded(max(_SHARE * waiting * link * 1e9 / 2, (hidden or 0) ** 2))


def prefetch_elements(hidden: int) -> int:
    """Parameters that stage 3 fetches ahead: the Trainer's rule, 0.9 hidden^2."""
    return int(0.9 * hidden * hidden)


def persistence_elements(hidden: int) -> int:
    """Smaller parameters (biases, norms) stay on every GPU in stage 3: the Trainer's rule, 10 hidden."""
    return 10 * hidden


def _bounded(elements: float) -> int:
    """Round and limit a number of elements. It stays even: DeepSpeed needs this for ``allgather_bucket_size``."""
    bounded = min(max(elements, LEAST), DEFAULT)
    return min(math.ceil(bounded / 1e6) * 1_000_000, DEFAULT)
