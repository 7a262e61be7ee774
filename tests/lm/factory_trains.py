"""Run by the rehearsal environment's Python: a fine-tuning by LLaMA-Factory and by ``trainer.lm``. Prints JSON objects.

``factory_trains.py FOLDER``: makes a tiny Llama with a tokenizer, a template and conversations there, trains it with
``trainer.lm``, and then with LLaMA-Factory on the same samples in the same order. Each row of the first holds two
samples, so that a step has as many samples in both.
"""

import json
import random
import sys
from pathlib import Path

import torch
from llamafactory.data.template import get_template_and_fix_tokenizer
from llamafactory.hparams import DataArguments
from llamafactory.train.tuner import run_exp
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from trainer.lm import __main__ as program
from trainer.lm import finetune, ranks, tokens

FOLDER = Path(sys.argv[1])
SAMPLES, EPOCHS = 32, 3
ROW = 128  # tokens, of two samples
TEXT = "the king and queen said that they would not go to sea again without a map of the old town"
WORDS = TEXT.split()
drawn = random.Random(0)


def talk():
    """A conversation of one or two questions, with answers of different lengths."""
    turns = []
    for _ in range(drawn.randint(1, 2)):
        turns.append({"from": "human", "value": " ".join(drawn.choices(WORDS, k=drawn.randint(2, 6)))})
        turns.append({"from": "gpt", "value": " ".join(drawn.choices(WORDS, k=drawn.randint(1, 9)))})
    return turns


def make_model(folder):
    """Save a random Llama with its tokenizer and template. Return the tokenizer."""
    vocabulary = tokens.train_bpe([" ".join(drawn.choices(WORDS, k=9)) for _ in range(50)], 340).tokenizer
    marks = "<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>"
    vocabulary.add_special_tokens(list(marks))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, bos_token=marks[0], eos_token=marks[1], pad_token="<|endoftext|>"
    )
    get_template_and_fix_tokenizer(tokenizer, DataArguments(template="llama3"))  # writes the Jinja of its own template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=vocabulary.get_vocab_size())).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def talks_of(tokenizer):
    """Conversations of which two fill a row, and three do not fit."""
    found = []
    while len(found) < SAMPLES:
        turns = talk()
        roles = {"human": "user", "gpt": "assistant"}
        messages = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in turns]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        if ROW / 3 < len(tokenizer(text, add_special_tokens=False)["input_ids"]) - 1 <= ROW / 2:
            found.append({"conversations": turns})
    return found


def train_ours(model, chats, rows, micro_steps):
    """Train with ``trainer.lm``. Return the losses and gradient norms."""
    out = FOLDER / f"ours-{micro_steps}"
    argv = [*("--init", model, "--data", chats, "--out", out, "--block-size", ROW, "--epochs", EPOCHS)]
    argv += ["--batch-size", rows // micro_steps, "--accumulation", micro_steps, "--min-lr", 0, "--beta2", 0.95]
    argv += ["--learning-rate", 2e-3, "--weight-decay", 0.1, "--dtype", "float32", "--eval-interval", 0]
    program.main([*map(str, argv), "--trackers", "none", "--save", "false"])
    lines = [json.loads(line) for line in (out / "trainer_log.jsonl").read_text().splitlines()]
    return [[line["loss"], line["grad_norm"]] for line in lines if "loss" in line]


def order(model, chats):
    """The numbers of the samples in the order in which ``trainer.lm`` takes them, and how many rows hold two."""
    reading = finetune.Reading(model, ROW, finetune.cache_folder(FOLDER / "ours-1"))
    opened = finetune.open_data([str(chats)], [], reading)
    packed, (part,) = opened.packed(1337), opened.train
    rows = [packed.plan.row(number) for number in range(EPOCHS * SAMPLES // 2)]
    return [part.numbers[sample] for row in rows for sample in row], sum(len(row) == 2 for row in rows)


class Losses(TrainerCallback):
    """Keeps the losses and gradient norms that LLaMA-Factory logs."""

    def __init__(self):
        self.steps = []

    def on_log(self, _args, _state, _control, logs=None, **_):
        if "loss" in logs:
            self.steps.append([float(logs["loss"]), float(logs["grad_norm"])])


def train_theirs(model, samples, batch, micro_steps):
    """Train with LLaMA-Factory. Return the losses and gradient norms."""
    folder = FOLDER / f"theirs-{micro_steps}"
    folder.mkdir()
    (folder / "chats.json").write_text(json.dumps(samples))
    described = {"chats": {"file_name": "chats.json", "formatting": "sharegpt"}}
    (folder / "dataset_info.json").write_text(json.dumps(described))
    kept = Losses()
    options = {"stage": "sft", "do_train": True, "finetuning_type": "full", "model_name_or_path": str(model)}
    options |= {"dataset": "chats", "dataset_dir": str(folder), "template": "llama3", "cutoff_len": 256}
    options |= {"disable_shuffling": True, "num_train_epochs": 1.0, "output_dir": str(folder / "out")}
    options |= {"per_device_train_batch_size": batch // micro_steps, "gradient_accumulation_steps": micro_steps}
    options |= {"learning_rate": 2e-3, "lr_scheduler_type": "cosine", "weight_decay": 0.1, "adam_beta2": 0.95}
    options |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True}
    options |= {"preprocessing_num_workers": 1, "dataloader_num_workers": 0, "disable_gradient_checkpointing": True}
    run_exp(options, [kept])
    return kept.steps


ranks.leave = lambda: None  # LLaMA-Factory follows in the same process
model, chats = FOLDER / "model", FOLDER / "chats.jsonl"
talks = talks_of(make_model(model))
chats.write_text("".join(json.dumps(each) + "\n" for each in talks))
ours = {micro_steps: train_ours(model, chats, 4, micro_steps) for micro_steps in (1, 2)}
numbers, pairs = order(model, chats)
samples = [talks[number] for number in numbers]
for micro_steps, found in ours.items():
    theirs = train_theirs(model, samples, 8, micro_steps)
    row = {"micro_steps": micro_steps, "ours": found, "theirs": theirs, "pairs": pairs, "rows": len(numbers) // 2}
    sys.stdout.write("SAYS " + json.dumps(row) + "\n")
