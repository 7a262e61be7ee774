"""What a training starts from: its model's shape, weights and place, from nothing, a folder or a checkpoint.

A resumed training inherits the options of its checkpoint. What contradicts the checkpoint is refused; another global
batch or other data need ``--allow-changes``.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

from trainer.gpt import checkpoint, config, engine, tokens, weights
from trainer.gpt.checkpoint import Checkpoint
from trainer.gpt.config import MODELS, OWN, SIZES, Config, Given, option
from trainer.gpt.data import DataSet, identity
from trainer.gpt.errors import RefusedError
from trainer.gpt.model import GPT, Shape, fill, first_weights
from trainer.gpt.ranks import Ranks
from trainer.gpt.tokens import Tokens

RESUME = "CLUSTERCTL_CHECKPOINT"  # set by clusterctl's agent for a run that goes on


@dataclass(frozen=True)
class Source:
    """What a training starts from, by its name for people: nothing, a checkpoint, or a folder of Hugging Face.

    ``resumed``: with its optimizer and step. ``taken``: weights only. ``by_agent``: the agent of a run resumes it.
    """

    name: str = ""
    shape: Optional[Shape] = None
    resumed: Optional[Checkpoint] = None
    taken: Optional[Checkpoint] = None
    folder: Optional[Path] = None
    by_agent: bool = False


@dataclass(frozen=True)
class Start:
    """A source that fits the data. ``vocabulary``, its ``digest`` and ``data`` are those of the data."""

    shape: Shape
    resumed: Optional[Checkpoint] = None
    taken: Optional[Checkpoint] = None
    folder: Optional[Path] = None
    vocabulary: Optional[Tokens] = None
    digest: Optional[str] = None
    data: Optional[List[Dict[str, Any]]] = None


def find(given: Given) -> Source:
    """What a command line starts from.

    Raises:
        RefusedError: it does not exist.
    """
    out, init = Path(given.values.get("out", Config.out)), given.values.get("init", Config.init)
    resume = given.values.get("resume") or os.environ.get(RESUME, "")
    if resume:
        found = checkpoint.find(out / "latest" if resume == "latest" else Path(resume))
        by_agent = not given.values.get("resume")
        if not by_agent:  # an agent knows which ones have lost files
            _check_newest(found, out)
        return Source(str(found.folder), found.state.shape, resumed=found, by_agent=by_agent)
    if checkpoint.read_pointer(out, "latest"):
        raise RefusedError("--out %s has checkpoints already" % out, "--resume latest, or another --out")
    if init == "scratch":
        return Source()
    path = Path(init)
    if checkpoint.is_checkpoint(path):
        found = checkpoint.find(path)
        return Source(str(found.folder), found.state.shape, taken=found)
    if not path.is_dir():
        what = "--init %s: there is no such folder" % init
        raise RefusedError(what, "scratch, a folder with config.json and model.safetensors, or a checkpoint")
    return Source(str(path), weights.read_shape(path), folder=path)


def complete(given: Given, source: Source) -> Config:
    """All options: a resumed training inherits those of its checkpoint, every other one its shape at most.

    Raises:
        RefusedError: options that contradict the source, or each other.
    """
    shape = source.shape
    if shape is None:
        return config.complete(given)
    _check_sizes(given, shape, source.name)
    stored: Dict[str, Any] = {"block_size": shape.block_size}
    if source.resumed:
        said = source.resumed.state.config
        stored = {name: value for name, value in said.items() if name not in OWN}
        _check_init(given, said.get("init", Config.init), source.name)
        sizes = MODELS.get(str(said.get("model")))
        if sizes != (shape.n_layer, shape.n_head, shape.n_embd):  # a version that ignored --model beside --init
            stored["model"] = "custom"
    stored.update({name: getattr(shape, name) for name in SIZES})
    made = config.complete(given, stored, source.name)
    if made.block_size > shape.block_size:
        what = "--block-size %d: %s has %d places" % (made.block_size, source.name, shape.block_size)
        raise RefusedError(what, "--block-size %d" % shape.block_size)
    if source.resumed:
        _check_steps(made, source, source.resumed.state.step)
    return made


def keep_batch(made: Config, given: Given, source: Source, world: int) -> Config:
    """The same options, with as many samples in a step as the checkpoint had, on any number of ranks.

    Raises:
        RefusedError: the number changes, and ``--allow-changes`` is not given.
    """
    if not source.resumed:
        return made
    before = source.resumed.state.samples
    batch = made.batch_size
    if "global_batch" in given.values:
        made = replace(made, accumulation=given.values.get("accumulation", 1))
    elif "accumulation" in given.values:
        made = replace(made, global_batch=0)
    else:
        if before % (batch * world) and before % world == 0 and "batch_size" not in given.values:
            share = before // world
            batch = max(each for each in range(1, min(batch, share) + 1) if share % each == 0)
        if before % (batch * world) == 0:
            micro_steps = 1 if made.global_batch else before // (batch * world)
            evaluated = made.eval_iters * made.batch_size  # samples: as many as before
            if batch != made.batch_size and "eval_iters" not in given.values:
                made = replace(made, eval_iters=max(1, evaluated // batch))
            return replace(made, batch_size=batch, accumulation=micro_steps)
    if not made.allow_changes:
        each = made.batch_size * world
        after = made.global_batch or each * made.accumulation
        if after != before:
            what = "a step of %s has %d samples, and %s ranks x --batch-size %d make %s"
            made_of = "no whole number of micro-steps of it" if before % each else "%d with these options" % after
            fix = "another number of ranks or --batch-size" if before % each else "--global-batch %d" % before
            sizes = (source.name, before, world, made.batch_size, made_of)
            raise RefusedError(what % sizes, "%s; or --allow-changes" % fix)
    elif made.global_batch and not {"global_batch", "accumulation"} & set(given.values):
        micro_steps = max(1, round(made.global_batch / (made.batch_size * world)))
        made = replace(made, global_batch=0, accumulation=micro_steps)
    return made


def changes(made: Config, given: Given, source: Source) -> List[str]:
    """What a resumed training does differently from its checkpoint, a line for each option."""
    if not source.resumed:
        return []
    said = source.resumed.state.config
    lines = []
    for name, value in dataclasses.asdict(made).items():
        if name in OWN or name not in said or (list(value) if name == "data" else value) == said[name]:
            continue
        why = given.where(name) if name in given.values else "for as many samples as before"
        lines.append("%s: %s instead of %s (%s)" % (name, value, said[name], why))
    return lines


def choose(made: Config, source: Source, sets: Sequence[DataSet]) -> Start:
    """The source with this data.

    Raises:
        RefusedError: it does not fit the data.
    """
    first, told = sets[0], identity(sets)
    shape = source.shape
    found = source.resumed or source.taken
    if shape is None:
        shape = Shape(made.n_layer, made.n_head, made.n_embd, made.block_size, first.vocab_size)
    elif found:
        size = (found.state.data or [{}])[0].get("vocab_size", shape.vocab_size)
        _check_vocabulary(source.name, found.state.vocabulary, size, first)
    else:
        theirs = tokens.load(Path(source.name)) if first.digest or first.vocab_size != shape.vocab_size else None
        if theirs and theirs.size > shape.vocab_size:
            what = "%s: its vocabulary has %d tokens, the model %d" % (source.name, theirs.size, shape.vocab_size)
            raise RefusedError(what, "put the tokenizer.json of the model there")
        said = weights.read_digest(Path(source.name))
        digest, size = (theirs.digest, theirs.size) if theirs else (said, shape.vocab_size)
        _check_vocabulary(source.name, digest, size, first)
    if source.resumed:
        _check_data(made, source.name, source.resumed.state.data, told)
    elif source.folder:
        shape = replace(shape, block_size=made.block_size)
    return Start(shape, source.resumed, source.taken, source.folder, first.vocabulary, first.digest, told)


def _check_newest(found: Checkpoint, out: Path) -> None:
    """A training that goes on from the middle would mix its checkpoints with those that came after it."""
    newest = checkpoint.read_pointer(out, "latest")
    if newest and found.folder.parent.resolve() == out.resolve() and int(newest[5:]) > found.state.step:
        what = "%s/%s is newer than %s" % (out, newest, found.folder)
        raise RefusedError(what, "--resume latest, or another --out for what begins at step %d" % found.state.step)


def _check_sizes(given: Given, shape: Shape, name: str) -> None:
    """A model has the sizes that it has: others that are given are a mistake."""
    model = given.values.get("model", "custom")
    for at, size in enumerate(SIZES):
        has = getattr(shape, size)
        wanted = given.values.get(size, has)
        if wanted != has:
            what = "%s %s: %s has %d" % (given.where(size), wanted, name, has)
            raise RefusedError(what, "without %s, or --init scratch and another --out" % option(size))
        if model != "custom" and MODELS[model][at] != has:
            what = "%s %s has %s %d, %s has %d" % (given.where("model"), model, size, MODELS[model][at], name, has)
            raise RefusedError(what, "without --model, or --init scratch and another --out")


def _check_init(given: Given, before: str, name: str) -> None:
    init = given.values.get("init", before)
    if init != before and Path(init).resolve() != Path(before).resolve():
        what = "%s %s: %s started from %s" % (given.where("init"), init, name, before)
        raise RefusedError(what, "without --init; or without --resume and with another --out")


def _check_steps(made: Config, source: Source, step: int) -> None:
    """An agent may restart what had just finished; a person who resumes it wants more steps."""
    if made.max_iters > step or (made.max_iters == step and source.by_agent):
        return
    what = "--max-iters %d: %s is at step %d, so it is already done" % (made.max_iters, source.name, step)
    raise RefusedError(what, "--max-iters %d, or any number above %d" % (2 * step, step))


def _check_vocabulary(name: str, digest: Optional[str], size: int, data: DataSet) -> None:
    differs = digest != data.digest if digest and data.digest else size != data.vocab_size
    if not differs:
        return
    if digest:
        what = "the vocabulary of %s is not that of %s" % (data.folder, name)
        raise RefusedError(what, "python -m trainer.gpt.prepare TEXT --vocabulary %s --out DIR" % name)
    what = "the tokens of %s may mean something else in %s: %d and %d of them" % (
        data.folder,
        name,
        data.vocab_size,
        size,
    )
    raise RefusedError(what, "put the tokenizer.json of the model into %s" % name)


def _check_data(
    made: Config, name: str, before: Optional[List[Dict[str, Any]]], now: Sequence[Mapping[str, Any]]
) -> None:
    def what_counts(sets: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
        return [{key: value for key, value in each.items() if key != "folder"} for each in sets]

    if before is None or made.allow_changes or what_counts(before) == what_counts(now):
        return
    was, given = (
        ", ".join("%(folder)s (%(tokens)d tokens, share %(share)g)" % each for each in sets) for sets in (before, now)
    )
    what = "--data %s: %s was trained with %s" % (given, name, was)
    raise RefusedError(what, "--init %s with another --out for a new training; or --allow-changes" % name)


def make_model(start: Start, made: Config, ranks: Ranks, micro_steps: int) -> GPT:
    """The model with its first weights: fp32 on the device, or as the engine wants it, see ``engine.making``.

    A checkpoint's weights are loaded by the engine, which shards them.

    Raises:
        RefusedError: the weights, or DeepSpeed, are not there.
    """
    making, whole = engine.making(made, ranks, micro_steps)
    with making:
        model = GPT(start.shape, made.dropout, made.checkpointing)
    if start.folder:
        fill(model, weights.read(start.shape, start.folder), whole)
    elif not (start.resumed or start.taken):
        fill(model, first_weights(start.shape, made.seed, ranks.device), whole)
    return model
