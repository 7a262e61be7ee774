"""Measures how long a run has been silent, and decides how long is too long, from the phase of the run.

=============  ============================================================================
``starting``   unknown yet
``loading``    the model, its tokenizer or a checkpoint is read
``tokenizing`` the data set is read, converted or tokenized
``training``   steps are running
``evaluating`` an evaluation or a prediction
``saving``     a checkpoint or the model is written
``finishing``  the last step is finished
=============  ============================================================================

The phase follows from the output, so that a long evaluation does not count as a hang. A script without such output may
print its phase itself, as a line::

    clusterctl: phase saving

There are two kinds of lines. An *announcement* ("***** Running Evaluation *****") starts a phase at once. A *step* (a
progress event, a line with a loss) only shows that training continues. It may be late, because it comes from another
file that is read afterwards. So within ``SETTLE`` seconds after an announcement a step does not end the announced
phase.

The limit of the silence depends on the phase:

- Announced training: 20 times the median of the last step times, at least 120 s, and at least twice the longest step so
  far (this part at most 30 minutes). Only a step, a line or a growing log breaks the silence (a progress bar is not a
  line until it ends).
- With ``hang.after``: that many seconds in training, from the first step on.
- Otherwise (before the first five step times, loading, tokenizing, evaluating, saving, a script that announces
  nothing): 30 minutes in which no process reads or writes more than a trickle. While the phase is unknown, processor
  time counts too, because the script may never print.

Time in which the agent itself was delayed (the machine slept) does not count.
"""

from __future__ import annotations

import collections
import os
import re
from typing import TYPE_CHECKING, Any, Deque, Dict, Iterable, Optional, Tuple

from .processes import Proc, Stat

if TYPE_CHECKING:
    from .reader import Reading

STARTING, LOADING, TOKENIZING = "starting", "loading", "tokenizing"
TRAINING, EVALUATING, SAVING, FINISHING = "training", "evaluating", "saving", "finishing"
NAMES = (STARTING, LOADING, TOKENIZING, TRAINING, EVALUATING, SAVING, FINISHING)
BEFORE = (STARTING, LOADING, TOKENIZING)  # the phases before the first step

SETTLE = 2.0  # seconds by which a step may be read after a later announcement

# The frameworks' own output. trainer.py and similar names are files of transformers 4.57 and 5.6.
ANNOUNCEMENTS = (
    ("***** Running training *****", TRAINING),  # trainer.py; LLaMA-Factory's train/ppo/trainer.py
    ("***** Running ", EVALUATING),  # trainer.py, evaluation_loop: "Evaluation", "Prediction"
    ("Training completed. Do not forget", FINISHING),  # trainer.py
    ("'train_samples_per_second': ", FINISHING),  # trainer.py: the last dictionary; every one may have train_runtime
    ("***** train metrics *****", FINISHING),  # trainer_pt_utils.py
    ("Loading best model from ", FINISHING),  # trainer.py
    ("Figure saved at: ", FINISHING),  # LLaMA-Factory 0.9.5, extras/ploting.py
    ("Saving model checkpoint to ", SAVING),  # trainer.py
    ("Saving model checkpoint: ", SAVING),  # DeepSpeed 0.19, runtime/engine.py
    ("is about to be saved!", SAVING),  # DeepSpeed, runtime/checkpoint_engine/torch_checkpoint_engine.py
    ("Saving model weights to ", SAVING),  # DeepSpeed, runtime/engine.py, save_16bit_model
    ("Saving current state to ", SAVING),  # accelerate 1.11, accelerator.py, save_state
    ("Saving model to ", SAVING),  # accelerate, utils/fsdp_utils.py
    ("Saving Optimizer state to ", SAVING),  # the same
    ("Saving checkpoint shards", SAVING),  # modeling_utils.py of 4.x, a progress bar
    ("Writing model shards", SAVING),  # modeling_utils.py of 5.x, a progress bar
    ("Model weights saved in ", SAVING),  # modeling_utils.py; accelerate's checkpointing.py
    ("Configuration saved in ", SAVING),  # configuration_utils.py
    ("tokenizer config file saved in ", SAVING),  # tokenization_utils_base.py
    ("Deleting older checkpoint [", SAVING),  # trainer.py
    ("saving checkpoint at iteration ", SAVING),  # Megatron-LM, training/checkpointing.py
    ("Loading dataset ", TOKENIZING),  # LLaMA-Factory, data/loader.py, before both of its progress bars
    ("Converting format of dataset", TOKENIZING),  # LLaMA-Factory, data/converter.py, a progress bar
    ("Running tokenizer on dataset", TOKENIZING),  # LLaMA-Factory, data/loader.py, a progress bar
    ("Running tokenizer on ", TOKENIZING),  # transformers' examples, run_clm.py, a progress bar
    ("Tokenizing train dataset", TOKENIZING),  # trl 0.24, trainer/sft_trainer.py, a progress bar
    ("Generating train split", TOKENIZING),  # datasets 4.0, builder.py, a progress bar
    ("loading configuration file ", LOADING),  # configuration_utils.py
    ("loading weights file ", LOADING),  # modeling_utils.py
    ("loading file ", LOADING),  # tokenization_utils_base.py
    ("Loading checkpoint shards", LOADING),  # modeling_utils.py of 4.x, a progress bar
    ("Loading weights", LOADING),  # core_model_loading.py of 5.x, a progress bar
    ("Loading states from ", LOADING),  # accelerate, accelerator.py, load_state
    ("Begin Load checkpoint from ", LOADING),  # DeepSpeed, torch_checkpoint_engine.py
)
EVALUATED = ("'eval_loss': ", "'eval_runtime': ", "***** eval metrics *****")  # trainer.py: an evaluation finished

_PHASE_LINE = re.compile(r"\bclusterctl: phase (\w+)")


def announced_phase(text: str) -> Optional[str]:
    """The phase that a line announces, or None."""
    if "clusterctl: phase " in text:
        found = _PHASE_LINE.search(text)
        if found and found.group(1) in NAMES:
            return found.group(1)
    for words, phase in ANNOUNCEMENTS:
        if words in text:  # plain searches: a pattern with this many alternatives takes ten times as long
            return phase
    return None


class Phases:
    """The phase of a run. ``now`` is any clock that only goes forward, in seconds.

    Attributes:
        current: the phase.
        announces: whether the run announces its phases, so that ``training`` is exact.
        uses_phase_lines: whether it announces them with clusterctl's own line.
        finished: whether the last step is finished.
        saves: how often the phase ``saving`` began.
    """

    def __init__(self) -> None:
        self.current = STARTING
        self.announces = False
        self.uses_phase_lines = False
        self.finished = False
        self.saves = 0
        self._since = 0.0

    def line(self, text: str, now: float) -> None:
        """Take a line of any rank."""
        phase = announced_phase(text)
        if phase is not None:
            self.uses_phase_lines = self.uses_phase_lines or "clusterctl: phase " in text
            if phase in BEFORE and self.current not in BEFORE and not self.uses_phase_lines:
                return  # a save reads the configuration again: peft checks whether the vocabulary has grown
            self._begin(phase, now)
        elif any(words in text for words in EVALUATED):
            self._continue(now)

    def step(self, now: float, last: bool = False) -> None:
        """Record a step; ``last``: it was the last one."""
        self.finished = self.finished or last
        self._continue(now)

    def progress(self, event: Dict[str, Any], now: float) -> None:
        """Take the fields of a progress event."""
        step, total = event.get("step"), event.get("total")
        self.step(now, last=isinstance(step, int) and isinstance(total, int) and 0 < total <= step)

    def _begin(self, phase: str, now: float) -> None:
        if phase == TRAINING:
            self.announces, self.finished = True, False
        elif phase == FINISHING:
            self.finished = True
        elif phase == SAVING and self.current != SAVING:
            self.saves += 1
        self.current, self._since = phase, now

    def _continue(self, now: float) -> None:
        if self.current in (EVALUATING, SAVING) and now - self._since < SETTLE:
            return
        self.current = FINISHING if self.finished else TRAINING


PACE = 20  # times the median step
SHORT = 120.0  # seconds; the minimal limit in training
LONG = 1800.0  # seconds; the minimal limit in every other phase
STEPS = 5  # step times that are needed for a median
REMEMBERED = 50  # step times that are kept
QUIET = 60.0  # seconds of silence before the processes' reads and writes are measured
MEASURE = 10.0  # seconds between measurements
TRICKLE = 16 << 10  # bytes a second: threads that sample the machine move less, real work more
BUSY = 0.5  # of one core

TICKS = os.sysconf("SC_CLK_TCK")


class Silence:
    """The signs of life of one attempt of a run. All times are from a monotonic clock."""

    def __init__(self, after: Optional[float], proc: Proc) -> None:
        self._after = after  # seconds; None: the pace of the run decides
        self._proc = proc
        self.phases = Phases()
        self.step: Optional[int] = None
        self.steps = 0  # that were seen
        self.stepped: Optional[float] = None  # when the last one was seen
        self.last_sign = 0.0  # a step, a line, a byte
        self._moved = 0.0  # real reading or writing
        self._measured: Optional[Tuple[float, Dict[int, Tuple[int, int]]]] = None  # bytes and ticks of each process
        self._paced: Optional[float] = None  # the last step whose time counts
        self._paces: Deque[float] = collections.deque(maxlen=REMEMBERED)
        self._longest = 0.0
        self._mixed = False  # the phase was not always training since that step
        self._events = False  # steps come as events, so lines about the same steps are not counted
        self._speaker: Optional[int] = -1  # the rank whose lines are counted: several ranks may print the same step

    def start(self, now: float) -> None:
        """Restart the measurement: at the first look, and after a delay of the agent."""
        self.last_sign = self._moved = now
        self._measured = self._paced = None

    def line(self, text: str, now: float) -> None:
        """Take a line of any rank, or of the launcher."""
        self.last_sign = now
        self.phases.line(text, now)
        self._mix()

    def reading(self, rank: Optional[int], reading: "Reading", now: float) -> None:
        """Take numbers in the output of a rank, or of the launcher (None). An evaluation is no step."""
        if self._events or (reading.loss is None and (reading.step is None or reading.eval_loss is not None)):
            return
        if self._speaker == -1:
            self._speaker = rank
        if rank == self._speaker and (reading.step is None or reading.step != self.step):
            trainers = reading.source == "trainer"  # the Trainer's own line, one for every step that is logged
            self.phases.step(now)
            paced = trainers or self.phases.uses_phase_lines
            self._step(self.step if reading.step is None else reading.step, now, paced=paced)

    def progress(self, event: Dict[str, Any], now: float) -> None:
        """Take the fields of a progress event."""
        self.last_sign = now
        if not self._events:
            self._events = True
            self._paced = None
        self.phases.progress(event, now)
        if event.get("step") != self.step:
            self._step(event.get("step"), now, paced=True)

    def _mix(self) -> None:
        self._mixed = self._mixed or self.phases.current != TRAINING

    def _step(self, number: Optional[int], now: float, paced: bool) -> None:
        self.step, self.stepped = number, now
        self.steps += 1
        if not paced:
            return
        if self._paced is not None and not self._mixed:
            self._paces.append(now - self._paced)
            self._longest = max(self._longest, self._paces[-1])
        self._paced = now
        self._mixed = self.phases.current != TRAINING

    def limit(self) -> Tuple[float, bool]:
        """The current limit in seconds, and whether only steps, lines and logs break the silence."""
        training = self.phases.current == TRAINING
        if training and self.steps and self._after:
            return float(self._after), True
        if training and self.phases.announces and len(self._paces) >= STEPS:
            return max(PACE * median(self._paces), SHORT, min(2 * self._longest, LONG)), True
        return max(LONG, float(self._after or 0)), False

    def judge(self, members: Dict[int, Stat], now: float) -> Optional[str]:
        """The reason why the run counts as hanging, or None. ``members`` are its living processes."""
        if now - self.last_sign >= QUIET:
            self._measure(members, now)
        else:
            self._measured = None
        limit, strict = self.limit()
        silent = now - (self.last_sign if strict else max(self.last_sign, self._moved))
        if silent < limit:
            return None
        if strict:
            last = "the last was step %d" % self.step if self.step is not None else "there were %d steps" % self.steps
            pace = ", and a step takes %s" % time_span(median(self._paces)) if self._paces else ""
            return "no step for %s; %s%s" % (time_span(silent), last, pace)
        return "no output, no reads and no writes for %s (phase %s)" % (time_span(silent), self.phases.current)

    def _measure(self, members: Dict[int, Stat], now: float) -> None:
        """Measure whether the processes have read or written since the last measurement."""
        if self._measured is not None and now - self._measured[0] < MEASURE:
            return
        amounts = {}
        for pid in members:
            stat = self._proc.stat(pid)
            amounts[pid] = (self._proc.bytes_moved(pid), stat.ticks if stat else 0)
        if self._measured is not None:
            then, before = self._measured
            both = [(amount, before[pid]) for pid, amount in amounts.items() if pid in before]
            moved = sum(max(0, is_[0] - was[0]) for is_, was in both)
            worked = sum(max(0, is_[1] - was[1]) for is_, was in both) / TICKS
            at_work = self.phases.current == STARTING and worked >= BUSY * (now - then)
            if moved >= TRICKLE * (now - then) or at_work:
                self._moved = now
        self._measured = (now, amounts)


def median(values: Iterable[float]) -> float:
    """The middle of some values; statistics.median would cost a tenth of an agent's start."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] + ordered[-1 - middle]) / 2


def time_span(seconds: float) -> str:
    """Write a time span in seconds, minutes or hours, for messages."""
    if seconds < 120:
        return "%.3g s" % seconds
    return "%d min" % (seconds // 60) if seconds < 7200 else "%.1f h" % (seconds / 3600)
