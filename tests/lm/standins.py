"""Run by the rehearsal environment's Python: small files under the names that the documentation uses.

``standins.py FOLDER NAME...``: a NAME is a model (``Qwen2.5-3B``), a published size (``sizes/gpt2-xl``), or a file of
text, records or conversations. What it is follows from its name.
"""

import gzip
import json
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from chat_templates import CHATML, PARTS
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from vlm_models_cases import MROPE, QWEN_TOWER, TOWER

TEXT = "Once upon a time the king and queen said that they would not go to sea again"
WORDS = TEXT.split()
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 8192,
}  # fmt: skip
GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 1024}
DRAWN = random.Random(0)


def sentences(count):
    return [" ".join(DRAWN.choice(WORDS) for _ in range(9)) for _ in range(count)]


def conversation():
    asked, answer = sentences(2)
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def write_vocabulary(folder):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made.train_from_iterator(sentences(50), trainer)
    made.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[2], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return made.get_vocab_size()


def write_model(folder):
    """A random model; a published size has only its ``config.json``."""
    folder.mkdir(parents=True)
    size = write_vocabulary(folder)
    name = folder.name.lower()
    family = next(kind for part, kind in FAMILIES.items() if part in name)
    config = AutoConfig.for_model(family, vocab_size=size, **(GPT2 if family == "gpt2" else SIZES))
    config.save_pretrained(folder)
    if folder.parent.name != "sizes":
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(CHATML)


def write_vision_language_model(folder):
    """A random Qwen2.5-VL."""
    folder.mkdir(parents=True)
    size = write_vocabulary(folder)
    numbers = {"vision_start_token_id": 3, "image_token_id": 4, "vision_end_token_id": 5, "video_token_id": size - 1}
    text = {**SIZES, "vocab_size": size, "rope_scaling": MROPE}
    tower = {**QWEN_TOWER, "out_hidden_size": SIZES["hidden_size"]}
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(**numbers, vision_config=tower, text_config=text)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(PARTS)
    write_preprocessor(folder, {"min_pixels": 28 * 28, "max_pixels": 70 * 70})


def write_tower(folder):
    """A random SigLIP."""
    torch.manual_seed(0)
    SiglipVisionModel(SiglipVisionConfig(**TOWER)).save_pretrained(folder)
    write_preprocessor(folder, {})


def write_preprocessor(folder, more):
    colours = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps({**colours, **more}))


def write_pictured(path):
    """Conversations of which most have an image beside them."""
    pictures = path.parent / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (28, 28), "red").save(pictures / "red.png")
    rows = []
    for number in range(40):
        row = conversation()
        if number % 4:
            row["messages"][0]["content"] = "<image>" + row["messages"][0]["content"]
            row["images"] = ["pictures/red.png"]
        rows.append(json.dumps(row))
    path.write_text("\n".join(rows))


FAMILIES = {"gpt2": "gpt2", "qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama"}


def write(path):
    """One stand-in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = "".join(path.suffixes[-2:])
    if kind in (".txt", ".py"):
        path.write_text("\n".join(sentences(300)))
    elif kind == ".jsonl.gz":
        path.write_bytes(gzip.compress("\n".join(json.dumps({"text": text}) for text in sentences(300)).encode()))
    elif kind == ".parquet":
        pq.write_table(pa.table({"text": sentences(300)}), path)
    elif path.name in ("mixed.jsonl", "captions.jsonl"):
        write_pictured(path)
    elif path.name == "chats":
        write_pictured(path / "data.jsonl")
    elif kind == ".jsonl":
        path.write_text("\n".join(json.dumps(conversation()) for _ in range(40)))
    elif "VL" in path.name:
        write_vision_language_model(path)
    elif path.name == "siglip":
        write_tower(path)
    else:
        write_model(path)


for each in sys.argv[2:]:
    write(Path(sys.argv[1], each))
