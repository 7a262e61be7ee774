"""What a training says, by rank 0: lines on stdout and in ``train.log``, records in ``trainer_log.jsonl``, trackers.

A line for a step, whose beginning is nanoGPT's, and one for an evaluation:

    iter 20: loss 2.4519, time 81.20ms, mfu 41.20%, lr 3.0000e-04, norm 0.8123, tokens/s 50123, memory 12.3GB, …
    step 20: train loss 2.4410, val loss 2.4620, perplexity 11.73

``trainer_log.jsonl`` has the keys of LLaMA-Factory's, which clusterctl's agent follows. It is appended to when a
training is resumed: steps may repeat, the last line of each counts.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Optional

from trainer.gpt.config import Config
from trainer.gpt.errors import RefusedError

LINES = "train.log"
RECORDS = "trainer_log.jsonl"
TRACKERS = {"tensorboard": "tensorboard", "wandb": "wandb"}
Track = Callable[[int, Dict[str, float]], None]


class Log:
    """The voice of a training; on other ranks than the first it is silent."""

    def __init__(self, config: Config, speaks: bool) -> None:
        self._out = Path(config.out)
        self._speaks = speaks
        self._total = config.max_iters
        self._began = time.monotonic()
        self._first: Optional[int] = None
        self._phases = "CLUSTERCTL_RUN" in os.environ
        chosen = trackers(config.trackers)  # refused on all ranks alike
        self._track = [_TRACK[name](config) for name in chosen] if speaks else []

    def say(self, text: str) -> None:
        """A line."""
        if not self._speaks:
            return
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        self._append(LINES, text)

    def phase(self, name: str) -> None:
        """What goes on, for clusterctl's agent, which tells a long evaluation from a hang by it."""
        if self._phases and self._speaks:
            sys.stdout.write("clusterctl: phase %s\n" % name)
            sys.stdout.flush()

    def step(self, step: int, figures: Dict[str, Any]) -> None:
        """A step's ``figures``: loss, lr, norm, tokens, mfu, memory, and seconds of ``timing.PARTS``."""
        seconds = figures["seconds"]
        parts = ["loss %.4f" % figures["loss"], "time %.2fms" % (1e3 * seconds["step"])]
        if figures["mfu"] is not None:
            parts.append("mfu %.2f%%" % (100 * figures["mfu"]))
        parts += ["lr %.4e" % figures["lr"], "norm %.4f" % figures["norm"], "tokens/s %.0f" % figures["tokens"]]
        if figures["memory"] is not None:
            parts.append("memory %.1fGB" % (figures["memory"] / 1e9))
        parts += ["%s %.2fms" % (name, 1e3 * spent) for name, spent in seconds.items() if name != "step"]
        self.say("iter %d: %s" % (step, ", ".join(parts)))
        record = {"loss": figures["loss"], "lr": figures["lr"], "grad_norm": _finite(figures["norm"])}
        told = dict(record, tokens_per_second=figures["tokens"], mfu=figures["mfu"], memory=figures["memory"])
        told.update({"ms" if name == "step" else name + "_ms": 1e3 * spent for name, spent in seconds.items()})
        self._record(step, told)

    def evaluation(self, step: int, losses: Dict[str, float]) -> None:
        """Losses by split."""
        told = ", ".join("%s loss %.4f" % each for each in losses.items())
        last = list(losses.values())[-1]
        perplexity = math.exp(min(last, 700.0))
        self.say("step %d: %s, perplexity %.2f" % (step, told, perplexity))
        record = {"eval_loss": last, "perplexity": perplexity}
        if len(losses) > 1:
            record["train_loss"] = losses["train"]
        self._record(step, record)

    def _record(self, step: int, fields: Dict[str, Any]) -> None:
        if not self._speaks:
            return
        spent = time.monotonic() - self._began
        self._first = step if self._first is None else self._first
        left = spent / max(1, step - self._first + 1) * (self._total - step)
        told = {"current_steps": step, "total_steps": self._total, "percentage": round(100 * step / self._total, 2)}
        clock = {"elapsed_time": _clock(spent), "remaining_time": _clock(left)}
        self._append(RECORDS, json.dumps(dict(told, **fields, **clock)))
        numbers = {name: value for name, value in fields.items() if isinstance(value, (int, float))}
        for track in self._track:
            track(step, numbers)

    def _append(self, name: str, text: str) -> None:
        try:
            with (self._out / name).open("a", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:  # a full disk ends a log, not a training
            sys.stderr.write("%s: %s\n" % (self._out / name, error.strerror))


def _finite(value: float) -> Optional[float]:
    """JSON has no word for what fp16's gradients become when they overflow."""
    return value if math.isfinite(value) else None


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return "%d:%02d:%02d" % (whole // 3600, whole // 60 % 60, whole % 60)


def trackers(asked: str) -> list[str]:
    """Which trackers are used.

    Raises:
        RefusedError: one that is not known, or not installed.
    """
    names = [] if asked == "none" else list(TRACKERS) if asked == "auto" else asked.split(",")
    found = []
    for name in names:
        if name not in TRACKERS:
            raise RefusedError("--trackers %s: there is no %s" % (asked, name), "tensorboard,wandb, none or auto")
        if importlib.util.find_spec(TRACKERS[name]) is not None:
            found.append(name)
        elif asked != "auto":
            raise RefusedError("--trackers %s: %s is not installed here" % (asked, name), "--trackers auto")
    return found


def _tensorboard(config: Config) -> Track:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - it takes a second to import

    writer = SummaryWriter(str(Path(config.out) / "tensorboard"))

    def track(step: int, numbers: Dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return track


def _wandb(config: Config) -> Track:
    import dataclasses  # noqa: PLC0415

    import wandb  # noqa: PLC0415 - it takes a second to import

    run = wandb.init(project="gpt", dir=config.out, mode="offline", config=dataclasses.asdict(config))

    def track(step: int, numbers: Dict[str, float]) -> None:
        run.log(numbers, step=step)

    return track


_TRACK = {"tensorboard": _tensorboard, "wandb": _wandb}
