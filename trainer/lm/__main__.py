"""Trains a language model. Read it from top to bottom: options, ranks, data, model, engine, loop.

    python -m trainer.lm --data DIR --out OUT
    torchrun --nproc-per-node 4 -m trainer.lm --data DIR --model gpt2-xl --batch-size 32

docs/training.md explains it step by step.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch

from trainer.lm import checkpoint, parts, ranks, sources, start
from trainer.lm.batch import IGNORED, Layout
from trainer.lm.checkpoint import Checkpoint, Folder, State
from trainer.lm.config import Config, accumulation
from trainer.lm.engine import Engine, make_engine
from trainer.lm.errors import FailedError, exit_with
from trainer.lm.feed import Feed
from trainer.lm.log import Figures, Log, Watch
from trainer.lm.model import evaluating, fastest_attention
from trainer.lm.options import read
from trainer.lm.profile import Profile
from trainer.lm.ranks import Ranks
from trainer.lm.saving import Copies, Pending, make_copies
from trainer.lm.sources import Data, Evaluated
from trainer.lm.start import Start


def main(argv: Optional[List[str]] = None, program: str = "trainer.lm") -> None:  # noqa: C901, PLR0912, PLR0915 - it reads from top to bottom
    """Run the program. ``program``: its name, one of ``options.WHAT``."""
    # Options
    options = read(argv, program)
    source = start.find(options)
    config = start.complete(options, source)
    signals = listen_for_signals(config.save)

    # Ranks
    group = ranks.join(config.device)
    device, world = group.device, group.world
    config = start.keep_batch(config, options, source, world)
    micro_steps = accumulation(config, world)
    torch.set_float32_matmul_precision("high")

    # Data
    layout = Layout(group.rank, world, micro_steps, config.batch_size)
    opened = start.open_data(config, source)
    config = start.with_epochs(config, opened, layout)

    # Model
    origin = start.choose(config, source, opened)
    folder = Folder(Path(config.out), group, config.keep)
    folder.prepare()
    log = Log(config, group.is_first)
    keeper = Keeper(config, group, folder, log)
    log.phase("loading")
    origin = start.with_base(origin, config, source)
    model = start.make_model(origin, config, group, micro_steps, log.say)

    # Engine
    watch = Watch(device)
    engine = make_engine(model, config, group, micro_steps, watch)
    step = 0
    if origin.taken:
        with origin.taken.reader() as reader:
            engine.load(reader, None)
    if origin.resumed:
        step = keeper.resume(origin.resumed)
        with origin.resumed.reader() as reader:
            engine.load(reader, origin.resumed.state.updates)
        if engine.scale.is_used:
            engine.scale.value = origin.resumed.state.scale
        log.say("resumed from %s at step %d" % (origin.resumed.folder, step))
        for line in start.changes(config, options, source):
            log.say("resume: %s" % line)
        if step == config.max_iters:
            log.say("resume: the training is already finished")
    for line in opened.notes:
        log.say(line)
    samples = layout.rows
    figures = Figures(config, origin.shape, samples * config.block_size, world, device, opened)
    log.say(
        "%.1f M parameters, %s on %d x %s, " % (origin.shape.parameters / 1e6, engine.name, world, device.type)
        + "%d samples of %d tokens per step " % (samples, config.block_size)
        + "(%d x %d ranks x %d micro-steps)" % (config.batch_size, world, micro_steps)
    )

    first_world = origin.first_world(world)
    for line in parts.described(model, config, first_world):
        log.say(line)
    scale = parts.scale(config, first_world)

    # A step's figures are read one step later, so that the GPU can start the next step in the meantime.
    def report_step(lap: Any, gathered: torch.Tensor, number: int, rate: float) -> int:
        lap.wait()  # the figures have arrived as well
        rows = gathered.tolist()
        figures.check(number, rows, engine.scale.is_used, keeper.newest)
        due = number % config.log_interval == 0 or number == config.max_iters
        if due:
            log.step(number, figures.of(lap, rows, rate))
        if all(row[3] for row in rows):
            keeper.finish()
        return int(max(row[2] for row in rows))  # the signal that some rank received

    # Loop
    keeper.prepare(step, engine)
    waiting: Optional[Any] = None
    stopped, why = 0, ""
    profile = Profile(config, group, log.say)
    log.phase("training")
    with fastest_attention(device), Feed(opened.train, layout, device, step) as feed:
        while step < config.max_iters and not why:
            rate = scale * learning_rate(config, step)
            if config.dropout or config.lora_dropout:  # a resumed training drops the same activations
                torch.manual_seed(((config.seed * 1_000_003 + step) * 65_537 + group.rank) % 2**64)
            watch.begin()
            loss = torch.zeros((), device=device)
            for number in range(micro_steps):
                loss += engine.micro_step(feed.batch(), number) / micro_steps
            keeper.wait_for_copies()
            norm = engine.step(rate)
            marks = (float(max(signals, default=0)), float(keeper.is_written))
            mine = torch.stack([loss, norm.to(loss), *(torch.full_like(loss, mark) for mark in marks)]).float()
            gathered = group.gather(mine).to("cpu", non_blocking=True)
            lap = watch.end()
            profile.step()
            step += 1

            is_last = step == config.max_iters
            evaluates = bool(config.eval_interval and opened.evaluated) and (
                step % config.eval_interval == 0 or is_last
            )
            saves = bool(config.save_interval) and step % config.save_interval == 0
            stopped = report_step(*waiting) if waiting else 0
            waiting = (lap, gathered, step, rate)
            if device.type != "cuda" or evaluates or saves or stopped or is_last:
                # Check the step's numbers first: a checkpoint must not contain NaN.
                stopped = report_step(*waiting) or stopped
                waiting = None
            if stopped == SAVE:
                log.say("step %d: saving on request" % step)
                while SAVE in signals:  # one at a time: a signal may arrive meanwhile
                    signals.remove(SAVE)
                stopped, saves = 0, True
            if stopped:
                why = signal.Signals(stopped).name
                break
            if evaluates:
                log.phase("evaluating")
                losses = evaluate(engine, opened, config.batch_size, group)
                mean = sources.mean(opened.evaluated, losses)
                log.evaluation(step, losses, mean)
                better = keeper.is_better(step, mean)
                saves = saves or better or (config.always_save and not config.save_interval)
                if keeper.stops_early:
                    why = "no lower loss in %d evaluations" % keeper.worse
            if saves:
                keeper.save(step, engine, origin)
            if saves or evaluates:
                log.phase("training")

    # End
    profile.end()
    log.phase("finishing")
    keeper.save(step, engine, origin, ends=True, is_final=not stopped)
    if keeper.failure:
        what = "the last checkpoint could not be saved: %s" % keeper.failure
        raise FailedError(what, "free disk space, then --resume latest")
    log.say("finished at step %d%s" % (step, ": %s" % why if why else ""))
    ranks.leave()


class Keeper:
    """Saves a training. ``failure`` is why the last save failed; ``worse`` counts evaluations since the lowest loss.

    ``lowest`` is the lowest loss of all evaluations, ``best`` the loss of the checkpoint that ``best`` names. They
    differ if a save failed or saving is off.
    """

    def __init__(self, config: Config, ranks: Ranks, folder: Folder, log: Log) -> None:
        self.best = self.lowest = math.inf
        self.worse = 0
        self.failure: Optional[str] = None
        self._config = config
        self._ranks = ranks
        self._log = log
        self._folder = folder
        self._saved = -1
        self._evaluated: Tuple[int, Optional[float]] = (-1, None)  # step and loss of the last evaluation
        self._is_async = config.save_async == "on" or (config.save_async == "auto" and ranks.device.type == "cuda")
        self._copies: Optional[Copies] = None
        self._pending: Optional[Pending] = None

    def resume(self, found: Checkpoint) -> int:
        """Take over the state of a checkpoint. Return its step."""
        state = found.state
        self.lowest = math.inf if state.best_loss is None else state.best_loss
        self.worse = state.worse
        if found.folder.parent.resolve() == Path(self._config.out).resolve():
            self._saved = state.step
            self.best = self._folder.resume(state.step)
        return state.step

    def is_better(self, step: int, loss: float) -> bool:
        """Record the loss of an evaluation. Return whether a checkpoint of this step would be the best."""
        self.finish()
        self.lowest, self.worse = min(self.lowest, loss), 0 if loss < self.lowest else self.worse + 1
        self._evaluated = (step, loss if math.isfinite(loss) else None)
        return loss < self.best

    @property
    def stops_early(self) -> bool:
        """Whether the loss has not improved for ``patience`` evaluations."""
        return 0 < self._config.patience <= self.worse

    def newest(self) -> Optional[str]:
        """Return the name of the newest checkpoint, after any save that has begun."""
        self.finish()
        return checkpoint.read_pointer(Path(self._config.out), "latest")

    def save(self, step: int, engine: Engine, start: Start, ends: bool = False, is_final: bool = False) -> None:
        """Save the state of all ranks unless it is saved already, and update ``best`` and ``final``.

        ``ends``: the training is over. Otherwise the save may continue during the next steps, until ``finish``.
        """
        if not self._config.save:
            return
        self.finish()
        if self._saved == step:
            if is_final:
                self.failure = self._folder.point("final", step) or self.failure
            return
        loss = self._evaluated[1] if self._evaluated[0] == step else None
        is_best = loss is not None and loss < self.best
        names = [name for name, holds in (("best", is_best), ("final", is_final)) if holds]
        self._log.phase("saving")
        began = time.monotonic()
        state = State(
            step=step,
            updates=engine.updates,
            shape=start.shape,
            best_loss=self.lowest if math.isfinite(self.lowest) else None,
            worse=self.worse,
            scale=engine.scale.value,
            world=self._ranks.world,
            engine=engine.name,
            vocabulary=start.digest,
            config=dataclasses.asdict(self._config),
            loss=loss,
            data=start.data,
            base=start.base.record if start.base else None,
            first_world=start.first_world(self._ranks.world),
        )
        saving = self._folder.begin(state, engine.pieces(), start.vocabulary, names, start.kept)
        if ends or self._copies is None:
            result: Future[Optional[str]] = Future()
            result.set_result(saving.write(engine.tensors()))
        else:
            self._copies.take(engine.tensors())
            result = self._copies.write(saving)
        self._pending = Pending(saving, loss, result, began, time.monotonic() - began, ends)
        if ends or self._copies is None:
            self.finish()

    def _prune(self, waits: bool) -> None:
        """Remove checkpoints that are not kept: large ones take seconds, which the training does not wait for."""
        if self._copies is None:
            self._folder.prune()
            return
        removed = self._copies.run(self._folder.prune)
        if waits:
            removed.result()

    def prepare(self, step: int, engine: Engine) -> None:
        """Prepare host memory for saves that continue during the next steps, if there will be any."""
        interval = self._config.save_interval or self._config.eval_interval
        if self._is_async and self._config.save and interval and step + interval < self._config.max_iters:
            self._copies = make_copies(engine.pieces(), self._ranks, self._log.say)

    def wait_for_copies(self) -> None:
        """Let the GPU finish copying what is being saved, before the next update of the weights."""
        if self._copies:
            self._copies.wait()

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its part of the save that has begun."""
        return self._pending is not None and self._pending.result.done()

    def finish(self) -> None:
        """Complete the save that has begun, if any: all ranks together."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        if not pending.result.done():
            self._log.phase("saving")
        step, waited = pending.saving.state.step, time.monotonic()
        self.failure = self._folder.finish(pending.saving, pending.result.result())
        if self.failure:
            kept = "earlier checkpoints are unchanged"
            self._log.say("step %d: not saved: %s; %s" % (step, self.failure, kept))
            return
        self._saved = step
        if pending.loss is not None:
            self.best = min(self.best, pending.loss)
        self._prune(pending.ends)
        now = time.monotonic()
        times = (now - pending.began, pending.stopped + now - waited)
        took = "took %.2fs, the training paused for %.2fs" % times
        self._log.say("step %d: saved %s/iter_%d (%s)" % (step, self._config.out, step, took))


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of the step after ``step`` steps: a linear warmup, then the ``schedule``.

    ``cosine`` and ``linear`` fall from the end of the warmup to ``decay_iters``. ``wsd`` (warmup, stable, decay; arXiv
    2404.06395) stays at the highest rate, and falls linearly over the last ``decay_share`` of these steps. A training
    can then be resumed from its stable part with more steps. ``--scale-lr`` and parts of a model multiply the result.
    """
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / config.warmup_iters
    if config.schedule == "constant":
        return config.learning_rate
    end = config.decay_iters or config.max_iters
    begin = config.warmup_iters
    if config.schedule == "wsd":
        begin = max(begin, end - round(config.decay_share * end))
    done = min(1.0, max(0, step - begin) / max(1, end - begin))
    left = 1 - done if config.schedule in ("linear", "wsd") else (1 + math.cos(math.pi * done)) / 2
    lowest = config.learning_rate / 10 if config.min_lr < 0 else config.min_lr
    return lowest + (config.learning_rate - lowest) * left


def mean_loss(engine: Engine, what: Evaluated, batch: int, ranks: Ranks) -> float:
    """Return the mean loss, in nats per target, of the first batches of a source.

    They do not depend on the number of ranks. Every rank calls the engine equally often, because ZeRO-3 gathers
    weights in every call. Surplus losses are discarded.
    """
    layout = what.layout(ranks.rank, ranks.world, batch)
    total = torch.zeros(2, dtype=torch.float64, device=ranks.device)  # losses and targets
    with evaluating(engine.model):
        for micro in range(layout.micro_steps):
            taken = what.source.batch(layout, 0, micro)
            loss = engine.evaluate(taken.to(ranks.device))
            if micro * ranks.world + ranks.rank < what.batches:
                targets = int((taken.targets != IGNORED).sum())
                total += torch.stack([loss.double() * taken.count, loss.new_tensor(targets).double()])
    losses, targets = ranks.gather(total).view(-1, 2).sum(0).tolist()
    return float(losses / max(1.0, targets))


def evaluate(engine: Engine, opened: Data, batch: int, ranks: Ranks) -> Dict[str, float]:
    """Return the mean loss of each source that is evaluated, by name."""
    return {name: mean_loss(engine, each, batch, ranks) for name, each in opened.evaluated.items()}


SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAVE = signal.SIGUSR2  # save a checkpoint and continue: below SIGTERM, which therefore takes precedence
FORCED = 3  # under torchrun Ctrl-C arrives twice: from the terminal and from torchrun


def listen_for_signals(saves: bool) -> List[int]:
    """Return a list to which each of these signals is appended. The third SIGINT exits without a checkpoint.

    A training that ``saves`` also listens for ``SAVE``. ``clusterctl save`` sends it only to processes that do; others
    ignore it.
    """
    received: List[int] = []

    def receive(number: int, _: Any) -> None:
        received.append(number)
        if number != signal.SIGINT:
            return
        if received.count(number) >= FORCED:
            os._exit(128 + number)
        if received.count(number) == 1 and os.environ.get("RANK", "0") == "0":
            # Not sys.stderr: the signal may have interrupted a write to it.
            os.write(2, b"SIGINT: saving after this step; press twice more to exit without a checkpoint\n")

    for each in SIGNALS:
        signal.signal(each, receive)
    signal.signal(SAVE, receive if saves else signal.SIG_IGN)
    return received


if __name__ == "__main__":
    exit_with(main)
