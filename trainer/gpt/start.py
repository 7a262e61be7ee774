"""What a training begins with: its model's shape, weights and place, from nothing, a folder or a checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, Sequence

from trainer.gpt import checkpoint, engine, weights
from trainer.gpt.checkpoint import Checkpoint
from trainer.gpt.config import Config
from trainer.gpt.data import DataSet
from trainer.gpt.errors import RefusedError
from trainer.gpt.model import GPT, Shape, fill, first_weights
from trainer.gpt.ranks import Ranks

RESUME = "CLUSTERCTL_CHECKPOINT"  # set by clusterctl's agent for a run that goes on


@dataclass(frozen=True)
class Start:
    """``resumed``: with its optimizer and step. ``taken``: weights only. ``folder``: of Hugging Face."""

    shape: Shape
    resumed: Optional[Checkpoint] = None
    taken: Optional[Checkpoint] = None
    folder: Optional[Path] = None


def choose(config: Config, sets: Sequence[DataSet]) -> Start:
    """What to begin with.

    Raises:
        RefusedError: it is not there, or does not fit the data or the options.
    """
    vocabulary = sets[0].vocab_size
    resume = config.resume or os.environ.get(RESUME, "")
    if resume:
        found = checkpoint.find(Path(config.out, "latest") if resume == "latest" else Path(resume))
        _check_newest(found, Path(config.out))
        _check_block(found.state.shape, config, found.folder)
        _check_vocabulary(found, sets)
        return Start(found.state.shape, resumed=found)
    if checkpoint.read_pointer(Path(config.out), "latest"):
        raise RefusedError("--out %s has checkpoints already" % config.out, "--resume latest, or another --out")
    if config.init == "scratch":
        return Start(Shape(config.n_layer, config.n_head, config.n_embd, config.block_size, vocabulary))
    path = Path(config.init)
    if checkpoint.is_checkpoint(path):
        found = checkpoint.find(path)
        _check_block(found.state.shape, config, found.folder)
        _check_vocabulary(found, sets)
        return Start(found.state.shape, taken=found)
    if not path.is_dir():
        what = "--init %s: there is no such folder" % config.init
        raise RefusedError(what, "scratch, a folder with config.json and model.safetensors, or a checkpoint")
    shape = weights.read_shape(path)
    _check_block(shape, config, path)
    if vocabulary > shape.vocab_size:
        what = "%s has tokens up to %d, %s only %d" % (sets[0].folder, vocabulary, path, shape.vocab_size)
        raise RefusedError(what, "python -m trainer.gpt.prepare TEXT --vocabulary %s --out DIR" % path)
    return Start(Shape(shape.n_layer, shape.n_head, shape.n_embd, config.block_size, shape.vocab_size), folder=path)


def _check_newest(found: Checkpoint, out: Path) -> None:
    """A training that goes on from the middle would mix its checkpoints with those that came after it."""
    newest = checkpoint.read_pointer(out, "latest")
    if newest and found.folder.parent.resolve() == out.resolve() and int(newest[5:]) > found.state.step:
        what = "%s/%s is newer than %s" % (out, newest, found.folder)
        raise RefusedError(what, "--resume latest, or another --out for what begins at step %d" % found.state.step)


def _check_block(shape: Shape, config: Config, where: Path) -> None:
    if config.block_size > shape.block_size:
        what = "--block-size %d: %s has %d places" % (config.block_size, where, shape.block_size)
        raise RefusedError(what, "--block-size %d" % shape.block_size)


def _check_vocabulary(found: Checkpoint, sets: Sequence[DataSet]) -> None:
    state, first = found.state, sets[0]
    differs = state.vocabulary and first.digest and state.vocabulary != first.digest
    if differs or first.vocab_size > state.shape.vocab_size:
        what = "the vocabulary of %s is not that of %s" % (first.folder, found.folder)
        raise RefusedError(what, "python -m trainer.gpt.prepare TEXT --vocabulary %s --out DIR" % found.folder)


def make_model(start: Start, config: Config, ranks: Ranks, micro_steps: int) -> GPT:
    """The model with its first weights: fp32 on the device, or as the engine wants it, see ``engine.making``.

    A checkpoint's weights are loaded by the engine, which shards them.

    Raises:
        RefusedError: the weights, or DeepSpeed, are not there.
    """
    making, whole = engine.making(config, ranks, micro_steps)
    with making:
        model = GPT(start.shape, config.dropout, config.checkpointing)
    if start.folder:
        fill(model, weights.read(start.shape, start.folder), whole)
    elif not (start.resumed or start.taken):
        fill(model, first_weights(start.shape, config.seed, ranks.device), whole)
    return model
