"""A DeepSpeed without some fields: each engine's message, a JSON object for each missing field."""

import json
import os
import sys

os.environ.update(DS_ACCELERATOR="cpu", DEEPSPEED_LOG_LEVEL="warning")

import deepspeed
import torch

from trainer.lm import engine, log, options, ranks, start
from trainer.lm.errors import RefusedError
from trainer.lm.shape import Shape

FIELDS = (
    ("zero0", "bfloat16", "fp16_groups"),
    ("zero0", "bfloat16", "fp32_groups"),
    ("zero1", "float32", "single_partition_of_fp32_groups"),
    ("zero2", "bfloat16", "_hp_mapping"),
    ("zero3", "bfloat16", "grad_position"),
    ("zero3", "float32", "fp32_partitioned_groups_flat"),
    ("zero2", "float32", "coalesce_grad_reduction"),
    ("zero2", "float32", "half"),
    ("zero2", "float32", "one"),
    ("zero2", "float32", ""),
)
initialize = deepspeed.initialize


class Without:
    """An engine that lacks a method."""

    def __init__(self, engine, field):
        self._engine, self._field = engine, field

    def __getattr__(self, name):
        if name == self._field:
            raise AttributeError(f"{type(self._engine).__name__!r} object has no attribute {name!r}")
        return getattr(self._engine, name)


def without(field):
    """Calls ``deepspeed.initialize``, and removes a field, ``half`` of its tensors or ``one`` parameter."""

    def initialized(**given):
        made, *rest = initialize(**given)
        if field == "half":
            flats = made.optimizer.single_partition_of_fp32_groups
            made.optimizer.single_partition_of_fp32_groups = [flat[: len(flat) // 2] for flat in flats]
        if field == "one":
            next(made.module.parameters())._hp_mapping = None
        for owner in (made.optimizer, *made.module.parameters()):
            if field in vars(owner):
                delattr(owner, field)
        if hasattr(type(made), field):
            made = Without(made, field)
        return made, *rest

    return initialized


everyone = ranks.join("cpu")
for name, dtype, field in FIELDS:
    coalesces = str(field == "coalesce_grad_reduction")
    argv = ["--data", "none", "--engine", name, "--dtype", dtype, "--coalesce", coalesces]
    given = options.from_arguments(argv)
    model = start.make_model(start.Start(Shape(1, 1, 16, 8, 20)), given, everyone, 2)
    deepspeed.initialize = without(field)
    reported = {"field": field, "version": deepspeed.__version__, "what": None, "fix": None}
    try:
        engine.make_engine(model, given, everyone, 2, log.Watch(torch.device("cpu")))
    except RefusedError as error:
        reported.update(what=str(error), fix=error.fix)
    sys.stdout.write(json.dumps(reported) + "\n")
ranks.leave()
