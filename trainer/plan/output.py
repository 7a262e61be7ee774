"""A plan as text, as an object for ``--json``, and as files.

The files are LLaMA-Factory's YAML (0.9.5), DeepSpeed's configuration, and options of trainer.lm.
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any, Dict, Iterator, List, Optional, Tuple

from trainer.ds_config import Request, make
from trainer.plan.inputs import GIB, Cluster, Setup, Training, accumulation
from trainer.plan.models import MODELS
from trainer.plan.plan import Plan
from trainer.plan.saves import saves
from trainer.plan.search import Option
from trainer.plan.shape import PlanError, Shape

WIDTH = 80
Styled = Tuple[str, str]


def lines(plan: Plan) -> List[Styled]:
    """Return all lines."""
    return [line for part in (_head, _memory, _speed, _pick, _ladder, _advice) for line in part(plan)]


def _head(plan: Plan) -> Iterator[Styled]:
    training, cluster, shape = plan.training, plan.cluster, plan.training.shape
    what = f"{training.method}, {training.precision}"
    if training.eight_bit:
        what += ", 8-bit Adam"
    if training.adapters:
        what += f", LoRA of rank {training.rank} ({training.trained / 1e6:.1f} M)"
    yield from _wrapped(f"{shape.name}, {shape.parameters / 1e9:.2f} B parameters{_parts(shape)}: {what}", "bold")
    link = "" if cluster.nodes == 1 else f", {cluster.link:g} GB/s between nodes"
    nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes} nodes"
    yield from _wrapped(f"{nodes} x {cluster.gpus} {cluster.gpu.name} with {cluster.memory:g} GB{link}")
    yield from _wrapped(
        f"{training.global_batch} samples of {training.seq} tokens per step: {training.tokens:,} tokens"
    )


def _parts(shape: Shape) -> str:
    """What a token does not pass, and what is not trained."""
    active = f", {shape.active / 1e9:.2f} B of them per token" if shape.experts else ""
    return active + (f", {shape.vision / 1e9:.2f} B of them the frozen vision tower" if shape.vision else "")


def _memory(plan: Plan) -> Iterator[Styled]:
    yield "", ""
    states = f"{'param':>7}{'grad':>6}{'Adam':>7}"
    yield f"{'GiB per GPU':<21}{'batch':>6}{'ckpt':>5}{states}{'activ':>7}{'buff':>6}{'rest':>6}{'total':>8}", "bold"
    for each in plan.options:
        memory = each.memory
        activations = memory.activations + memory.logits
        parts = f"{_gib(memory.parameters):>7}{_gib(memory.gradients):>6}{_gib(memory.optimizer):>7}"
        others = f"{_gib(activations):>7}{_gib(memory.buffers):>6}{_gib(memory.rest):>6}{_gib(memory.total):>8}"
        yield f"{_name(plan, each)}{each.setup.micro_batch:>6}{_yes(each):>5}{parts}{others}", _style(plan, each)
    yield f"  at the peak of a step; a GPU has {plan.cluster.usable:.1f}. activ includes the logits", "dim"


def _speed(plan: Plan) -> Iterator[Styled]:
    yield "", ""
    yield (
        f"{'per step':<21}{'host GiB':>9}{'disk GiB':>9}{'net GB':>8}{'compute':>9}{'waiting':>9}{'tokens/s':>11}",
        "bold",
    )
    for each in plan.options:
        speed = each.speed
        sizes = f"{each.host / GIB:>9.0f}{each.disk / GIB:>9.0f}{speed.network / 1e9:>8.1f}"
        waiting = speed.waiting + speed.optimizer
        if each.fits:
            times = f"{speed.compute:>7.2f} s{waiting:>7.2f} s{speed.tokens:>11,.0f}"
        else:
            times = f"{'does not fit' if each.lacks else 'not supported':>29}"
        yield f"{_name(plan, each)}{sizes}{times}", _style(plan, each)
    yield "  host, disk: per node, for offload. net: sent by each node. waiting: network", "dim"
    yield f"  and Adam. tokens/s at {plan.training.efficiency:.0%} of the peak in matrix products", "dim"


def _pick(plan: Plan) -> Iterator[Styled]:
    yield "", ""
    best = plan.best
    if best is not None:
        passes = accumulation(plan.training, plan.cluster, best.setup)
        batch = f"{best.setup.micro_batch} x {passes} x {plan.cluster.world} = {plan.training.global_batch}"
        chunks = ", with Liger's loss in chunks" if best.setup.chunked_loss else ""
        checkpointing = "with" if best.setup.checkpointing else "without"
        yield from _wrapped(
            f"use {best.setup.name}, {checkpointing} gradient checkpointing{chunks}: "
            f"{best.speed.tokens:,.0f} tokens/s, {best.speed.mfu:.0%} MFU; batch x accumulation x GPUs: {batch}",
            "green",
        )
    if options := " ".join(gpt_options(plan)):
        yield from _wrapped(f"for trainer.lm: {options}")
    for each in plan.why:
        yield from _wrapped(f"- {each}", "" if best is not None else "yellow")
    rate = plan.rate
    yield from _wrapped(
        f"learning rate: {rate.root:.1e} for Adam (square root rule), {rate.linear:.1e} for SGD (linear rule), from "
        f"{rate.base:g} at {rate.batch:,.0f} {rate.unit} ({rate.source})"
        + (": far from this batch, so also try lower rates" if rate.far else "")
    )


def _ladder(plan: Plan) -> Iterator[Styled]:
    yield "", ""
    yield f"{'when memory runs out, in this order':<52}{'saves':>7}{'then':>9}{'tokens/s':>12}", "bold"
    yield f"   {plan.ladder.start:<56}{plan.ladder.needs:>9.1f}{plan.ladder.tokens:>12,.0f}", "dim"
    for number, rung in enumerate(plan.ladder.rungs, 1):
        what = f"{number:>2} {rung.what}"
        yield f"{what:<52}{rung.saves:>7.1f}{rung.needs:>9.1f}{rung.tokens:>12,.0f}", "" if rung.fits else "dim"
    yield f"  GiB per GPU; each change includes those above. A GPU has {plan.cluster.usable:.1f}", "dim"
    yield "these do not help:", "bold"
    for what, does in plan.no_cures:
        yield from _wrapped(f"- {what}: {does}")


def _advice(plan: Plan) -> Iterator[Styled]:
    yield "", ""
    for each in plan.advice:
        yield from _wrapped(f"- {each}")


def _name(plan: Plan, option: Option) -> str:
    return f"{'>' if option is plan.best else ' '} {option.setup.name:<19}"


def _style(plan: Plan, option: Option) -> str:
    return "green" if option is plan.best else "" if option.fits else "dim"


def _yes(option: Option) -> str:
    return "yes" if option.setup.checkpointing else "no"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size < 1000 * GIB else f"{size / GIB:.0f}"


def _wrapped(text: str, style: str = "") -> Iterator[Styled]:
    indent = "  " if text.startswith("- ") else ""
    for row in textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False):
        yield row, style


def data(plan: Plan) -> Dict[str, Any]:
    """Return the whole plan."""
    training, cluster, best = plan.training, plan.cluster, plan.best
    return {
        "model": {
            **asdict(training.shape),
            "parameters": training.shape.parameters,
            "active": training.shape.active,
            "trained": training.trained,
        },
        "cluster": {**asdict(cluster), "world": cluster.world, "bus": cluster.bus, "usable": cluster.usable},
        "training": {
            **{key: value for key, value in asdict(training).items() if key != "shape"},
            "tokens": training.tokens,
        },
        "options": [_option(each, training, cluster) for each in plan.options],
        "best": None if best is None else _option(best, training, cluster),
        "trainer_lm": gpt_options(plan),
        "why": list(plan.why),
        "learning_rate": {**asdict(plan.rate), "far": plan.rate.far},
        "ladder": asdict(plan.ladder),
        "no_cures": [{"what": what, "does": does} for what, does in plan.no_cures],
        "advice": list(plan.advice),
        "saves": asdict(saves(training, cluster)),
    }


def _option(option: Option, training: Training, cluster: Cluster) -> Dict[str, Any]:
    memory, speed = option.memory, option.speed
    return {
        "name": option.setup.name,
        "setup": {**asdict(option.setup), "accumulation": accumulation(training, cluster, option.setup)},
        "fits": option.fits,
        "why_not": option.why_not,
        "memory": {**asdict(memory), "allocated": memory.allocated, "total": memory.total},
        "host": option.host,
        "disk": option.disk,
        "speed": {**asdict(speed), "seconds": speed.seconds},
    }


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
    """Return the plan's pick as options of ``trainer.lm``; none if it is not a GPT-2 of ``--for own``, or needs nvme.

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
        options["checkpointing"] = "full"
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
    if training.eight_bit:
        pairs.append(("optim", "adamw_bnb_8bit"))
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
