"""Writes a plan as LLaMA-Factory's YAML (0.9.5), DeepSpeed's configuration, and options of trainer.gpt."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

from trainer.ds_config import Request, make
from trainer.plan.errors import PlanError
from trainer.plan.models import MODELS
from trainer.plan.plan import Plan
from trainer.plan.search import Option
from trainer.plan.wish import Cluster, Setup, Training, accumulation

_DEVICES = {"gpu": "none", "cpu": "cpu", "nvme": "nvme"}


def ds_config(plan: Plan, *, nvme_path: Optional[str] = None) -> Dict[str, Any]:
    """Return DeepSpeed's configuration of the plan's pick.

    Raises:
        PlanError: nothing fits.
        ConfigError: the pick needs nvme, but no path is given.
    """
    best = _best(plan)
    path = nvme_path if best.setup.optimizer_at == "nvme" else None
    return make(request(plan.training, plan.cluster, best.setup, nvme_path=path))


def request(training: Training, cluster: Cluster, setup: Setup, *, nvme_path: Optional[str] = None) -> Request:
    """Return the request for DeepSpeed's configuration of a setup. transformers' Trainer fills in the rest."""
    own = training.program == "own"
    return Request(
        stage=setup.stage,
        target="own" if own else "trainer",
        precision=training.precision if own else "auto",
        offload_optimizer=_DEVICES[setup.optimizer_at],
        offload_param=_DEVICES[setup.parameters_at],
        nvme_path=nvme_path,
        overlap=setup.overlap,
        hidden=training.shape.hidden,
        reduce_bucket=setup.bucket,
        micro_batch=setup.micro_batch if own else None,
        accumulation=accumulation(training, cluster, setup) if own else None,
    )


def yaml(plan: Plan, model: str, deepspeed: str) -> str:
    """Return LLaMA-Factory's YAML of the plan's pick.

    Args:
        plan: the plan.
        model: the value of ``model_name_or_path``.
        deepspeed: the file name of DeepSpeed's configuration, beside this one.

    Raises:
        PlanError: nothing fits.
    """
    best, training = _best(plan), plan.training
    workers = [] if plan.cluster.cores is None else [("preprocessing_num_workers", max(plan.cluster.cores // 2, 1))]
    blocks: Tuple[Tuple[str, List[Tuple[str, Any]]], ...] = (
        (f"from clusterctl plan: {best.setup.name}, {best.speed.tokens:,.0f} tokens/s expected", []),
        ("", [("model_name_or_path", model), ("flash_attn", "auto")]),
        ("", _method(plan)),
        (
            "the data: a name in data/dataset_info.json; both files are copied with the run",
            [
                *(("dataset", "train"), ("dataset_dir", "data"), ("cutoff_len", training.seq)),
                *workers,
                *([("packing", True), ("neat_packing", True)] if training.method != "pretrain" else []),
            ],
        ),
        (
            f"{plan.cluster.world} GPUs x batch x accumulation = {training.global_batch} samples per step",
            [
                ("per_device_train_batch_size", best.setup.micro_batch),
                ("gradient_accumulation_steps", accumulation(training, plan.cluster, best.setup)),
                ("disable_gradient_checkpointing", not best.setup.checkpointing),
                *([("enable_liger_kernel", True)] if best.setup.chunked_loss else []),
                ("learning_rate", f"{plan.rate.root:.1e}"),
                *(("lr_scheduler_type", "cosine"), ("warmup_ratio", 0.03), ("num_train_epochs", 1.0)),
                ("bf16" if training.precision == "bf16" else "fp16", True),
            ],
        ),
        ("", [("deepspeed", deepspeed), ("output_dir", "output"), ("logging_steps", 10), ("save_steps", 500)]),
    )
    rows = []
    for comment, pairs in blocks:
        rows += [f"# {comment}"] if comment else []
        rows += [f"{key}: {_scalar(value)}" for key, value in pairs]
    return "\n".join(rows) + "\n"


def gpt_options(plan: Plan) -> List[str]:
    """Return the plan's pick as options of ``trainer.gpt``; none if it is not a GPT-2 of ``--for own``, or needs nvme.

    Up to stage 1 they use the plain engine, which shards like stage 1.
    """
    best, shape = plan.best, plan.training.shape
    if best is None or shape.family != "gpt2" or plan.training.program != "own" or best.setup.optimizer_at == "nvme":
        return []
    sizes = {"n-layer": shape.layers, "n-head": shape.heads, "n-embd": shape.hidden}
    options: Dict[str, Any] = {"model": shape.name} if shape.name in MODELS else sizes
    options.update({"block-size": plan.training.seq, "batch-size": best.setup.micro_batch})
    options.update({"global-batch": plan.training.global_batch, "learning-rate": f"{plan.rate.root:.1e}"})
    if best.setup.stage >= 2:
        options["engine"] = f"zero{best.setup.stage}"
    if best.setup.optimizer_at == "cpu":
        options["offload"] = "all" if best.setup.parameters_at == "cpu" else "optimizer"
    if best.setup.checkpointing:
        options["checkpointing"] = "true"
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def _method(plan: Plan) -> List[Tuple[str, Any]]:
    training = plan.training
    stage = "pt" if training.method == "pretrain" else "sft"
    pairs: List[Tuple[str, Any]] = [("stage", stage), ("do_train", True)]
    if not training.adapters:
        pairs.append(("finetuning_type", "full"))
    else:
        # "all" is every Linear (model_utils/misc.py), and GPT-2's matrices are Conv1D.
        target = "c_attn,c_proj,c_fc" if training.shape.family == "gpt2" else "all"
        pairs += [("finetuning_type", "lora"), ("lora_rank", training.rank), ("lora_target", target)]
    if training.method == "qlora":
        pairs += [("quantization_bit", 4), ("quantization_method", "bnb"), ("double_quantization", True)]
    if training.method != "pretrain":
        pairs.append(("template", training.shape.template))
    return pairs


def _best(plan: Plan) -> Option:
    if plan.best is None:
        raise PlanError("nothing fits, so no file is written", hint="use more --nodes, or --method lora")
    return plan.best


def _scalar(value: Any) -> str:
    """Format a value as YAML, with quotes if it could be read as another type."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and not all(each.isalnum() or each in "/._-+" for each in value):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)
