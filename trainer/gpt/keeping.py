"""Decides when to save, which checkpoint is the best, and when to stop early."""

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
        self.lowest, self.worse = min(self.lowest, loss), 0 if loss < self.lowest else self.worse + 1
        self._evaluated = (step, loss if math.isfinite(loss) else None)
        return loss < self.best

    @property
    def gives_up(self) -> bool:
        """Whether the loss has not improved for ``patience`` evaluations."""
        return 0 < self._config.patience <= self.worse

    @property
    def last(self) -> Optional[str]:
        """The name of the newest checkpoint."""
        return checkpoint.read_pointer(Path(self._config.out), "latest")

    def save(self, step: int, engine: Engine, start: Start, is_final: bool = False) -> None:
        """Save the state of all ranks unless it is saved already, and update ``best`` and ``final``."""
        if not self._config.save:
            return
        if self._saved == step:
            if is_final:
                self.failure = self._folder.point("final", step) or self.failure
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
        self.failure = self._folder.save(state, engine.pieces(), engine.tensors(), start.vocabulary, names)
        if self.failure:
            kept = "earlier checkpoints are unchanged"
            self._log.say("step %d: not saved: %s; %s" % (step, self.failure, kept))
            return
        self._saved = step
        if loss is not None:
            self.best = min(self.best, loss)
        self._log.say("step %d: saved %s/iter_%d" % (step, self._config.out, step))
        self._folder.prune()
