"""A plan as an object, for ``--json``: bytes, seconds and tokens per second, not rounded."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Dict

from trainer.plan.plan import Plan
from trainer.plan.search import Option
from trainer.plan.wish import Cluster, Training, accumulation
from trainer.plan.write import gpt_options


def data(plan: Plan) -> Dict[str, Any]:
    """Return the whole plan."""
    training, cluster, best = plan.training, plan.cluster, plan.best
    return {
        "model": {**asdict(training.shape), "parameters": training.shape.parameters, "trained": training.trained},
        "cluster": {**asdict(cluster), "world": cluster.world, "bus": cluster.bus, "usable": cluster.usable},
        "training": {
            **{key: value for key, value in asdict(training).items() if key != "shape"},
            "tokens": training.tokens,
        },
        "options": [_option(each, training, cluster) for each in plan.options],
        "best": None if best is None else _option(best, training, cluster),
        "trainer_gpt": gpt_options(plan),
        "why": list(plan.why),
        "learning_rate": {**asdict(plan.rate), "far": plan.rate.far},
        "ladder": asdict(plan.ladder),
        "no_cures": [{"what": what, "does": does} for what, does in plan.no_cures],
        "advice": list(plan.advice),
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
