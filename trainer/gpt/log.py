"""The output of a training, from rank 0: lines on stdout and in ``train.log``, records for tools, trackers.

A step's line starts like nanoGPT's. An evaluation has its own:

    iter 20: loss 2.4519, time 81.20ms, mfu 41.20%, lr 3.0000e-04, norm 0.8123, tokens/s 50123, memory 12.3GB, …
    step 20: train loss 2.4410, val loss 2.4620, perplexity 11.73

``trainer_log.jsonl`` has the keys of LLaMA-Factory's file, which clusterctl's agent follows. A resumed training appends
to it: steps may repeat, and the last line of a step counts.
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
    """The output of a training. Only the first rank writes."""

    def __init__(self, config: Config, writes: bool) -> None:
        self._out = Path(config.out)
        self._writes = writes
        self._total = config.max_iters
        self._began = time.monotonic()
        self._first: Optional[int] = None
        self._phases = "CLUSTERCTL_RUN" in os.environ
        chosen = trackers(config.trackers)  # all ranks refuse alike
        self._track = [_TRACK[name](config) for name in chosen] if writes else []

    def say(self, text: str) -> None:
        """Write a line."""
        if not self._writes:
            return
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        self._append(LINES, text)

    def phase(self, name: str) -> None:
        """Print the current phase, so that clusterctl's agent can tell a long evaluation from a hang."""
        if self._phases and self._writes:
            sys.stdout.write("clusterctl: phase %s\n" % name)
            sys.stdout.flush()

    def step(self, step: int, figures: Dict[str, Any]) -> None:
        """Write a step's ``figures``: loss, lr, norm, tokens, mfu, memory, and seconds of ``PARTS``."""
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
        record = dict(record, tokens_per_second=figures["tokens"], mfu=figures["mfu"], memory=figures["memory"])
        record.update({"ms" if name == "step" else name + "_ms": 1e3 * spent for name, spent in seconds.items()})
        self._record(step, record)

    def evaluation(self, step: int, losses: Dict[str, float]) -> None:
        """Write the losses of an evaluation, by split."""
        shown = ", ".join("%s loss %.4f" % each for each in losses.items())
        last = list(losses.values())[-1]
        perplexity = math.exp(min(last, 700.0))
        self.say("step %d: %s, perplexity %.2f" % (step, shown, perplexity))
        record = {"eval_loss": last, "perplexity": perplexity}
        if len(losses) > 1:
            record["train_loss"] = losses["train"]
        self._record(step, record)

    def _record(self, step: int, fields: Dict[str, Any]) -> None:
        if not self._writes:
            return
        spent = time.monotonic() - self._began
        self._first = step if self._first is None else self._first
        left = spent / max(1, step - self._first + 1) * (self._total - step)
        progress = {"current_steps": step, "total_steps": self._total, "percentage": round(100 * step / self._total, 2)}
        clock = {"elapsed_time": _clock(spent), "remaining_time": _clock(left)}
        self._append(RECORDS, json.dumps(dict(progress, **fields, **clock)))
        numbers = {name: value for name, value in fields.items() if isinstance(value, (int, float))}
        for track in self._track:
            track(step, numbers)

    def _append(self, name: str, text: str) -> None:
        try:
            with (self._out / name).open("a", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:  # a full disk does not stop the training
            sys.stderr.write("%s: %s\n" % (self._out / name, error.strerror))


def _finite(value: float) -> Optional[float]:
    """Return the value, or None if it is not finite: JSON has no infinity, and fp16 gradients may overflow."""
    return value if math.isfinite(value) else None


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return "%d:%02d:%02d" % (whole // 3600, whole // 60 % 60, whole % 60)


def trackers(option: str) -> list[str]:
    """Return the trackers to use.

    Raises:
        RefusedError: a tracker is unknown or not installed.
    """
    names = [] if option == "none" else list(TRACKERS) if option == "auto" else option.split(",")
    found = []
    for name in names:
        if name not in TRACKERS:
            raise RefusedError("--trackers %s: unknown tracker %s" % (option, name), "tensorboard,wandb, none or auto")
        if importlib.util.find_spec(TRACKERS[name]) is not None:
            found.append(name)
        elif option != "auto":
            raise RefusedError("--trackers %s: %s is not installed" % (option, name), "--trackers auto")
    return found


def _tensorboard(config: Config) -> Track:
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - the import takes a second

    writer = SummaryWriter(str(Path(config.out) / "tensorboard"))

    def track(step: int, numbers: Dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return track


def _wandb(config: Config) -> Track:
    import dataclasses  # noqa: PLC0415

    import wandb  # noqa: PLC0415 - the import takes a second

    run = wandb.init(project="gpt", dir=config.out, mode="offline", config=dataclasses.asdict(config))

    def track(step: int, numbers: Dict[str, float]) -> None:
        run.log(numbers, step=step)

    return track


_TRACK = {"tensorboard": _tensorboard, "wandb": _wandb}
