"""Turns the places of a log's lines into steps of the training."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional

_VALUES = {"loss", "eval_loss", "lr", "grad_norm", "ms", "tokens_per_second"}


class Placed(NamedTuple):
    """The place of a line in a log of one rank."""

    epoch: Optional[float]
    step: int
    total: Optional[int]


class Places:
    """Turns the steps of a log into steps of the training.

    Steps that start again in every epoch continue: by the length of the epoch where the log has it (``10/100``), else
    at the distance of the last two steps. An epoch is the step only in a log without steps. An evaluation without a
    step belongs to the last one. The first data set of several evaluations counts.
    """

    def __init__(self) -> None:
        self._last: Dict[Optional[int], Placed] = {}  # by rank
        self._distance: Dict[Optional[int], int] = {}
        self._offset: Dict[Optional[int], int] = {}
        self._goes_on = False  # steps do not start again in an epoch, although the lines have both
        # By rank, until the second epoch starts: the number of the first epoch, where the log may start in a later one.
        self._guessed: Dict[Optional[int], int] = {}
        self._steps = False
        self._set: Optional[str] = None

    def first_set(self, values: Dict[str, Any]) -> Dict[str, Any]:
        """The values without those of another evaluation's data set."""
        name = values.get("set")
        if name is None:
            return values
        if self._set is None or name == "":
            self._set = name
        kept = {key: value for key, value in values.items() if key != "set"}
        if name != self._set:
            kept.pop("eval_loss", None)
        return kept

    def place(self, values: Dict[str, Any], rank: Optional[int]) -> Optional[Dict[str, Any]]:
        """The values with the step of the training, or None if they have no place."""
        values = self.first_set(values)
        rank = values.get("rank", rank)
        if not _VALUES & values.keys():
            return None
        if "step" not in values:
            return self._without(values, rank)
        self._steps = True
        step, total, epoch = values["step"], values.get("total"), values.get("epoch")
        if not values.get("within"):
            self._last[rank] = Placed(epoch, step, total)
            return {**values, "rank": rank}
        last = self._last.get(rank)
        self._restart(rank, last, Placed(epoch, step, total), values)
        if last is not None and step > last.step:
            self._distance[rank] = step - last.step
        self._last[rank] = Placed(epoch, step, total)
        offset = self._offset.get(rank, 0)
        placed = {**values, "step": step + offset, "rank": rank}
        if total is not None and values.get("epochs", 0) > 1 and not self._goes_on:
            if _counts_on(self._last[rank], values):
                del placed["total"]  # of the training or of an epoch: the next epoch will show it
            else:
                placed["total"] = total * values["epochs"]
        elif offset or (epoch is not None and values.get("epochs") != 1 and not self._goes_on):
            placed.pop("total", None)  # of an epoch
        return placed

    def _restart(self, rank: Optional[int], last: Optional[Placed], now: Placed, values: Dict[str, Any]) -> None:
        """Notice a new epoch."""
        if last is None:
            if now.epoch and now.total and now.epoch == int(now.epoch):
                first = int("epochs" in values or now.epoch == 1)
                self._guessed[rank] = first
                self._offset[rank] = 0 if _counts_on(now, values) else (int(now.epoch) - first) * now.total
            return
        distance = self._distance.get(rank, 1)
        guessed: Optional[int] = None
        if now.epoch is not None and last.epoch is not None:
            if now.epoch <= last.epoch or now.epoch != int(now.epoch):
                return
            guessed = self._guessed.pop(rank, None)
            if now.step > last.step:
                if (guessed is not None or not self._offset.get(rank)) and now.total != last.step:
                    self._goes_on = True
                    self._offset[rank] = 0
                return
        elif now.step >= last.step or last.total is None or last.step + distance < last.total:
            return
        if self._goes_on:
            return
        more = last.total if last.total is not None else last.step + distance - now.step
        self._offset[rank] = self._offset.get(rank, 0) + more
        if guessed is not None and now.epoch is not None:
            self._offset[rank] = (int(now.epoch) - guessed) * more

    def _without(self, values: Dict[str, Any], rank: Optional[int]) -> Optional[Dict[str, Any]]:
        epoch = values.get("epoch")
        if "examples" in values:
            return {key: value for key, value in values.items() if key != "epoch"}
        if self._steps:
            last = self._last.get(rank)
            if "eval_loss" not in values or last is None:
                return None  # the mean of an epoch, after its steps
            kept = {key: value for key, value in values.items() if key != "loss"}
            return {**kept, "step": last.step + self._offset.get(rank, 0), "rank": rank}
        if epoch is None or epoch != int(epoch):
            return None
        return {**values, "step": int(epoch), "rank": rank}


def _counts_on(now: Placed, values: Dict[str, Any]) -> bool:
    """Whether a step is where it must be if ``total`` is that of all epochs: ``Epoch [6/8] Step [41/64]``."""
    epochs = values.get("epochs")
    before = max(0, int(now.epoch or 0) - 1)
    return bool(epochs and now.total and before * now.total < now.step * epochs <= (before + 1) * now.total)
