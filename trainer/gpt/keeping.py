"""When a training is saved, which checkpoint is the best, and when there is nothing more to gain."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Optional

from trainer.gpt import checkpoint
from trainer.gpt.checkpoint import Checkpoint, Folder, State
from trainer.gpt.config import Config
from trainer.gpt.engine import Engine
from trainer.gpt.log import Log
from trainer.gpt.model import Shape
from trainer.gpt.ranks import Ranks
from trainer.gpt.tokens import Tokens


class Keeper:
    """Saves a training. ``trouble`` is why the last attempt failed, ``worse`` counts evaluations since the best one."""

    def __init__(self, config: Config, ranks: Ranks, folder: Folder, log: Log) -> None:
        self.best = math.inf
        self.worse = 0
        self.trouble: Optional[str] = None
        self._config = config
        self._ranks = ranks
        self._log = log
        self._folder = folder
        self._saved = -1

    def resume(self, found: Checkpoint) -> int:
        """Go on from where a checkpoint was; its step."""
        state = found.state
        self.best = math.inf if state.best_loss is None else state.best_loss
        self.worse = state.worse
        self._saved = state.step if found.folder.parent.resolve() == Path(self._config.out).resolve() else -1
        return state.step

    def is_better(self, loss: float) -> bool:
        """Take the loss of an evaluation."""
        better = loss < self.best
        self.best, self.worse = min(self.best, loss), 0 if better else self.worse + 1
        return better

    @property
    def gives_up(self) -> bool:
        """Whether so many evaluations brought nothing that training on is no use."""
        return 0 < self._config.patience <= self.worse

    @property
    def last(self) -> Optional[str]:
        """The newest checkpoint's name."""
        return checkpoint.read_pointer(Path(self._config.out), "latest")

    def save(self, step: int, engine: Engine, shape: Shape, vocabulary: Optional[Tokens], *names: str) -> None:
        """Save all ranks' state unless it is saved already, and let ``names`` (best, final) name it."""
        if not self._config.save:
            return
        if self._saved != step:
            self._log.phase("saving")
            state = State(
                step=step,
                updates=engine.updates,
                shape=shape,
                best_loss=self.best if math.isfinite(self.best) else None,
                worse=self.worse,
                scale=engine.scale.value,
                world=self._ranks.world,
                engine=engine.name,
                vocabulary=vocabulary.digest if vocabulary else None,
                config=dataclasses.asdict(self._config),
            )
            self.trouble = self._folder.save(state, engine.pieces(), engine.tensors(), vocabulary)
            if self.trouble:
                kept = "the checkpoints before it are as they were"
                self._log.say("step %d: not saved: %s; %s" % (step, self.trouble, kept))
                return
            self._saved = step
            self._log.say("step %d: saved %s/iter_%d" % (step, self._config.out, step))
        for name in names:
            self.trouble = self._folder.point(name, step) or self.trouble
        self._folder.prune()
