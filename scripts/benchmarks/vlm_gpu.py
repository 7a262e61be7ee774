"""A vision-language model on one GPU: padding, and the time of mixed batches beside text: lines of JSON.

    scripts/benchmarks/vlm_gpu.py [--models qwen2.5-vl-7b,llava-onevision-7b] [--block 8192] [--samples 1500]

Models have published shapes and random weights. Data is generated: conversations of which a tenth has two to four
images, three fifths have one, and the rest is text; sizes of images are log-normal around 0.35 megapixels, and texts
around 250 tokens. Batches are those of the trainer: packed, read by its ``Feed`` while the GPU works. Peer: the same
decoder on as many tokens of text. Forward and backward pass, bf16, no optimizer; the tower trained, then frozen.
"""

# ruff: noqa: PLC0415 - torch is imported in the process that measures
from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

WARM, STEPS = 4, 12
MODELS = ("qwen2.5-vl-7b", "qwen2.5-vl-3b", "llava-onevision-7b")
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<image>")
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}
{%- if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}"""
TOWERS = {  # https://huggingface.co/Qwen/Qwen2.5-VL-7B-Instruct and -3B-Instruct
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
    "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip


def config_of(model: str, tokens: dict[str, int]) -> dict[str, Any]:
    """Return the ``config.json`` of a model, with the token numbers of the tokenizer made here."""
    from trainer.lm import families

    text = families.config_of(families.PUBLISHED["qwen2.5-3b" if model.endswith("3b") else "qwen2.5-7b"])
    if model.startswith("qwen"):
        text["rope_scaling"] = {"type": "mrope", "mrope_section": [16, 24, 24]}
        vision = {**TOWERS, "out_hidden_size": text["hidden_size"]}
        found = {"model_type": "qwen2_5_vl", "image_token_id": tokens["<|image_pad|>"], "text_config": text}
        return {**found, "vision_config": vision, "tie_word_embeddings": text["tie_word_embeddings"]}
    vision = {  # https://huggingface.co/llava-hf/llava-onevision-qwen2-7b-ov-hf
        "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "image_size": 384,
        "num_attention_heads": 16, "num_hidden_layers": 26, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    points = [[384 * high, 384 * wide] for high in range(1, 7) for wide in range(1, 7)]
    found = {"model_type": "llava_onevision", "image_token_index": tokens["<image>"], "text_config": text}
    return {**found, "vision_config": vision, "image_grid_pinpoints": points}


def make_data(folder: Path, samples: int, model: str) -> None:
    """Write images, conversations, a tokenizer and the model's configuration."""
    import numpy as np
    from PIL import Image

    from trainer.lm import tokens

    drawn = random.Random(0)
    words = ["".join(drawn.choices("etaoinshrdlu", k=drawn.randint(2, 9))) for _ in range(3000)]

    def said(mean: float) -> str:
        return " ".join(drawn.choices(words, k=max(1, int(drawn.lognormvariate(mean, 0.7)))))

    made = tokens.train_bpe([said(4) for _ in range(2000)], 8000).tokenizer
    made.add_special_tokens(list(SPECIAL))
    made.save(str(folder / "tokenizer.json"))
    known = {text: made.token_to_id(text) for text in SPECIAL}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    mark = "<|vision_start|><|image_pad|><|vision_end|>" if model.startswith("qwen") else "<image>"
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", mark))
    (folder / "config.json").write_text(json.dumps(config_of(model, known)))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    pictures = []
    for number in range(200):
        pixels, shape = 350_000 * drawn.lognormvariate(0, 0.6), drawn.uniform(0.5, 2)
        high, wide = (max(56, int((pixels * each) ** 0.5)) for each in (shape, 1 / shape))
        noise = np.random.default_rng(number).integers(0, 256, (high // 8 + 1, wide // 8 + 1, 3), dtype="u1")
        Image.fromarray(noise).resize((wide, high)).save(folder / f"{number}.jpg")
        pictures.append(f"{number}.jpg")
    rows = []
    for _ in range(samples):
        kind = drawn.random()
        count = 0 if kind < 0.3 else 1 if kind < 0.9 else drawn.randint(2, 4)
        talk = [{"from": "human", "value": "<image>" * count + said(3.5)}, {"from": "gpt", "value": said(5)}]
        rows.append({"conversations": talk, "images": drawn.choices(pictures, k=count)})
    (folder / "data.json").write_text(json.dumps(rows))


def times_of(step: Any, count: int) -> float:
    """Return the milliseconds of a step, on average."""
    import torch

    for _ in range(WARM):
        step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / count


def opened(model: str, block: int, samples: int, folder: Path) -> Any:
    """Return the data of the model, packed."""
    from trainer.lm import families
    from trainer.vlm import data, processing

    make_data(folder, samples, model)
    reading = data.Reading(
        model=folder, block=block, cache=folder / "tokens", template="", share=0.0, skips=False, workers=0
    )
    return data.open_data(
        [str(folder / "data.json")], [], reading, processing.of_shape(families.read_shape(folder), folder)
    )


def measure(model: str, block: int, samples: int) -> None:
    """Print the padding, and the times of one model."""
    import torch

    from trainer.lm import families
    from trainer.lm.batch import Layout
    from trainer.lm.engine import compile_layers, run
    from trainer.lm.feed import Feed
    from trainer.lm.model import fastest_attention

    with tempfile.TemporaryDirectory(prefix="vlm-") as name:
        folder = Path(name)
        found = opened(model, block, samples, folder)
        packed = found.packed(1)
        facts = {"model": model, "block": block, "packing": packed.report()}
        plan = packed.plan
        facts.update(padding=round(plan.padding(), 4), padding_of_patches=round(plan.padding_of_second(), 4))
        if not torch.cuda.is_available():
            sys.stdout.write(json.dumps(facts) + "\n")
            return
        device = torch.device("cuda", 0)
        shape = families.read_shape(folder)
        torch.set_default_dtype(torch.bfloat16)
        with device:
            made = replace(shape, block_size=block).make()
        torch.set_default_dtype(torch.float32)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else parameter.data.fill_(1)
        compile_layers(made)
        tokens = torch.randint(0, 8000, (1, block), device=device)
        count = torch.full((), float(block), device=device)

        def text() -> None:
            with fastest_attention(device):
                made.loss(made.embed(tokens), tokens, None, None, count, None).backward()
            made.zero_grad(set_to_none=True)

        peer = times_of(text, STEPS)
        layout = Layout(0, 1, 1, 1)
        for way in ("trained", "frozen"):
            if way == "frozen":
                for key, parameter in made.named_parameters():
                    parameter.requires_grad_(made.part_of(key) != "vision")
            with Feed(packed, layout, device, 0) as feed:
                seen = []

                def mixed(feed: Any = feed, seen: list[float] = seen) -> None:
                    batch = feed.batch()
                    seen.append(float((batch.images.places < block).sum()))
                    with fastest_attention(device):
                        run(made, batch).backward()
                    made.zero_grad(set_to_none=True)

                took = times_of(mixed, STEPS)
            share = sum(seen) / len(seen) / block
            facts.update({
                "way": f"{model} {way}", "text_ms": round(peer, 1), "mixed_ms": round(took, 1),
                "ratio": round(took / peer, 3),
                "image_tokens": round(share, 3), "gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
                "gpu": torch.cuda.get_device_name(),
            })  # fmt: skip
            sys.stdout.write(json.dumps(facts) + "\n")
            sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="qwen2.5-vl-7b,llava-onevision-7b", help=", ".join(MODELS))
    parser.add_argument("--block", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if given.here:
        measure(given.models, given.block, given.samples)
        return
    for model in given.models.split(","):
        argv = [sys.executable, __file__, "--here", "--models", model]
        argv += ["--block", str(given.block), "--samples", str(given.samples)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
        problem = (done.stderr.strip().splitlines() or ["no output"])[-1][:400]
        sys.stdout.write("\n".join(rows or [json.dumps({"model": model, "failed": problem})]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
