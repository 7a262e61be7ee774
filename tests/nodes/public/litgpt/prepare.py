"""Makes data.json and litgpt's model folder without a network: a byte-level tokenizer and a tiny random Pythia."""

import json
from itertools import product
from pathlib import Path

import torch
from litgpt import GPT, Config
from litgpt.utils import save_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
COLOURS = ("red", "green", "blue", "yellow", "white", "black", "brown", "orange")
THINGS = ("apple", "house", "river", "stone", "cloud", "train", "bird", "clock")

data = [
    {"instruction": f"What colour is the {thing} of day {day}?", "input": "", "output": f"The {thing} is {colour}."}
    for colour, thing, day in product(COLOURS, THINGS, range(10))
]
(HERE / "data.json").write_text(json.dumps(data))
bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
bpe.train_from_iterator(
    (" ".join(each.values()) for each in data),
    trainers.BpeTrainer(vocab_size=384, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False),
)
PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>").save_pretrained(HERE / "model")
torch.manual_seed(7)
config = Config(name="tiny", block_size=256, vocab_size=384, padded_vocab_size=384, n_layer=2, n_head=4, n_embd=64)
torch.save(GPT(config).state_dict(), HERE / "model/lit_model.pth")
save_config(config, HERE / "model")
