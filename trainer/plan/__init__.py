"""Plans what fits on a cluster, what is fastest there, and why. It needs only the standard library.

::

    training = Training(load("llama-2-7b"), "full", seq=4096, global_batch=256)
    result = plan(training, Cluster(nodes=2, gpus=8, gpu=find("A100"), memory=80))
    result.best.setup         # the stage, the batch of a GPU, checkpointing
    lines(result)             # text for the terminal
    data(result)              # an object for programs

``clusterctl plan`` does the same on the command line.
"""

from __future__ import annotations

from trainer.plan.config_json import parse
from trainer.plan.inputs import BOUNDS, METHODS, PROGRAMS, Cluster, Setup, Training, accumulation
from trainer.plan.models import MODELS, load, named
from trainer.plan.output import data, ds_config, lines, yaml
from trainer.plan.plan import Plan, plan
from trainer.plan.shape import PlanError, Shape

__all__ = [
    "BOUNDS",
    "METHODS",
    "MODELS",
    "PROGRAMS",
    "Cluster",
    "Plan",
    "PlanError",
    "Setup",
    "Shape",
    "Training",
    "accumulation",
    "data",
    "ds_config",
    "lines",
    "load",
    "named",
    "parse",
    "plan",
    "yaml",
]
