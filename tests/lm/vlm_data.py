"""Run by the rehearsal environment's Python: conversations with images as batches. ``vlm_data.py FOLDER`` prints JSON.

FOLDER gets models' configurations, images and data sets. Each printed object has a ``name`` and what was found.
"""

import json
import random
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from transformers import PreTrainedTokenizerFast
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from trainer.lm import tokens
from trainer.lm.batch import Layout
from trainer.vlm import data, processing

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<image>"]
# Those of the models, without their branches for videos and tools.
QWEN = """{%- for message in messages -%}
{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] -%}
{%- if content['type'] == 'image' or 'image' in content -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ONEVISION = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\n' + content['text'] }}"
    "{% endfor %}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ '\n' + content['text'] }}{% endgeneration %}{% endfor %}"
    "{% endif %}{{'<|im_end|>'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = "the king and queen said that they would not go to sea again".split()

folder = Path(sys.argv[1])
drawn = random.Random(3)


def tell(name, **found):
    sys.stdout.write(json.dumps({"name": name, **found}) + "\n")


def said(most=30):
    return " ".join(drawn.choice(WORDS) for _ in range(drawn.randint(1, most)))


def picture(width, height):
    noise = np.random.default_rng(width * height).integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype="u1")
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR)


trained = tokens.train_bpe([said() for _ in range(50)], 300).tokenizer
trained.add_special_tokens(SPECIAL)
numbers = {text: trained.token_to_id(text) for text in SPECIAL}
QWEN_CONFIG = {
    "model_type": "qwen2_5_vl",
    "image_token_id": numbers["<|image_pad|>"],
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "window_size": 112},
}
PINPOINTS = [[28 * rows, 28 * columns] for rows in range(1, 7) for columns in range(1, 7)]
ONEVISION_CONFIG = {
    "model_type": "llava_onevision",
    "image_token_index": numbers["<image>"],
    "image_grid_pinpoints": PINPOINTS,
    "vision_config": {"patch_size": 4, "image_size": 30},
}
for each in PINPOINTS:
    each[:] = [side // 28 * 30 for side in each]
qwen_pil = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=200 * 200)
onevision_pil = LlavaOnevisionImageProcessorPil(
    size={"height": 30, "width": 30},
    image_grid_pinpoints=[each for each in PINPOINTS if each[0] * each[1] <= 9 * 900],
)
for name, config, template, pil in (
    ("qwen", QWEN_CONFIG, QWEN, qwen_pil),
    ("onevision", ONEVISION_CONFIG, ONEVISION, onevision_pil),
):
    model = folder / name
    model.mkdir()
    trained.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (model / "chat_template.jinja").write_text(template)
    (model / "config.json").write_text(json.dumps(config))
    pil.save_pretrained(model)

(folder / "pictures").mkdir()
SIZES = [(640, 480), (33, 200), (97, 31), (224, 224), (300, 100), (57, 58)]
for number, size in enumerate(SIZES):
    picture(*size).save(folder / f"pictures/{number}.png")


def talk(images, turns=1):
    found = [{"from": "human", "value": "<image>\n" * images + said()}, {"from": "gpt", "value": said()}]
    return found + [{"from": who, "value": said()} for _ in range(turns - 1) for who in ("human", "gpt")]


rows = []
for number in range(40):
    count = drawn.choice([0, 1, 1, 1, 2, 3])
    chosen = [f"pictures/{drawn.randrange(len(SIZES))}.png" for _ in range(count)]
    rows.append({"conversations": talk(count, drawn.randint(1, 2)), "images": chosen})
(folder / "mixed.json").write_text(json.dumps(rows))

opened = {}
for name in ("qwen", "onevision"):
    seen = processing.read(folder / name)
    reading = data.Reading(model=folder / name, block=1024, cache=folder / "cache", share=0.1)
    opened[name] = data.open_data([str(folder / "mixed.json")], [], reading, seen)
    source = opened[name].packed(1)
    batch = source.batch(Layout(0, 1, 1, 2), 0, 0)
    tell(
        "opened " + name, notes=opened[name].notes, capacity=repr(opened[name].capacity), padding=source.plan.padding()
    )
