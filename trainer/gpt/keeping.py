"""When a training is saved, which checkpoint is the best, and when there is nothing more to gain."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Optional, Tuple

from trainer.gpt import checkpoint
from trainer.gpt.checkpoint import Checkpoint, Folder, State
from trainer.gpt.config import Config
from trainer.gpt.engine import Engine
from trainer.gpt.log import Log
from trainer.gpt.ranks import Ranks
from trainer.gpt.start import Start


class Keeper:
    """Saves a training. ``trouble`` is why the last attempt failed, ``worse`` counts evaluations since the lowest loss.

    ``lowest`` is the lowest loss of all evaluations, ``best`` that of the checkpoint that ``best`` names: they differ
    where a save failed, or where nothing is saved.
    """

    def __init__(self, config: Config, ranks: Ranks, folder: Folder, log: Log) -> None:
        self.best = self.lowest = math.inf
        self.worse = 0
        self.trouble: Optional[str] = None
        self._config = config
        self._ranks = ranks
        self._log = log
        self._folder = folder
        self._saved = -1
        self._evaluated: Tuple[int, Optional[float]] = (-1, None)  # the step of the last evaluation, and its loss

    def resume(self, found: Checkpoint) -> int:
        """Continue from where a checkpoint was; its step."""
        state = found.state
        self.lowest = math.inf if state.best_loss is None else state.best_loss
        self.worse = state.worse
        if found.folder.parent.resolve() == Path(self._config.out).resolve():
            self._saved = state.step
            self.best = self._folder.resume(state.step)
        return state.step

    def is_better(self, step: int, loss: float) -> bool:
        """Take the loss of an evaluation; whether a checkpoint of this step would be the best one."""
        self.lowest, self.worse = min(self.lowest, loss), 0 if loss < self.lowest else self.worse + 1
        self._evaluated = (step, loss if math.isfinite(loss) else None)
        return loss < self.best

    @property
    def gives_up(self) -> bool:
        """Whether so many evaluations brought nothing that training on is no use."""
        return 0 < self._config.patience <= self.worse

    @property
    def last(self) -> Optional[str]:
        """The newest checkpoint's name."""
        return checkpoint.read_pointer(Path(self._config.out), "latest")

    def save(self, step: int, engine: Engine, start: Start, is_final: bool = False) -> None:
        """Save all ranks' state unless it is saved already; ``best`` and ``final`` name it where it is that."""
        if not self._config.save:
            return
        if self._saved == step:
            if is_final:
                self.trouble = self._folder.point("final", step) or self.trouble
            return
        loss = self._evaluated[1] if self._evaluated[0] == step else None
        is_best = loss is not None and loss < self.best
        names = [name for name, holds in (("best", is_best), ("final", is_final)) if holds]
        self._log.phase("saving")
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
        )
        self.trouble = self._folder.save(state, engine.pieces(), engine.tensors(), start.vocabulary, names)
        if self.trouble:
            kept = "the checkpoints before it are as they were"
            self._log.say("step %d: not saved: %s; %s" % (step, self.trouble, kept))
            return
        self._saved = step
        if loss is not None:
            self.best = min(self.best, loss)
        self._log.say("step %d: saved %s/iter_%d" % (step, self._config.out, step))
        self._folder.prune()
