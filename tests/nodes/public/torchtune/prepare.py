"""Makes data.json and model/ without a network, and copies a recipe as torchtune's users do."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import sentencepiece
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
COLOURS = ("red", "green", "blue", "yellow", "white", "black", "brown", "orange")
THINGS = ("apple", "house", "river", "stone", "cloud", "train", "bird", "clock")

data = [
    {"instruction": f"What colour is the {thing} of day {day}?", "input": "", "output": f"The {thing} is {colour}."}
    for colour, thing, day in product(COLOURS, THINGS, range(10))
]
(HERE / "data.json").write_text(json.dumps(data))
(HERE / "model").mkdir(exist_ok=True)
sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(" ".join(each.values()) for each in data), model_prefix=str(HERE / "model/tokenizer"),
    vocab_size=300, byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
)  # fmt: skip
torch.manual_seed(7)
config = LlamaConfig(
    vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip
LlamaForCausalLM(config).save_pretrained(HERE / "model")
recipe = "full_finetune_single_device"
subprocess.run([Path(sys.executable).with_name("tune"), "cp", recipe, HERE / f"{recipe}.py"], check=True)
