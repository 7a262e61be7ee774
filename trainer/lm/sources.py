"""The data of a training: shards of tokens for pretraining, or conversations for fine-tuning.

Which of them ``--data`` names is visible: a folder with ``*.bin`` has shards, anything else has conversations.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from trainer.lm import data, finetune
from trainer.lm.batch import Layout, Source
from trainer.lm.checkpoint import MODEL
from trainer.lm.config import Config
from trainer.lm.data import DataSet, Samples
from trainer.lm.errors import RefusedError
from trainer.lm.families import CONFIG
from trainer.lm.finetune import FineTuningData


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation computes: ``batches`` batches of a source on all ranks. ``weight``: in the mean of all."""

    source: Source
    batches: int
    weight: float = 1.0

    def layout(self, rank: int, world: int, batch: int) -> Layout:
        """Return the layout with which step 0 has all batches, and up to one more for each rank."""
        return Layout(rank, world, -(-self.batches // world), batch)


@dataclass(frozen=True)
class Data:
    """Opened data.

    Attributes:
        train: the samples of the training.
        evaluated: by name; ``train`` are training samples, the others were held back.
        identity: of the data sets, independent of their folders, to compare them when a training is resumed.
        shards: the first data set of a pretraining, whose vocabulary the model must have.
        chats: the conversations of a fine-tuning.
        notes: lines for the log.
        padding: the share of the tokens of a pass.
        patches: of images, for each token; and of each image or tile, on average.
    """

    train: Source
    evaluated: Mapping[str, Evaluated]
    identity: List[Dict[str, Any]]
    shards: Optional[DataSet] = None
    chats: Optional[FineTuningData] = None
    notes: Sequence[str] = ()
    padding: float = 0.0
    patches: Tuple[float, float] = (0.0, 0.0)


def are_chats(named: Sequence[str]) -> bool:
    """Whether ``--data`` names conversations.

    Raises:
        RefusedError: it names both kinds, or a folder that does not exist.
    """
    kinds = {each: not any(_path(each).glob("*.bin")) for each in named if _path(each).exists()}
    missing = [each for each in named if each not in kinds]
    if missing:
        fix = "python -m trainer.lm.prepare TEXT --out DIR; or a file of conversations"
        raise RefusedError("--data %s: no such folder" % missing[0], fix)
    if len(set(kinds.values())) > 1:
        chats = next(each for each, is_chat in kinds.items() if is_chat)
        raise RefusedError(
            "--data names shards of tokens and conversations (%s)" % chats, "train on one kind at a time"
        )
    return all(kinds.values())


def _path(named: str) -> Path:
    return data.weighed(named)[0]


def model_folder(config: Config, init: Optional[Path], checkpoint: Optional[Path]) -> Path:
    """Return the folder with the tokenizer and the template of the model that is trained.

    Raises:
        RefusedError: there is none, so conversations cannot be read.
    """
    for folder in (init, checkpoint and checkpoint / MODEL, Path(config.model)):
        if folder and (folder / CONFIG).is_file():
            return folder
    what = "conversations need a model with tokenizer.json, but the weights start from %s" % config.init
    raise RefusedError(what, "--init FOLDER, the folder of a model; or --model FOLDER for new weights")


def open_shards(config: Config) -> Data:
    """Open the data of a pretraining.

    Raises:
        RefusedError: see ``data.open_sets`` and ``data.check_tokens``.
    """
    block, batches = config.block_size, config.eval_iters
    sets = data.open_sets(config.data, "train", block)
    data.check_tokens(sets)
    documents = config.separate_documents
    once = config.sampling == "without-replacement" or config.epochs > 0
    train = Samples(sets, block, config.seed, once, documents)
    evaluated = {"train": Evaluated(Samples(sets, block, config.seed + 1, documents=documents), batches)}
    held_back = data.with_split(config.data, "val")
    if held_back:
        opened = data.open_sets(held_back, "val", block)
        several = len(opened) > 1
        for each in opened:
            name = "val of %s" % each.folder.name if several else "val"
            evaluated[name] = Evaluated(
                Samples([each], block, config.seed + 1, documents=documents), batches, each.weight
            )
    notes = [train.described()] if once else []
    without = [each for each in config.data if each not in held_back]
    if without and config.eval_interval:
        rest = "evaluations use %s" % (", ".join(held_back) if held_back else "training data")
        notes.append("warning: %s: no val-*.bin, so it is not evaluated; %s" % (", ".join(without), rest))
    return Data(train, evaluated, data.identity(sets), shards=sets[0], notes=notes)


def open_chats(config: Config, model: Path) -> Data:
    """Open the data of a fine-tuning. One rank of each node fills the cache of tokens, the others wait for it.

    Raises:
        RefusedError: see ``finetune.open_data``.
    """
    if config.sampling == "with-replacement":
        what = "--sampling with-replacement: conversations are sampled without replacement"
        raise RefusedError(what, "--sampling auto")
    return of_chats(config, finetune.open_data(config.data, config.eval_data, reading_of(config, model)))


def reading_of(config: Config, model: Path) -> finetune.Reading:
    """Return how conversations are read. ``model``: the folder with tokenizer and template."""
    return finetune.Reading(
        model=model,
        block=config.block_size,
        cache=finetune.cache_folder(Path(config.out)),
        template=config.template,
        share=config.val,
        skips=config.skip_wrong,
        workers=config.workers,
    )


def of_chats(config: Config, found: FineTuningData) -> Data:
    """Return opened conversations, with or without images, as the data of a training."""
    train = found.packed(config.seed)
    evaluated = {}
    for name, source in found.evaluations().items():
        evaluated[name] = Evaluated(source, min(source.batches(config.batch_size), config.eval_iters))
    notes = [*found.notes, train.report()]
    return Data(train, evaluated, found.identity(), chats=found, notes=notes, padding=train.plan.padding())


def mean(evaluated: Mapping[str, Evaluated], losses: Mapping[str, float]) -> float:
    """Return the weighted mean of the losses of data that was held back, or of all if none was."""
    names = [name for name in losses if name != "train"] or list(losses)
    weights = {name: evaluated[name].weight for name in names}
    return sum(losses[name] * weights[name] for name in names) / sum(weights.values())
