"""Derives the phase of a run from its output, so that a long evaluation does not count as a hang.

=============  ============================================================================
``starting``   unknown yet
``loading``    the model, its tokenizer or a checkpoint is read
``tokenizing`` the data set is read, converted or tokenized
``training``   steps are running
``evaluating`` an evaluation or a prediction
``saving``     a checkpoint or the model is written
``finishing``  the last step is finished
=============  ============================================================================

A script without such output may print its phase itself, as a line::

    clusterctl: phase saving

There are two kinds of lines. An *announcement* ("***** Running Evaluation *****") starts a phase at once. A *step* (a
progress event, a line with a loss) only shows that training continues. It may be late, because it comes from another
file that is read afterwards. So within ``SETTLE`` seconds after an announcement a step does not end the announced
phase.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Optional

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
TRAINER_STEP = "{'loss': "  # trainer_callback.py: the Trainer's own line for every step that is logged

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
    """

    def __init__(self) -> None:
        self.current = STARTING
        self.announces = False
        self.uses_phase_lines = False
        self.finished = False
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
        self.current, self._since = phase, now

    def _continue(self, now: float) -> None:
        if self.current in (EVALUATING, SAVING) and now - self._since < SETTLE:
            return
        self.current = FINISHING if self.finished else TRAINING
