"""The output of a training, from rank 0: lines on stdout and in ``train.log``, records for tools, trackers.

A step's line starts like nanoGPT's. An evaluation has its own:

    iter 20: loss 2.4519, time 81.20ms, mfu 41.20%, lr 3.0000e-04, norm 0.8123, tokens/s 50123, memory 12.3GB, …
    step 20: train loss 2.4410, val loss 2.4620, perplexity 11.73

``trainer_log.jsonl`` has the keys of LLaMA-Factory's file, which clusterctl's agent follows. A resumed training appends
to it: steps may repeat, and the last line of a step counts.

``Watch`` times the parts of a step. On GPUs it reads the GPU's clock later, when the step is over, so the GPU never
waits for it. ``Figures`` derives tokens/s and MFU, and checks that the numbers are finite.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch

from trainer.ds_config import ConfigError, find
from trainer.lm.config import Config, trained_parts
from trainer.lm.errors import FailedError, RefusedError
from trainer.lm.model import flops_per_token
from trainer.lm.shape import Shape
from trainer.lm.sources import Data
from trainer.vlm.model import flops_per_patch
from trainer.vlm.shape import VlmShape

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
        if figures["padding"]:
            parts.append("padding %.2f%%" % (100 * figures["padding"]))
        if figures["memory"] is not None:
            parts.append("memory %.1fGB" % (figures["memory"] / 1e9))
        parts += ["%s %.2fms" % (name, 1e3 * spent) for name, spent in seconds.items() if name != "step"]
        self.say("iter %d: %s" % (step, ", ".join(parts)))
        record = {"loss": figures["loss"], "lr": figures["lr"], "grad_norm": _finite(figures["norm"])}
        record = dict(record, tokens_per_second=figures["tokens"], mfu=figures["mfu"], memory=figures["memory"])
        if figures["padding"]:
            record["padding"] = round(figures["padding"], 4)
        record.update({"ms" if name == "step" else name + "_ms": 1e3 * spent for name, spent in seconds.items()})
        self._record(step, record)

    def evaluation(self, step: int, losses: Dict[str, float], mean: float) -> None:
        """Write the losses of an evaluation, by name, and their ``mean`` (without ``train`` if there are others)."""
        shown = ", ".join("%s loss %.4f" % each for each in losses.items())
        perplexity = math.exp(min(mean, 700.0))
        held_back = {name: loss for name, loss in losses.items() if name != "train"}
        several = ", mean loss %.4f" % mean if len(held_back) > 1 else ""
        self.say("step %d: %s%s, perplexity %.2f" % (step, shown, several, perplexity))
        record = {"eval_loss": mean, "perplexity": perplexity}
        if held_back and "train" in losses:
            record["train_loss"] = losses["train"]
        if len(held_back) > 1:
            record.update({"eval_%s_loss" % name.replace(" ", "_"): loss for name, loss in held_back.items()})
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


class Figures:
    """Converts the numbers of all ranks into figures for the log.

    ``tokens``: per step, on all ranks. ``data``: for its padding and its images.
    """

    def __init__(self, config: Config, shape: Shape, tokens: int, world: int, device: torch.device, data: Data) -> None:
        self._padding = data.padding
        self._config = config
        self._tokens = tokens
        self._device = device
        most = peak(device)
        trained = () if config.lora_rank else trained_parts(config.parts)
        frozen = "language" not in trained
        each = flops_per_token(shape, config.block_size, is_frozen=frozen)
        if isinstance(shape, VlmShape):
            patches, seen = data.patches
            each += patches * (1 - data.padding) * flops_per_patch(shape, seen, "vision" not in trained)
        self._whole = world * most / each if most else None  # tokens/s at MFU 1

    def of(self, lap: Lap, rows: List[List[float]], rate: float) -> Dict[str, Any]:
        """Return the figures of a step. Its rows begin with loss and gradient norm."""
        seconds = lap.read()
        speed = self._tokens / seconds["step"]
        memory = torch.cuda.max_memory_allocated() if self._device.type == "cuda" else None
        mfu = speed / self._whole if self._whole else None
        loss = sum(row[0] for row in rows) / len(rows)
        figures = {"loss": loss, "norm": rows[0][1], "lr": rate, "tokens": speed}
        return dict(figures, mfu=mfu, memory=memory, seconds=seconds, padding=self._padding)

    def check(
        self, step: int, rows: List[List[float]], may_overflow: bool, newest: Callable[[], Optional[str]]
    ) -> None:
        """Check for NaN and infinity. ``may_overflow``: fp16 gradients may be infinite, which skips the step.

        Raises:
            FailedError: a number is not finite; names the step, the rank and the ``newest`` checkpoint.
        """
        for rank, (loss, norm, *_) in enumerate(rows):
            what = "loss is %s" % loss if not math.isfinite(loss) else ""
            if not what and not math.isfinite(norm) and not may_overflow:
                what = "norm of the gradient is %s" % norm
            if not what:
                continue
            last = newest()
            lower = "--learning-rate %g" % (self._config.learning_rate / 2)
            kept = (
                "%s/%s is the last good checkpoint" % (self._config.out, last) if last else "no checkpoint exists yet"
            )
            fix = "--resume latest %s" % lower if last else "use a lower --learning-rate, such as %s" % lower
            raise FailedError("%s at step %d on rank %d; %s" % (what, step, rank, kept), fix)


PARTS = ("forward", "backward", "optimizer", "communication")


def peak(device: torch.device) -> Optional[float]:
    """Peak FLOP/s of a device for MFU, or None if it is unknown."""
    if device.type != "cuda":
        return None
    try:
        return find(torch.cuda.get_device_name(device)).tflops * 1e12
    except ConfigError:
        return None


class Lap:
    """The times of one step: ``wait`` until it is over, then ``read``."""

    def __init__(self, begin: Any) -> None:
        self.begin = begin
        self.end: Any = None
        self.parts: List[Tuple[str, Any, Any]] = []

    def wait(self) -> None:
        """Wait until the GPU has finished the step."""
        if not isinstance(self.begin, float):
            self.end.synchronize()

    def read(self) -> Dict[str, float]:
        """Return the seconds of the whole step and of each part, after the step."""
        found = {"step": _between(self.begin, self.end)}
        for name, begin, end in self.parts:
            found[name] = found.get(name, 0.0) + _between(begin, end)
        return found


def _between(begin: Any, end: Any) -> float:
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)


class Watch:
    """Times steps and their parts on one device."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._lap = Lap(self._now())

    def _now(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        """Start a step."""
        self._lap = Lap(self._now())

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of the step."""
        begin = self._now()
        yield
        self._lap.parts.append((name, begin, self._now()))

    def end(self) -> Lap:
        """End the step and return its times."""
        self._lap.end = self._now()
        return self._lap
