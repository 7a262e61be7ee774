"""Run by the rehearsal environment's Python: tiny models and data for the trainings of test_vlm_train.py.

``vlm_made.py FOLDER`` makes ``qwen`` (Qwen2.5-VL), ``siglip`` and ``text`` (to be composed), and ``mixed.json``:
conversations, most of them with images.
"""

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from chat_templates import CHATML, PARTS
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from vlm_models_cases import MROPE, QWEN_TOWER, TEXT, TOWER

from trainer.lm import tokens

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
WORDS = ["the", "king", "and", "queen", "said", "that", "they", "would", "not", "go", "to", "sea", "again"]
COLOURS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}

folder = Path(sys.argv[1])
drawn = random.Random(5)
torch.manual_seed(0)


def said(most):
    return " ".join(drawn.choice(WORDS) for _ in range(drawn.randint(3, most)))


trained = tokens.train_bpe([said(20) for _ in range(50)], 280).tokenizer
trained.add_special_tokens(SPECIAL)
number = trained.token_to_id
special = {name: number(f"<|{word}|>") for name, word in (
    ("image_token_id", "image_pad"), ("vision_start_token_id", "vision_start"), ("vision_end_token_id", "vision_end"),
)}  # fmt: skip
text = {**TEXT, "eos_token_id": number("<|im_end|>"), "bos_token_id": None}
qwen = Qwen2_5_VLForConditionalGeneration(
    Qwen2_5_VLConfig(
        **special, video_token_id=299, vision_config=QWEN_TOWER, text_config={"rope_scaling": MROPE, **text}
    )
)
decoder = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **text))
tower = SiglipVisionModel(SiglipVisionConfig(**TOWER))
images = {
    "qwen": {"patch_size": 7, "merge_size": 2, "min_pixels": 28 * 28, "max_pixels": 70 * 70, **COLOURS},
    "siglip": {"size": {"height": 28, "width": 28}, **COLOURS},
}
for name, model in (("qwen", qwen), ("text", decoder), ("siglip", tower)):
    model.float().save_pretrained(folder / name)
    if name in images:
        (folder / name / "preprocessor_config.json").write_text(json.dumps(images[name]))
    if name != "siglip":
        trained.save(str(folder / name / "tokenizer.json"))
        (folder / name / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
        (folder / name / "chat_template.jinja").write_text(PARTS if name == "qwen" else CHATML)

(folder / "pictures").mkdir()
for place in range(4):
    pixels = np.random.default_rng(place).integers(0, 256, (20 + 15 * place, 60 - 10 * place, 3), dtype="u1")
    Image.fromarray(pixels).save(folder / f"pictures/{place}.png")
records = []
for place in range(24):
    count = (0, 1, 1, 2)[place % 4]
    talk = [{"from": "human", "value": "<image>" * count + said(8)}, {"from": "gpt", "value": said(12)}]
    records.append({"conversations": talk, "images": [f"pictures/{(place + each) % 4}.png" for each in range(count)]})
(folder / "mixed.json").write_text(json.dumps(records))
(folder / "only-text.json").write_text(json.dumps([{**each, "images": []} for each in records[::4]]))
