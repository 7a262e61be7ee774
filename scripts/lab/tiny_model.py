#!/usr/bin/env python3
"""Makes a project folder for LLaMA-Factory that trains in seconds on a CPU: train.yaml, model/ and data/.

Run by the Python of the training environment: `python tiny_model.py FOLDER [--steps N]`. No hub is asked for anything:
the tokenizer is trained on the data, the model is a random Qwen2 of about 0.1 million parameters. Everything is seeded,
so that two runs give the same bytes. Paths in train.yaml are relative: the folder can be moved.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SEED = 42
COLOURS = ("red", "green", "blue", "yellow", "white", "black", "brown", "orange")
THINGS = ("apple", "house", "river", "stone", "cloud", "train", "bird", "clock")

TRAIN_YAML = """\
# Full fine-tuning of a tiny random model: seconds on a CPU. Paths are relative to this file and travel with the run.
model_name_or_path: model
stage: sft
do_train: true
finetuning_type: full
dataset: tiny
dataset_dir: data
template: qwen
cutoff_len: 64
preprocessing_num_workers: 1
output_dir: out
overwrite_output_dir: true
logging_steps: 1
save_steps: {steps}
max_steps: {steps}
per_device_train_batch_size: 4
gradient_accumulation_steps: 1
learning_rate: 5.0e-3
lr_scheduler_type: constant
use_cpu: true
seed: {seed}
report_to: none
"""


def examples() -> list[dict[str, str]]:
    """Sentences so much alike that a few steps are enough to learn them."""
    return [
        {"instruction": f"What colour is the {thing}?", "input": "", "output": f"The {thing} is {colour}."}
        for colour in COLOURS
        for thing in THINGS
    ]


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the special tokens of the template `qwen`."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    folder = arguments.folder
    data = examples()

    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "data/tiny.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / "data/dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "tiny.json"}}) + "\n")

    tokens = tokenizer([text for example in data for text in (example["instruction"], example["output"])])
    tokens.save_pretrained(folder / "model")
    torch.manual_seed(SEED)
    config = Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    (folder / "train.yaml").write_text(TRAIN_YAML.format(steps=arguments.steps, seed=SEED))


if __name__ == "__main__":
    main()
