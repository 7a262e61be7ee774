"""What DeepSpeed refuses or ignores although every key and type is right.

Sources: DeepSpeed 0.19, ``runtime/config.py``, ``runtime/engine.py``, ``runtime/lr_schedules.py`` and
``runtime/zero/config.py``.
"""

from __future__ import annotations

import difflib
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

from trainer.ds_config.build import FILLED, autos
from trainer.ds_config.check.context import ACCELERATE, OWN, TRAINER, Context
from trainer.ds_config.check.finding import ERROR, WARNING, Finding
from trainer.ds_config.check.keys import AUTO, finding, table
from trainer.ds_config.check.reading import Document

Rule = Callable[[Document, Dict[str, Any], Context], Iterator[Finding]]

_MOST = 1_000_000_000  # samples of a batch


def check_rules(document: Document, context: Context) -> Iterator[Finding]:
    """All findings of this module."""
    if isinstance(document.data, dict):
        for rule in (_optimizer, _scheduler, _precision, _offload, _zero, _batch, _auto):
            yield from rule(document, document.data, context)


def section(data: Any, *path: str) -> Dict[str, Any]:
    """The object at a path; empty if there is none."""
    for name in path:
        data = data.get(name) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


def whole(value: Any) -> Optional[int]:
    """A positive whole number; None if it is none."""
    is_whole = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _MOST
    return int(value) if is_whole and float(value).is_integer() else None


def _optimizer(document: Document, data: Dict[str, Any], context: Context) -> Iterator[Finding]:
    if "optimizer" not in data:
        if "scheduler" in data and context.program == TRAINER:
            why = "transformers creates the optimizer, and DeepSpeed the schedule"
            yield finding(
                document, ("scheduler",), WARNING, "scheduler without optimizer", why, "remove the section scheduler"
            )
        return
    given = section(data, "optimizer")
    kind = given.get("type")
    if kind is None:
        yield finding(
            document,
            ("optimizer",),
            ERROR,
            "optimizer has no type",
            "DeepSpeed creates no optimizer",
            'add "type": "AdamW"',
        )
    elif isinstance(kind, str):
        known, torch = table()["optimizers"], table()["torch_optimizers"]
        if kind.lower() in {"onebitadam", "zerooneadam", "onebitlamb"}:
            why = f"DeepSpeed {table()['version']} has no 1-bit optimizers any more"
            yield finding(document, ("optimizer", "type"), ERROR, f"optimizer {kind} was removed", why, 'write "AdamW"')
        elif kind.lower() not in known and kind not in torch:
            close = difflib.get_close_matches(kind.lower(), [*known, *(each.lower() for each in torch)], n=1)
            names = {each.lower(): each for each in torch}
            fix = (
                f'write "{names.get(close[0], close[0])}"'
                if close
                else f"one of {', '.join(known)}, or a class of torch.optim"
            )
            yield finding(document, ("optimizer", "type"), ERROR, f"unknown optimizer {kind[:40]!r}",
                          "neither DeepSpeed nor torch.optim has it", fix)  # fmt: skip
    if "max_grad_norm" in section(given, "params"):
        yield finding(document, ("optimizer", "params", "max_grad_norm"), ERROR,
                      "max_grad_norm is no parameter of an optimizer",
                      "DeepSpeed refuses it", "write gradient_clipping at the top of the file instead")  # fmt: skip


def _scheduler(document: Document, data: Dict[str, Any], context: Context) -> Iterator[Finding]:
    if "scheduler" not in data:
        return
    kind = section(data, "scheduler").get("type")
    params = section(data, "scheduler", "params")
    schedulers: Dict[str, Dict[str, bool]] = table()["schedulers"]
    if kind is None:
        yield finding(
            document, ("scheduler",), ERROR, "scheduler has no type", "DeepSpeed creates none", 'add "type": "WarmupLR"'
        )
        return
    if not isinstance(kind, str):
        return
    if kind not in schedulers:
        torch = table()["torch_schedulers"]
        if kind not in torch:
            names = {each.lower(): each for each in (*schedulers, *torch)}
            close = difflib.get_close_matches(kind.lower(), list(names), n=1, cutoff=0.5)
            fix = f'write "{names[close[0]]}"' if close else f"one of {', '.join(schedulers)}"
            yield finding(document, ("scheduler", "type"), ERROR, f"unknown scheduler {kind[:40]!r}",
                          "DeepSpeed fails with: does not recognize LR scheduler", fix)  # fmt: skip
        return
    yield from _parameters(document, kind, schedulers[kind], params, context)


def _parameters(
    document: Document, kind: str, known: Dict[str, bool], params: Dict[str, Any], context: Context
) -> Iterator[Finding]:
    """Required, unknown and contradictory parameters of a scheduler of DeepSpeed."""
    for name, is_required in known.items():
        if is_required and name not in params:
            value = '"auto"' if context.program == TRAINER and name == "total_num_steps" else _example(name, context)
            yield finding(document, ("scheduler", "params"), ERROR, f"{kind} lacks {name}",
                          f"DeepSpeed fails with: missing 1 required positional argument: '{name}'",
                          f'add "{name}": {value} to scheduler.params')  # fmt: skip
    for name in params:
        if name not in known:
            close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
            yield finding(document, ("scheduler", "params", name), ERROR, f"{kind} has no parameter {name[:40]}",
                          "DeepSpeed fails with: got an unexpected keyword argument",
                          f"write {close[0]}" if close else "remove it")  # fmt: skip
    warmup, total = whole(params.get("warmup_num_steps")), whole(params.get("total_num_steps"))
    if warmup and total and warmup > total:
        yield finding(document, ("scheduler", "params", "warmup_num_steps"), WARNING,
                      f"warmup_num_steps {warmup} is more than total_num_steps {total}",
                      "the full rate is never reached",
                      f"write {max(total // 10, 1)}")  # fmt: skip


def _example(name: str, context: Context) -> str:
    if name == "total_num_steps":
        return str(context.steps or "N (the optimizer steps of the whole training)")
    return "RATE"


def enabled(data: Dict[str, Any], name: str) -> Any:
    """The value of ``enabled`` in a precision's section, with bf16's older name."""
    found = section(data, name) or (section(data, "bfloat16") if name == "bf16" else {})
    return found.get("enabled", False)


def _precision(document: Document, data: Dict[str, Any], context: Context) -> Iterator[Finding]:
    fp16, bf16 = enabled(data, "fp16"), enabled(data, "bf16")
    if fp16 is True and bf16 is True:
        yield finding(document, ("bf16", "enabled"), ERROR,
                      "fp16 and bf16 are both enabled", "DeepSpeed refuses the file",
                      'write "enabled": false in one of them')  # fmt: skip
    gpu = context.gpu
    if gpu is not None and not gpu.bf16 and (bf16 is True or (bf16 == AUTO and context.value("bf16") is True)):
        card = f"{gpu.name} (compute capability {gpu.capability[0]}.{gpu.capability[1]})"
        yield finding(document, ("bf16", "enabled"), ERROR, f"bf16 is enabled, and {card} has no bfloat16",
                      "DeepSpeed fails with: Type bf16 is not supported on your device", "use fp16")  # fmt: skip
    if "amp" in data and section(data, "amp").get("enabled") is True and (fp16 is True or bf16 is True):
        yield finding(document, ("amp",), ERROR, "amp is enabled beside fp16 or bf16", "", "remove amp")


def _offload(document: Document, data: Dict[str, Any], context: Context) -> Iterator[Finding]:
    del context
    zero = section(data, "zero_optimization")
    stage = zero.get("stage", 0)
    if not isinstance(stage, int):
        return
    for name in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(name), dict):
            yield from _offloaded(document, name, zero[name], stage)
    ratio = section(zero, "offload_optimizer").get("ratio", 1.0)
    if isinstance(ratio, (int, float)) and ratio < 1 and stage < 3:
        yield finding(document, ("zero_optimization", "offload_optimizer", "ratio"), ERROR,
                      "a ratio below 1 needs stage 3", "DeepSpeed refuses the file", "remove ratio")  # fmt: skip


def _offloaded(document: Document, name: str, given: Dict[str, Any], stage: int) -> Iterator[Finding]:
    """One section of offload."""
    device, path = given.get("device", "none"), ("zero_optimization", name)
    if "device" not in given:
        what, why, fix = f"{name} has no device", "nothing is offloaded", 'add "device": "cpu"'
        yield finding(document, path, WARNING, what, why, fix)
    if device == "none":
        return
    if name == "offload_param" and stage < 3:
        why, fix = (
            "DeepSpeed ignores it: only stage 3 shards the parameters",
            'write "stage": 3, or remove offload_param',
        )
        yield finding(document, path, WARNING, f"offload_param with stage {stage}", why, fix)
    if name == "offload_optimizer" and stage == 0:
        why, fix = "stage 0 keeps everything on every GPU", 'write "stage": 2, or remove offload_optimizer'
        yield finding(document, path, ERROR, "offload_optimizer with stage 0", why, fix)
    if device == "nvme" and stage < 3:
        why, fix = "only stage 3 uses it", 'write "device": "cpu", or "stage": 3'
        yield finding(document, (*path, "device"), WARNING, f"offload to nvme with stage {stage}", why, fix)
    if device == "nvme" and not given.get("nvme_path"):
        why = "DeepSpeed does not know where to write"
        fix = 'add "nvme_path": a folder on a fast local disk of every node'
        yield finding(document, path, ERROR, f"{name} to nvme has no nvme_path", why, fix)


def _zero(document: Document, data: Dict[str, Any], context: Context) -> Iterator[Finding]:
    """Zero's options of other stages, and a model that the Trainer cannot save."""
    zero = section(data, "zero_optimization")
    stage = zero.get("stage", 0)
    is_full = zero.get("stage3_gather_16bit_weights_on_model_save", zero.get("gather_16bit_weights_on_model_save"))
    if stage == 3 and context.program == TRAINER and not is_full:
        why = "the Trainer then saves no weights, only DeepSpeed's shards: collect --fp32 makes a model of them"
        yield finding(document, ("zero_optimization",), WARNING,
                      "stage 3 without stage3_gather_16bit_weights_on_model_save",
                      why, 'add "stage3_gather_16bit_weights_on_model_save": true')  # fmt: skip
    if zero and stage == 0 and "stage" not in zero:
        yield finding(document, ("zero_optimization",), WARNING, "zero_optimization has no stage", "it is then stage 0",
                      'add "stage": 2')  # fmt: skip


_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _batch(document: Document, data: Dict[str, Any], context: Context) -> Iterator[Finding]:
    """The rule ``train_batch_size = micro-batch * accumulation * ranks``, and missing keys."""
    total, micro, accumulation = (whole(data.get(name)) for name in _BATCH)
    if context.program != TRAINER and not {"train_batch_size", "train_micro_batch_size_per_gpu"} & data.keys():
        if context.program in {OWN, ACCELERATE}:
            yield Finding(ERROR, "neither train_batch_size nor train_micro_batch_size_per_gpu is there",
                          "DeepSpeed refuses the file", 'add "train_micro_batch_size_per_gpu": 1')  # fmt: skip
        return
    world = context.world
    if not total or world is None or context.program == TRAINER:
        return  # with the Trainer, each of them is compared with its argument
    if micro and accumulation and total != micro * accumulation * world:
        product = micro * accumulation * world
        yield finding(document, ("train_batch_size",), ERROR,
                      f"train_batch_size {total} is not {micro} * {accumulation} * {world}, "
                      "the product of micro-batch, accumulation and ranks", "DeepSpeed refuses the file",
                      f"write {product}, or remove one of the three keys")  # fmt: skip
    known = (micro or 1) * (accumulation or 1) * world
    if not (micro and accumulation) and (total < known or total % known):
        yield finding(document, ("train_batch_size",), ERROR,
                      f"train_batch_size {total} cannot be divided by {known}, the number of ranks"
                      + (" times the micro-batch" if micro else " times the accumulation" if accumulation else ""),
                      "DeepSpeed refuses the file", f"write {max(round(total / known), 1) * known}")  # fmt: skip


def _auto(document: Document, data: Dict[str, Any], context: Context) -> Iterator[Finding]:
    """``auto`` in a file for a script that does not use transformers or accelerate."""
    if context.program != OWN:
        return
    names = context.named
    script = f"{names} does not use transformers or accelerate" if names else "the script does not use transformers"
    for key in autos(data):
        path = _split(key)
        value, fix = data.get(path[0]), _replacement(key)
        is_closed = len(path) > 1 and path[0] in {"fp16", "bf16", "zero_optimization"}
        what = f'{key} is "auto", and {script}, which fill it in'
        if is_closed and isinstance(value, dict):
            yield finding(document, path, WARNING, what, "DeepSpeed takes its default", fix)
        elif key in FILLED or not is_closed:
            yield finding(document, path, ERROR, what, "DeepSpeed fails on the string", fix)


def _split(key: str) -> Tuple[str, ...]:
    return tuple(key.split("."))


def _replacement(key: str) -> str:
    examples = {
        "train_batch_size": "remove it", "gradient_accumulation_steps": "write 1", "gradient_clipping": "write 1.0",
        "train_micro_batch_size_per_gpu": "write the script's batch size",
        "optimizer.params.betas": "write [0.9, 0.999]", "optimizer.params.eps": "write 1e-8",
        "fp16.enabled": "write true or false", "bf16.enabled": "write true or false",
        "zero_optimization.reduce_bucket_size": "write 5e8, or remove it",
    }  # fmt: skip
    return examples.get(key, "write a number, or remove it")
