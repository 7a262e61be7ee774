"""A random GPT-2 of 20,000 parameters under transformers' Trainer: writes the logs that test_reader*.py read.

python tiny_trainer.py OUT [ARGUMENT=VALUE ...]     # further TrainingArguments; resume=1 resumes from the newest
"""

import json
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

given = {name: json.loads(value) for name, _, value in (word.partition("=") for word in sys.argv[2:])}
resume = bool(given.pop("resume", 0))
spoils = given.pop("spoil_at", None)
torch.manual_seed(0)
tokens = torch.randint(0, 64, (72, 16))
rows = [{"input_ids": row, "labels": row} for row in tokens]
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))
settings = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "logging_steps": 2,
    "save_steps": 10,
    "eval_strategy": "steps",
    "eval_steps": 10,
    "num_train_epochs": 1,
    "use_cpu": True,
    "report_to": "none",
    "learning_rate": 1e-3,
}


class Spoiled(Trainer):
    """A Trainer whose loss is no number from a step on, as after an overflow."""

    def compute_loss(self, *args, **kwargs):
        """The loss, spoiled when asked for."""
        loss = super().compute_loss(*args, **kwargs)
        spoiled = spoils is not None and self.model.training and self.state.global_step >= spoils
        return loss * float("nan") if spoiled else loss


arguments = TrainingArguments(sys.argv[1], **{**settings, **given})
if given.get("disable_tqdm"):
    sys.stdout.write(f"Training/evaluation parameters {arguments}\n")
Spoiled(model, arguments, train_dataset=rows[:64], eval_dataset=rows[64:]).train(resume_from_checkpoint=resume or None)
