"""What a training starts from: shape and weights of its model, and its step, from nothing, a folder or a checkpoint.

A resumed training inherits the options of its checkpoint. Options that contradict the checkpoint are refused. A
different global batch or other data need ``--allow-changes``.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import torch

from trainer.lm import checkpoint, engine, families, finetune, fp8, lora, parts, sources, tokens, weights
from trainer.lm.batch import Layout
from trainer.lm.checkpoint import Checkpoint
from trainer.lm.config import OWN, SIZES, Config
from trainer.lm.data import DataSet
from trainer.lm.errors import RefusedError
from trainer.lm.model import Decoder, fill, first_weights
from trainer.lm.options import UserOptions, merge, option
from trainer.lm.ranks import Ranks
from trainer.lm.shape import Shape
from trainer.lm.sources import Data
from trainer.lm.tokens import Tokens
from trainer.vlm import data as pictures
from trainer.vlm.compose import Composed, compose
from trainer.vlm.processing import of_shape
from trainer.vlm.shape import VlmShape

RESUME = "CLUSTERCTL_CHECKPOINT"  # set by clusterctl's agent for a resumed run


@dataclass(frozen=True)
class Source:
    """What the options name as the start: nothing, a checkpoint, or a Hugging Face folder. ``name`` is for messages.

    ``composed``: the folder's language model and a vision tower, as one model.

    ``resumed``: with its optimizer and step. ``taken``: weights only. ``by_agent``: a run's agent resumes it.
    """

    name: str = ""
    shape: Optional[Shape] = None
    resumed: Optional[Checkpoint] = None
    taken: Optional[Checkpoint] = None
    folder: Optional[Path] = None
    by_agent: bool = False
    composed: Optional[Composed] = None


@dataclass(frozen=True)
class Start:
    """A source that matches the data. ``vocabulary``, ``digest`` and ``data`` are those of the data.

    ``kept``: small files of the model, which checkpoints keep for the export. ``base``: the model to train adapters of.
    """

    shape: Shape
    resumed: Optional[Checkpoint] = None
    taken: Optional[Checkpoint] = None
    folder: Optional[Path] = None
    vocabulary: Optional[Tokens] = None
    digest: Optional[str] = None
    data: Optional[List[Dict[str, Any]]] = None
    kept: Mapping[str, bytes] = field(default_factory=dict)
    base: Optional[lora.Base] = None
    composed: Optional[Composed] = None

    def first_world(self, world: int) -> int:
        """Return the number of ranks on which the training started, now that it runs on ``world``."""
        if not self.resumed:
            return world
        return self.resumed.state.first_world or self.resumed.state.world


def find(options: UserOptions) -> Source:
    """Find the source that a command line names.

    Raises:
        RefusedError: it does not exist.
    """

    def value(name: str) -> Any:
        return options.values.get(name, getattr(Config, name))

    out, init = Path(value("out")), value("init")
    resume = options.values.get("resume") or os.environ.get(RESUME, "")
    if resume:
        found = checkpoint.find(out / "latest" if resume == "latest" else Path(resume))
        by_agent = not options.values.get("resume")
        if not by_agent:  # the agent knows which checkpoints lack files
            _check_newest(found, out)
        return Source(str(found.folder), found.state.shape, resumed=found, by_agent=by_agent)
    if checkpoint.read_pointer(out, "latest"):
        raise RefusedError("--out %s already contains checkpoints" % out, "use --resume latest, or another --out")
    if init == "scratch":
        return Source()
    path = Path(init)
    if checkpoint.is_checkpoint(path):
        found = checkpoint.find(path)
        return Source(str(found.folder), found.state.shape, taken=found)
    if not path.is_dir():
        what = "--init %s: no such folder" % init
        raise RefusedError(what, "use scratch, a folder with config.json and model.safetensors, or a checkpoint")
    if value("vision"):
        composed = compose(Path(value("vision")), path, value("image_token"), value("max_tiles"))
        return Source(str(path), composed.shape, folder=path, composed=composed)
    return Source(str(path), families.read_shape(path), folder=path)


def complete(options: UserOptions, source: Source) -> Config:
    """Return all options. A resumed training inherits its checkpoint's, any other at most its source's shape.

    Raises:
        RefusedError: options that contradict the source, or each other.
    """
    shape = source.shape
    if shape is None:
        return _of_new_model(options)
    _check_sizes(options, shape, source.name)
    positions = shape.block_size
    stored: Dict[str, Any] = {"block_size": positions if shape.is_gpt2 else min(positions, Config.block_size)}
    if source.resumed:
        config_before = source.resumed.state.config
        stored = {name: value for name, value in config_before.items() if name not in OWN}
        if "max_iters" in options.values:
            stored.pop("epochs", None)
        if not source.resumed.state.base:  # a base is recognised by its digest, in any folder
            _check_init(options, config_before.get("init", Config.init), source.name)
        before = families.PUBLISHED.get(str(config_before.get("model")))
        if before and any(getattr(before, name) != getattr(shape, name) for name in SIZES):
            stored["model"] = "custom"  # an earlier version ignored --model with --init
        elif before is None:
            stored["model"] = "custom"  # the folder of config.json need not exist any more
    stored.update({name: getattr(shape, name) for name in SIZES})
    merged = merge(options, stored, source.name)
    if source.resumed:
        _check_same(merged, source.resumed.state.config, source.name)
    _check_block(merged, shape, source.name)
    if source.resumed and "epochs" not in options.values:
        _check_steps(merged, source, source.resumed.state.step)
    return merged


def _of_new_model(options: UserOptions) -> Config:
    """Return the options of a model with new weights. A GPT-2 gets as many positions as a block has."""
    model = str(options.values.get("model", Config.model))
    shape = families.named(model)
    if shape is None or shape.is_gpt2:
        return merge(options)
    merged = merge(options, {"block_size": min(shape.block_size, Config.block_size)}, model)
    _check_block(merged, shape, model)
    return merged


def _check_block(config: Config, shape: Shape, name: str) -> None:
    if config.block_size > shape.block_size:
        what = "--block-size %d: %s has %d positions" % (config.block_size, name, shape.block_size)
        raise RefusedError(what, "--block-size %d" % shape.block_size)


def keep_batch(config: Config, options: UserOptions, source: Source, world: int) -> Config:
    """Return the options with as many samples per step as the checkpoint had, on any number of ranks.

    Raises:
        RefusedError: the number changes, and ``--allow-changes`` is not given.
    """
    if not source.resumed:
        return config
    before = source.resumed.state.samples
    batch = config.batch_size
    if "global_batch" in options.values:
        config = replace(config, accumulation=options.values.get("accumulation", 1))
    elif "accumulation" in options.values:
        config = replace(config, global_batch=0)
    else:
        if before % (batch * world) and before % world == 0 and "batch_size" not in options.values:
            share = before // world
            batch = max(each for each in range(1, min(batch, share) + 1) if share % each == 0)
        if before % (batch * world) == 0:
            micro_steps = 1 if config.global_batch else before // (batch * world)
            evaluated = config.eval_iters * config.batch_size  # samples: as many as before
            if batch != config.batch_size and "eval_iters" not in options.values:
                config = replace(config, eval_iters=max(1, evaluated // batch))
            return replace(config, batch_size=batch, accumulation=micro_steps)
    if not config.allow_changes:
        each = config.batch_size * world
        after = config.global_batch or each * config.accumulation
        if after != before:
            what = "a step of %s has %d samples, but %s ranks x --batch-size %d give %s"
            result = "no whole number of micro-steps of that size" if before % each else "%d with these options" % after
            fix = "use another number of ranks or --batch-size" if before % each else "--global-batch %d" % before
            sizes = (source.name, before, world, config.batch_size, result)
            raise RefusedError(what % sizes, "%s; or --allow-changes" % fix)
    elif config.global_batch and not {"global_batch", "accumulation"} & set(options.values):
        micro_steps = max(1, round(config.global_batch / (config.batch_size * world)))
        config = replace(config, global_batch=0, accumulation=micro_steps)
    return config


def tokenizer_of(config: Config, source: Source) -> Path:
    """Return the folder with the tokenizer and the template of the model.

    Raises:
        RefusedError: there is none.
    """
    found = source.resumed or source.taken
    return sources.model_folder(config, source.folder, found.folder if found else None)


def open_data(config: Config, source: Source) -> Data:
    """Open the data: shards of tokens, or conversations, with images for a model that sees them.

    Raises:
        RefusedError: the data or the model's tokenizer cannot be read, or do not match.
    """
    shape = source.shape or families.named(config.model)
    if not isinstance(shape, VlmShape):
        _check_blind(config)
        if sources.are_chats(config.data):
            return sources.open_chats(config, tokenizer_of(config, source))
        return sources.open_shards(config)
    if not sources.are_chats(config.data):
        what = "--data %s: a vision-language model trains on conversations, not on shards" % config.data[0]
        raise RefusedError(what, "see docs/vision.md for the formats of data")
    model = tokenizer_of(config, source)
    if source.composed:
        processing = source.composed.processing
    else:
        processing = of_shape(shape, model, config.max_pixels, config.max_tiles)
    return pictures.open_pictures(config, model, processing)


def _check_blind(config: Config) -> None:
    """Refuse options for images with a model that sees none."""
    for name in ("image_folder", "max_pixels", "patches", "check_images", "image_threads"):
        if getattr(config, name) != getattr(Config, name):
            what = "%s %s: the model does not see images" % (option(name), getattr(config, name))
            raise RefusedError(what, "remove %s, or --init a vision-language model" % option(name))


def with_epochs(config: Config, opened: Data, layout: Layout) -> Config:
    """Return the options with the steps of ``epochs`` passes over the data.

    Raises:
        RefusedError: the warmup is longer.
    """
    if not config.epochs:
        return config
    found = max(1, opened.train.steps(config.epochs, layout.rows))
    if config.warmup_iters > found:
        what = "--warmup-iters %d: %d epochs have %d steps" % (config.warmup_iters, config.epochs, found)
        raise RefusedError(what, "--warmup-iters %d, or more --epochs" % (found // 10))
    return replace(config, max_iters=found)


def changes(config: Config, options: UserOptions, source: Source) -> List[str]:
    """Return how a resumed training differs from its checkpoint, a line for each option."""
    if not source.resumed:
        return []
    before = source.resumed.state.config
    lines = []
    for name, value in dataclasses.asdict(config).items():
        if name in OWN or name not in before or (list(value) if name == "data" else value) == before[name]:
            continue
        why = options.where(name) if name in options.values else "for as many samples as before"
        lines.append("%s: %s instead of %s (%s)" % (name, value, before[name], why))
    return lines


def choose(config: Config, source: Source, opened: Data) -> Start:
    """Combine the source with the data.

    Raises:
        RefusedError: they do not match.
    """
    found = source.resumed or source.taken
    if source.composed:
        kept: Mapping[str, bytes] = source.composed.kept()
    else:
        kept = found.kept() if found else weights.read_kept(source.folder) if source.folder else {}
    if opened.shards:
        return _with_shards(config, source, opened.shards, opened.identity, kept)
    assert opened.chats
    if source.resumed:
        _check_data(config, source.name, source.resumed.state.data, opened.identity)
    named = families.named(config.model)
    folder = tokenizer_of(config, source)
    shape = source.shape or named
    assert shape  # the folder has a config.json
    kept = kept or weights.read_kept(folder)
    finetune.check_vocabulary(opened.chats, shape.vocab_size, folder)
    start = Start(shape, source.resumed, source.taken, source.folder, None, None, opened.identity, kept)
    return replace(start, composed=source.composed)


def _with_shards(
    config: Config,
    source: Source,
    first: DataSet,
    identities: List[Dict[str, Any]],
    kept: Mapping[str, bytes],
) -> Start:
    shape = source.shape
    found = source.resumed or source.taken
    if shape is None:
        named = families.named(config.model)
        if named and not named.is_gpt2:
            shape = replace(named, vocab_size=first.vocab_size)
        else:
            shape = Shape(config.n_layer, config.n_head, config.n_embd, config.block_size, first.vocab_size)
    elif found:
        size = (found.state.data or [{}])[0].get("vocab_size", shape.vocab_size)
        _check_vocabulary(source.name, found.state.vocabulary, size, first)
    else:
        theirs = tokens.load(Path(source.name)) if first.digest or first.vocab_size != shape.vocab_size else None
        if theirs and theirs.size > shape.vocab_size:
            what = "%s: its vocabulary has %d tokens, the model only %d" % (source.name, theirs.size, shape.vocab_size)
            raise RefusedError(what, "copy the tokenizer.json of the model there")
        stored = weights.read_digest(Path(source.name))
        digest, size = (theirs.digest, theirs.size) if theirs else (stored, shape.vocab_size)
        _check_vocabulary(source.name, digest, size, first)
    if source.resumed:
        _check_data(config, source.name, source.resumed.state.data, identities)
    elif source.folder and shape.is_gpt2:  # its positions are weights
        shape = replace(shape, block_size=config.block_size)
    return Start(shape, source.resumed, source.taken, source.folder, first.vocabulary, first.digest, identities, kept)


def _check_newest(found: Checkpoint, out: Path) -> None:
    """Refuse to resume behind the newest checkpoint: the new checkpoints would mix with the later ones."""
    newest = checkpoint.read_pointer(out, "latest")
    if newest and found.folder.parent.resolve() == out.resolve() and int(newest[5:]) > found.state.step:
        what = "%s/%s is newer than %s" % (out, newest, found.folder)
        raise RefusedError(what, "use --resume latest, or another --out to continue from step %d" % found.state.step)


def _check_sizes(options: UserOptions, shape: Shape, name: str) -> None:
    """Refuse sizes that differ from the model's."""
    model = options.values.get("model", "custom")
    named = families.named(model)
    for size in SIZES:
        has = getattr(shape, size)
        wanted = options.values.get(size, has)
        if wanted != has:
            what = "%s %s: %s has %d" % (options.where(size), wanted, name, has)
            raise RefusedError(what, "remove %s, or use --init scratch and another --out" % option(size))
        if named and getattr(named, size) != has:
            what = "%s %s has %s %d, %s has %d"
            what %= (options.where("model"), model, size, getattr(named, size), name, has)
            raise RefusedError(what, "remove --model, or use --init scratch and another --out")


def _check_init(options: UserOptions, before: str, name: str) -> None:
    init = options.values.get("init", before)
    if init != before and Path(init).resolve() != Path(before).resolve():
        what = "%s %s: %s started from %s" % (options.where("init"), init, name, before)
        raise RefusedError(what, "remove --init; or remove --resume and use another --out")


_FIXED = ("parts", "lora_rank", "lora_alpha", "lora_targets", "lora_rslora", "quantize")


def _check_same(config: Config, before: Mapping[str, Any], name: str) -> None:
    """Refuse options that would change what the tensors of a checkpoint mean."""
    for each in _FIXED:
        was, now = before.get(each, getattr(Config, each)), getattr(config, each)
        if was != now:
            what = "%s %s: %s has %s" % (option(each), now, name, was)
            raise RefusedError(what, "remove %s; or use --init with another --out" % option(each))
    was = before.get("optimizer", Config.optimizer)
    if was != config.optimizer and "muon" in (was, config.optimizer):
        what = "--optimizer %s: %s has the averages of %s" % (config.optimizer, name, was)
        raise RefusedError(what, "--optimizer %s; or --init %s with another --out" % (was, name))


def _check_steps(config: Config, source: Source, step: int) -> None:
    """Refuse a finished training, unless the agent restarts it: a user who resumes it wants more steps."""
    if config.max_iters > step or (config.max_iters == step and source.by_agent):
        return
    what = "--max-iters %d: %s is at step %d, so the training is already finished" % (
        config.max_iters,
        source.name,
        step,
    )
    raise RefusedError(what, "use --max-iters %d, or any number above %d" % (2 * step, step))


def _check_vocabulary(name: str, digest: Optional[str], size: int, data: DataSet) -> None:
    differs = digest != data.digest if digest and data.digest else size != data.vocab_size
    if not differs:
        return
    if digest:
        what = "the vocabularies of %s and %s differ" % (data.folder, name)
        raise RefusedError(what, "python -m trainer.lm.prepare TEXT --vocabulary %s --out DIR" % name)
    what = "the vocabularies of %s and %s may differ: they have %d and %d tokens" % (
        data.folder,
        name,
        data.vocab_size,
        size,
    )
    raise RefusedError(what, "copy the tokenizer.json of the model into %s" % name)


def _shown(each: Mapping[str, Any]) -> str:
    """Show a data set's identity: of shards, or of conversations."""
    if "samples" in each:
        return "%(name)s (%(samples)d samples, weight %(weight)g)" % each
    return "%(folder)s (%(tokens)d tokens, share %(share)g)" % each


def _check_data(
    config: Config, name: str, before: Optional[List[Dict[str, Any]]], now: Sequence[Mapping[str, Any]]
) -> None:
    def without_folders(sets: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
        return [{key: value for key, value in each.items() if key != "folder"} for each in sets]

    if before is None or config.allow_changes or without_folders(before) == without_folders(now):
        return
    data_before, data_now = (", ".join(map(_shown, sets)) for sets in (before, now))
    what = "--data %s: %s was trained with %s" % (data_now, name, data_before)
    raise RefusedError(what, "use --init %s with another --out for a new training; or --allow-changes" % name)


def with_base(start: Start, config: Config, source: Source) -> Start:
    """Return the start with the model to train adapters of, if adapters are configured.

    Raises:
        RefusedError: it does not exist, or is not the one that a resumed training started from.
    """
    if source.taken and source.taken.state.base:
        lora.find_base(source.taken.folder)  # refuses it
    if not config.lora_rank:
        return start
    named = Path(config.init)
    resumed, there = source.resumed, named if named.exists() else None
    base = lora.base_of(resumed, there) if resumed else lora.find_base(named)
    return replace(start, base=base, taken=None, folder=None)


def make_model(
    start: Start, config: Config, ranks: Ranks, micro_steps: int, say: Callable[[str], None] = lambda _: None
) -> Decoder:
    """Create the model with its initial weights: fp32 on the device, or as the engine needs it.

    The engine loads the weights of a checkpoint. ``say`` gets lines about LoRA and fp8.

    Raises:
        RefusedError: the weights or DeepSpeed are missing, or the model lacks a configured part.
    """
    dtype = engine.dtype_for(config, ranks.device)
    how = engine.creation(config, ranks, micro_steps)
    if start.base:
        shard = how.shard if config.engine == "fsdp" else None
        model = lora.make_model(start.shape, start.base, config, ranks.device, dtype, shard, how.put)
        say(lora.described(model, config))
        return model
    with how.context:
        model = start.shape.make(config.dropout, config.checkpointing)
    parts.freeze(model, config, dtype)
    if config.fp8 != "off":
        for choice in convert(model, config, ranks):
            say(fp8.described(choice))
    how.shard(model)
    if start.composed:
        fill(model, start.composed.weights(config.seed, ranks.device), how.put)
    elif start.folder:
        fill(model, weights.read(start.shape, start.folder), how.put)
    elif not (start.resumed or start.taken):
        fill(model, first_weights(start.shape, config.seed, ranks.device), how.put)
    return model


def convert(model: Decoder, config: Config, ranks: Ranks) -> List[fp8.Choice]:
    """Convert the matrices to fp8 that are faster in it. Return what was measured.

    Raises:
        RefusedError: fp8 is not possible here.
    """
    fp8.check(ranks.device)
    if engine.dtype_for(config, ranks.device) != torch.bfloat16:
        raise RefusedError("--fp8 %s needs --dtype bfloat16" % config.fp8, "--dtype bfloat16, or --fp8 off")

    def agree(times: Sequence[float]) -> List[float]:  # all ranks must choose alike
        rows = ranks.gather(torch.tensor(times, dtype=torch.float64, device=ranks.device))
        return [float(time) for time in rows.max(dim=0).values.tolist()]

    return fp8.convert(model, config.fp8, config.batch_size * config.block_size, ranks.device, agree)
