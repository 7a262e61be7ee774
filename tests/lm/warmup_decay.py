"""Run by the rehearsal environment's Python: the rates of DeepSpeed's WarmupDecayLR beside ours, as a JSON object."""

import json
import sys

import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR

from trainer.lm.__main__ import learning_rate
from trainer.lm.config import Config

STEPS, WARMUP, RATE = 100, 10, 2e-5


def theirs(**more):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    sizes = {"total_num_steps": STEPS, "warmup_num_steps": WARMUP}
    schedule = WarmupDecayLR(optimizer, warmup_min_lr=0, warmup_max_lr=RATE, **sizes, **more)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


steps = {"max_iters": STEPS, "warmup_iters": WARMUP}
config = Config(data=("x",), learning_rate=RATE, schedule="linear", min_lr=0.0, **steps)
ours = [learning_rate(config, step) for step in range(STEPS)]
sys.stdout.write(json.dumps({"ours": ours, "default": theirs(), "linear": theirs(warmup_type="linear")}))
