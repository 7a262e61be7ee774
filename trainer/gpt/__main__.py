"""Trains a GPT-2 model. Read it from top to bottom: options, ranks, data, model, engine, loop.

    python -m trainer.gpt --data DIR --out OUT
    torchrun --nproc-per-node 4 -m trainer.gpt --data DIR --model gpt2-xl --batch-size 32

docs/training.md explains it step by step.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, List, Optional

import torch

from trainer.gpt import checkpoint, data, engine, evaluate, ranks, start, stopping
from trainer.gpt.config import accumulation, read
from trainer.gpt.errors import FailedError, exit_with
from trainer.gpt.feed import Feed
from trainer.gpt.figures import Figures
from trainer.gpt.keeping import Keeper
from trainer.gpt.log import Log
from trainer.gpt.model import fastest_attention
from trainer.gpt.schedule import learning_rate
from trainer.gpt.timing import Watch


def main(argv: Optional[List[str]] = None) -> None:  # noqa: C901, PLR0912, PLR0915 - it reads from top to bottom
    """Run the program."""
    # Options
    given = read(argv)
    source = start.find(given)
    config = start.complete(given, source)
    asked = stopping.listen()

    # Ranks
    everyone = ranks.join(config.device)
    device, world = everyone.device, everyone.world
    config = start.keep_batch(config, given, source, world)
    micro_steps = accumulation(config, world)
    torch.set_float32_matmul_precision("high")

    # Data
    sets = data.open_sets(config.data, "train", config.block_size)
    data.check_tokens(sets)
    train = data.Samples(sets, config.block_size, config.seed)
    watched = {"train": data.Samples(sets, config.block_size, config.seed + 1)}
    held_back = data.with_split(config.data, "val")
    if held_back:
        opened = data.open_sets(held_back, "val", config.block_size)
        watched["val"] = data.Samples(opened, config.block_size, config.seed + 1)

    # Model
    begun = start.choose(config, source, sets)
    folder = checkpoint.Folder(Path(config.out), everyone, config.keep)
    folder.prepare()
    log = Log(config, everyone.is_first)
    keeper = Keeper(config, everyone, folder, log)
    log.phase("loading")
    model = start.make_model(begun, config, everyone, micro_steps)

    # Engine
    watch = Watch(device)
    motor = engine.make(model, config, everyone, micro_steps, watch)
    step = 0
    if begun.taken:
        with begun.taken.reader() as reader:
            motor.load(reader, None)
    if begun.resumed:
        step = keeper.resume(begun.resumed)
        with begun.resumed.reader() as reader:
            motor.load(reader, begun.resumed.state.updates)
        if motor.scale.is_used:
            motor.scale.value = begun.resumed.state.scale
        log.say("resumed from %s at step %d" % (begun.resumed.folder, step))
        for line in start.changes(config, given, source):
            log.say("resume: %s" % line)
        if step == config.max_iters:
            log.say("resume: the training is already finished")
    without = [each for each in config.data if each not in held_back]
    if without and config.eval_interval:
        rest = "evaluations use %s" % (", ".join(held_back) if held_back else "training data")
        log.say("warning: %s: no val-*.bin, so it is not evaluated; %s" % (", ".join(without), rest))
    samples = config.batch_size * world * micro_steps
    figures = Figures(config, begun.shape, samples * config.block_size, world, device)
    log.say(
        "%.1f M parameters, %s on %d x %s, " % (begun.shape.parameters / 1e6, motor.name, world, device.type)
        + "%d samples of %d tokens per step " % (samples, config.block_size)
        + "(%d x %d ranks x %d micro-steps)" % (config.batch_size, world, micro_steps)
    )

    # A step's figures are read one step later, so that the GPU can start the next step in the meantime.
    def is_asked_to_stop(lap: Any, gathered: torch.Tensor, number: int, rate: float) -> int:
        lap.wait()  # the figures have arrived as well
        rows = gathered.tolist()
        figures.check(number, rows, motor.scale.is_used, keeper.last)
        due = number % config.log_interval == 0 or number == config.max_iters
        if due:
            log.step(number, figures.of(lap, rows, rate))
        return int(max(row[2] for row in rows))  # the signal that some rank received

    # Loop
    waiting: Optional[Any] = None
    stopped, why = 0, ""
    log.phase("training")
    with fastest_attention(device), Feed(train, everyone, step, micro_steps, config.batch_size) as feed:
        while step < config.max_iters and not why:
            rate = learning_rate(config, step)
            if config.dropout:  # a resumed training drops the same activations
                torch.manual_seed(((config.seed * 1_000_003 + step) * 65_537 + everyone.rank) % 2**64)
            watch.begin()
            loss = torch.zeros((), device=device)
            for number in range(micro_steps):
                loss += motor.micro_step(*feed.take(), number) / micro_steps
            norm = motor.step(rate)
            stop = torch.full((), float(asked[0] if asked else 0), device=device)
            gathered = everyone.gather(torch.stack([loss, norm.to(loss), stop]).float()).to("cpu", non_blocking=True)
            lap = watch.end()
            step += 1

            is_last = step == config.max_iters
            evaluates = bool(config.eval_interval) and (step % config.eval_interval == 0 or is_last)
            saves = bool(config.save_interval) and step % config.save_interval == 0
            stopped = is_asked_to_stop(*waiting) if waiting else 0
            waiting = (lap, gathered, step, rate)
            if device.type != "cuda" or evaluates or saves or stopped or is_last:
                # Check the step's numbers first: a checkpoint must not contain NaN.
                stopped = is_asked_to_stop(*waiting) or stopped
                waiting = None
            if stopped:
                why = signal.Signals(stopped).name
                break
            if evaluates:
                log.phase("evaluating")
                losses = evaluate.losses(motor, watched, config.eval_iters, config.batch_size, everyone)
                log.evaluation(step, losses)
                better = keeper.is_better(step, list(losses.values())[-1])
                saves = saves or better or (config.always_save and not config.save_interval)
                if keeper.gives_up:
                    why = "no lower loss in %d evaluations" % keeper.worse
            if saves:
                keeper.save(step, motor, begun)
            if saves or evaluates:
                log.phase("training")

    # End
    log.phase("finishing")
    keeper.save(step, motor, begun, is_final=not stopped)
    if keeper.failure:
        what = "the last checkpoint could not be saved: %s" % keeper.failure
        raise FailedError(what, "free disk space, then --resume latest")
    log.say("finished at step %d%s" % (step, ": %s" % why if why else ""))
    ranks.leave()


if __name__ == "__main__":
    exit_with(main)
