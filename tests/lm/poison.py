"""A training in which something goes wrong: ``poison.py HOW STEP RANK ARGV…``.

``nan``: the rank's loss is no number in that step. ``full``: from that step on no file can be written; ``once``: in
that step only. ``memory``: torch has no memory for that step. ``interrupt``, ``impatient``: SIGINT comes in it, once or
three times. ``late``: a save of that step is written only when the third step after it begins. ``little``: host memory
has no room for copies. ``--evaluated`` decides losses (``evaluated.py``).
"""

import itertools
import os
import resource
import signal
import sys
import threading

import evaluated
import torch

from trainer.lm import __main__ as program
from trainer.lm import checkpoint, engine, saving
from trainer.lm.errors import exit_with

how, step, rank = sys.argv[1], int(sys.argv[2]), sys.argv[3]
calls = itertools.count(1)
micro_step, write = engine.Plain.micro_step, checkpoint.Saving.write


def poisoned(self, batch, number):
    loss = micro_step(self, batch, number)
    return loss * float("nan") if next(calls) == step and os.environ.get("RANK", "0") == rank else loss


def interrupted(self, batch, number):
    if next(calls) == step:
        for _ in range(3 if how == "impatient" else 1):
            signal.raise_signal(signal.SIGINT)
    return micro_step(self, batch, number)


def too_large(self, batch, number):
    if next(calls) == step:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4 GiB."
        )
    return micro_step(self, batch, number)


def full(self, tensors):
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if self.state.step == step or (self.state.step > step and how == "full"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most[1]))
    trouble = write(self, tensors)
    resource.setrlimit(resource.RLIMIT_FSIZE, most)
    return trouble


later = threading.Event()


def counted(self, batch, number):
    if next(calls) == step + 3:
        later.set()
    return micro_step(self, batch, number)


def late(self, tensors):
    if self.state.step == step:
        assert later.wait(60)
    return write(self, tensors)


if how == "late":
    engine.Plain.micro_step = counted
    checkpoint.Saving.write = late
elif how == "little":
    saving.available_memory = lambda: 10_000
elif how == "nan":
    engine.Plain.micro_step = poisoned
elif how == "memory":
    engine.Plain.micro_step = too_large
elif how in ("interrupt", "impatient"):
    engine.Plain.micro_step = interrupted
else:
    checkpoint.Saving.write = full
exit_with(lambda: program.main(evaluated.decide(sys.argv[4:])))
