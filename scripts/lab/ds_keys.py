"""Prints the table of DeepSpeed's configuration keys, which ``clusterctl ds-config --check`` uses.

    ENVIRONMENT/bin/python scripts/lab/ds_keys.py >trainer/ds_config/check/keys.json

ENVIRONMENT is the rehearsal environment. Sections with a pydantic model are read from the model. All other keys are
those that DeepSpeed's own reader asks for: it reads a dictionary that records them, with their defaults.
"""

import enum
import importlib
import inspect
import json
import sys
import typing
from collections.abc import Callable
from types import ModuleType
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.runtime import config, lr_schedules
from pydantic import BaseModel

# By section, the models that read it.
MODELS = {
    "zero_optimization": "deepspeed.runtime.zero.config.DeepSpeedZeroConfig",
    "fp16": "deepspeed.runtime.precision_config.DeepSpeedFP16Config",
    "bf16": "deepspeed.runtime.precision_config.DeepSpeedBF16Config",
    "tensorboard": "deepspeed.monitor.config.TensorBoardConfig",
    "wandb": "deepspeed.monitor.config.WandbConfig",
    "csv_monitor": "deepspeed.monitor.config.CSVConfig",
    "comet": "deepspeed.monitor.config.CometConfig",
    "comms_logger": "deepspeed.comm.config.CommsLoggerConfig",
    "compile": "deepspeed.compile.config.CompileConfig",
    "hybrid_engine": "deepspeed.runtime.config.HybridEngineConfig",
    "tensor_parallel": "deepspeed.runtime.tensor_parallel.config.TPTrainingConfig",
    "weight_quantization": "deepspeed.inference.config.WeightQuantConfig",
}
# Sections that are read by functions.
SECTIONS = (
    "activation_checkpointing", "aio", "autotuning", "checkpoint", "data_efficiency", "data_types", "datastates",
    "expert_parallel", "flops_profiler", "optimizer", "scheduler", "timers", "torch_autocast",
)  # fmt: skip
# Keys without a default, or that other parts of DeepSpeed and transformers read.
GIVEN = {
    "train_batch_size": {"type": "int", "gt": 0},
    "train_micro_batch_size_per_gpu": {"type": "int", "gt": 0},
    "gradient_accumulation_steps": {"type": "int", "gt": 0},
    "gradient_clipping": {"type": "float", "ge": 0},
    "steps_per_print": {"type": "int"},
    "sequence_parallel_size": {"type": "int", "gt": 0},
    "vocabulary_size": {"type": "int", "gt": 0},
    "communication_data_type": {"type": "str", "choices": ["fp16", "bf16", "fp32"]},
    "seq_parallel_communication_data_type": {"type": "str", "choices": ["fp16", "bf16", "fp32"]},
    "pipeline": {"type": "object"},
    "bfloat16": {"type": "object"},
    "inference": {"type": "object"},
}
REQUIRED = inspect.Parameter.empty


class Recorder(dict[str, Any]):
    """A dictionary that records the keys which are asked for."""

    def __init__(self, *given: dict[str, Any], asked: dict[str, Any]) -> None:
        super().__init__(*given)
        self.asked = asked

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.setdefault(key, default)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.setdefault(key, None)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.setdefault(key, None)
        return super().__getitem__(key)

    def keys(self) -> Any:
        return self  # for ``key in found.keys()``

    def __copy__(self) -> Any:
        return self


def recorded() -> dict[str, dict[str, Any]]:
    """By section ("" is the top), the keys that DeepSpeed asks for, each with its default."""
    asked = {name: {} for name in ("", *SECTIONS)}
    found = {name: Recorder(asked=asked[name]) for name in SECTIONS}
    dict.update(found["optimizer"], {"type": "AdamW", "params": {}})
    dict.update(found["scheduler"], {"type": "WarmupLR", "params": {}})
    config.DeepSpeedConfig(Recorder({"train_batch_size": 1, **found}, asked=asked[""]))
    return asked


def kind_of(value: object) -> str:
    """The type of a default."""
    if isinstance(value, bool):
        return "bool"
    return {int: "int", float: "float", str: "str", dict: "object", list: "list"}.get(type(value), "any")


def section(model: type[BaseModel]) -> dict[str, Any]:
    """A pydantic model as a section."""
    keys = {}
    for name, one in model.model_fields.items():
        key = annotated(one.annotation)
        for bound in one.metadata:
            key |= {sign: getattr(bound, sign) for sign in ("gt", "ge", "lt", "le") if hasattr(bound, sign)}
        extra = one.json_schema_extra if isinstance(one.json_schema_extra, dict) else {}
        if extra.get("deprecated"):
            key["deprecated"] = extra.get("new_param") or True
        keys[one.alias or name] = key
        if one.alias and model.model_config.get("populate_by_name"):
            keys[name] = key
    return {"closed": model.model_config.get("extra") == "forbid", "keys": keys}


def annotated(annotation: Any) -> dict[str, Any]:
    """The key of an annotation."""
    options = [each for each in typing.get_args(annotation) if each is not type(None)]
    if typing.get_origin(annotation) is typing.Literal:
        return {"type": "str", "choices": list(options)}
    if typing.get_origin(annotation) in (dict, list, tuple, set):
        return {"type": "object" if typing.get_origin(annotation) is dict else "list"}
    if options:
        kinds = [annotated(each) for each in options]
        if any(one["type"] == "any" for one in kinds):
            return {"type": "any"}
        if len(kinds) == 1:
            return {**kinds[0], **({"null": True} if type(None) in typing.get_args(annotation) else {})}
        return {"type": "any"}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {"type": "object", **section(annotation)}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        values = [each.value for each in annotation]
        return {"type": kind_of(values[0]), "choices": values}
    simple = {bool: "bool", int: "int", float: "float", str: "str", dict: "object", list: "list"}
    if getattr(annotation, "__name__", "") == "Path":
        return {"type": "str"}
    return {"type": simple.get(annotation, "any")}


def parameters(function: Callable[..., None]) -> dict[str, bool]:
    """By parameter, whether it is required."""
    found = inspect.signature(function).parameters
    names = [name for name in found if name not in ("self", "optimizer", "kwargs")]
    return {name: found[name].default is REQUIRED for name in names}


def classes(module: ModuleType, base: type) -> list[str]:
    """The names of a module's subclasses of ``base``."""
    found = {name: each for name, each in vars(module).items() if isinstance(each, type)}
    return sorted(name for name, each in found.items() if issubclass(each, base) and each is not base)


def main() -> None:
    comm.is_initialized = lambda: False
    table = {}
    sections = recorded()
    for name, default in sections[""].items():
        table[name] = {"type": kind_of(default)}
    for name in SECTIONS:
        keys = {key: {"type": kind_of(default)} for key, default in sections[name].items()}
        table[name] = {"type": "object", "closed": False, "keys": keys}
    for name, path in MODELS.items():
        module, _, model = path.rpartition(".")
        table[name] = {"type": "object", **section(getattr(importlib.import_module(module), model))}
    table["optimizer"] = {"type": "object", "closed": False, "keys": {
        "type": {"type": "str"}, "params": {"type": "object"}, "legacy_fusion": {"type": "bool"}}}  # fmt: skip
    table["scheduler"] = {"type": "object", "closed": False, "keys": {
        "type": {"type": "str"}, "params": {"type": "object"}}}  # fmt: skip
    table |= GIVEN
    top, zero = config._REMOVED_TOP_LEVEL_CONFIG_KEYS, config._REMOVED_ZERO_CONFIG_KEYS  # noqa: SLF001
    texts = {**top, **{f"zero_optimization.{name}": text for name, text in zero.items()}}
    removed = {name: text.split(". ")[0] for name, text in texts.items()}
    content = {
        "version": deepspeed.__version__,
        "optimizers": sorted(config.DEEPSPEED_OPTIMIZERS),
        "torch_optimizers": classes(torch.optim, torch.optim.Optimizer),
        "torch_schedulers": classes(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler),
        "schedulers": {
            name: parameters(getattr(lr_schedules, name).__init__) for name in lr_schedules.VALID_LR_SCHEDULES
        },
        "removed": removed,
        "keys": {name: each for name, each in table.items() if name not in removed},
    }
    sys.stdout.write(json.dumps(content, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
