"""Run by the rehearsal environment's Python: conversations with images as batches. ``vlm_data.py FOLDER`` prints JSON.

FOLDER gets models' configurations, images and data sets. Each printed object has a ``name`` and what was found.
"""

import base64
import copy
import io
import json
import os
import random
import shutil
import sys
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel, Qwen2_5_VLModel
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vlm_models_cases import CASES

from trainer.lm import sources, tokens, weights
from trainer.lm.batch import Layout
from trainer.lm.errors import FailedError, RefusedError
from trainer.lm.model import fill
from trainer.vlm import data, encoding, families, processing
from trainer.vlm.shape import Tower

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
WORDS = ["the", "king", "and", "queen", "said", "that", "they", "would", "not", "go", "to", "sea", "again"]

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
PINPOINTS = [[30 * rows, 30 * columns] for rows in range(1, 7) for columns in range(1, 7)]


def config_of(case, tower, **more):
    """The configuration of a tiny model that sees images of these sizes."""
    family, config = copy.deepcopy(CASES[case])
    config["text_config"].update(vocab_size=320, max_position_embeddings=2048)
    config["vision_config"].update(tower)
    return {"model_type": family, **config, **more}


starts = {"vision_start_token_id": numbers["<|vision_start|>"], "vision_end_token_id": numbers["<|vision_end|>"]}
QWEN_CONFIG = config_of(
    "qwen2.5-vl", {"patch_size": 14, "window_size": 112}, **starts, image_token_id=numbers["<|image_pad|>"]
)
ONEVISION_CONFIG = config_of(
    "siglip and qwen2",
    {"patch_size": 4, "image_size": 30},
    image_token_index=numbers["<image>"],
    image_grid_pinpoints=PINPOINTS,
)


def seen_by(model):
    """How the model in a folder sees images."""
    return processing.of_shape(families.read_shape(model), model)


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
for _ in range(40):
    count = drawn.choice([0, 1, 1, 1, 2, 3])
    chosen = [f"pictures/{drawn.randrange(len(SIZES))}.png" for _ in range(count)]
    rows.append({"conversations": talk(count, drawn.randint(1, 2)), "images": chosen})
(folder / "mixed.json").write_text(json.dumps(rows))


class Theirs:
    """A conversation as transformers' processor has it, without torchvision's video processors."""

    def __init__(self, cls, pil, **options):
        cls.check_argument_for_proper_class = lambda *_: None
        self.words = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|im_end|>")
        self.processor = cls(image_processor=pil, tokenizer=self.words, video_processor=None, **options)

    def __call__(self, record, template):
        messages = []
        for turn in record["conversations"]:
            parts = [{"type": "image"}] * turn["value"].count("<image>")
            parts.append({"type": "text", "text": turn["value"].replace("<image>", "").strip()})
            messages.append({"role": {"human": "user", "gpt": "assistant"}[turn["from"]], "content": parts})
        text = self.words.apply_chat_template(messages, chat_template=template, tokenize=False)
        images = [Image.open(folder / path) for path in record["images"]]
        return self.processor(text=[text], images=[images] if images else None, return_tensors="pt")


def qwen_images(found):
    """The patches in windows with one of two equal frames, the ends of windows, and each token's feature."""
    grids = found["image_grid_thw"]
    tower = SimpleNamespace(window_size=112, spatial_merge_size=2, patch_size=14, spatial_merge_unit=4)
    order, windows = Qwen2_5_VisionTransformerPretrainedModel.get_window_index(tower, grids)
    frames = found["pixel_values"].view(-1, 4, 3, 2, 196)
    assert torch.equal(frames[:, :, :, 0], frames[:, :, :, 1])
    patches = frames[order, :, :, 0].reshape(-1, 588)
    tower.rotary_pos_emb = lambda size: torch.arange(size, dtype=torch.float).unsqueeze(1)
    places = Qwen2_5_VisionTransformerPretrainedModel.rot_pos_emb(tower, grids)
    places = places.view(-1, 4, 2)[order].view(-1, 2).long()
    ends = torch.cumsum(grids.prod(-1), 0)
    return patches, places, ends, torch.unique_consecutive(torch.tensor(windows))[1:], torch.argsort(order)


def onevision_images(found):
    """The same of tiles. A line end is -1."""
    several = found["batch_num_images"].tolist() != [1]
    tiles = []
    for sizes, pixels in zip(found["image_sizes"].tolist(), found["pixel_values"], strict=True):
        best = select_best_resolution(sizes, onevision_pil.image_grid_pinpoints)
        count = 1 if several else 1 + best[0] * best[1] // 900
        tiles.append(pixels[:count])
    whole = torch.cat(tiles)[:, :, :28, :28]
    patches = whole.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(-1, 48)
    places = torch.cartesian_prod(torch.arange(7), torch.arange(7)).repeat(len(whole), 1)
    ends = torch.arange(1, len(whole) + 1) * 49
    vision = SimpleNamespace(image_size=30, patch_size=4)
    config = SimpleNamespace(vision_config=vision, image_grid_pinpoints=onevision_pil.image_grid_pinpoints)
    features = torch.arange(len(whole) * 49.0).view(-1, 49, 1).split([len(each) for each in tiles])
    packed, _ = LlavaOnevisionModel.pack_image_features(
        SimpleNamespace(config=config), features, found["image_sizes"], image_newline=torch.tensor([-1.0])
    )
    return patches, places, ends, None, torch.cat(packed)[:, 0].long()


def qwen_positions(found):
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=2))
    )
    model.get_vision_position_ids = partial(Qwen2_5_VLModel.get_vision_position_ids, model)
    kinds, grids = found["mm_token_type_ids"], found.get("image_grid_thw")
    return Qwen2_5_VLModel.get_rope_index(model, found["input_ids"], kinds, image_grid_thw=grids)[0][:, 0]


def compared(name, theirs, template, images_of, positions_of):
    """Every sample of an epoch in its batch."""
    source = opened[name].packed(1)
    token, merged = opened[name].train[0].source.processing.token, source.capacity.patches // unit[name]
    counts = dict.fromkeys(
        ("samples", "images", "ids", "masks", "pixels", "places", "ends", "features", "positions"), 0
    )
    static = set()
    for number in range(source.plan.rows(1)):
        batch = source.batch(Layout(0, 1, 1, 1), number, 0)
        static.add(json.dumps([list(getattr(batch.images, each).shape) for each in ("patches", "ends", "features")]))
        images = batch.images
        place = patch = seen = 0
        for sample in source.plan.row(number):
            length, (_, inside) = source.plan.lengths[sample], source.origin(sample)
            found = theirs(rows[inside], template)
            ids = found["input_ids"][0]
            counts["samples"] += 1
            counts["ids"] += torch.equal(batch.tokens[0, place : place + length], ids[:-1])
            targets = batch.targets[0, place : place + length]
            answered = trained.decode(targets[targets >= 0].tolist(), skip_special_tokens=False)
            answers = [turn["value"] for turn in rows[inside]["conversations"] if turn["from"] == "gpt"]
            counts["masks"] += answered == "".join(ended[name] % answer for answer in answers)
            if rows[inside]["images"]:
                pixels, places, ends, windows, features = images_of(found)
                last = patch + len(pixels)
                counts["images"] += 1
                counts["pixels"] += torch.allclose(images.patches[patch:last], pixels, atol=1e-5)
                counts["places"] += torch.equal(images.positions[patch:last], places)
                mine = [part for part in images.ends.unique().tolist() if patch < part <= last]
                same = mine == (patch + ends).tolist()
                if windows is not None:
                    mine = [part for part in images.windows.unique().tolist() if patch < part <= last]
                    same &= mine == (patch + windows).tolist()
                counts["ends"] += same
                first = patch // unit[name]
                wanted = torch.where(features < 0, merged, features + first)
                where = place + torch.nonzero(ids == token)[:, 0]
                end = seen + len(features)
                same = torch.equal(images.features[seen:end], wanted) and torch.equal(images.places[seen:end], where)
                counts["features"] += same
                patch, seen = last, end
            if positions_of:
                mine = batch.positions[:, 0, place : place + length]
                counts["positions"] += torch.equal(mine, positions_of(found)[:, :-1])
            place += length
        rest = [images.patches[patch:].any(), (images.places[seen:] != batch.tokens.numel()).any()]
        assert not any(rest), rest
        assert images.ends[0] == 0
        assert images.ends[-1] == len(images.patches)
        assert images.ends.diff().max() <= images.longest
    tell("compared " + name, shapes=len(static), **counts)


opened = {}
unit = {"qwen": 4, "onevision": 1}
ended = {"qwen": "%s<|im_end|>\n", "onevision": "\n%s"}
for name in ("qwen", "onevision"):
    seen = seen_by(folder / name)
    reading = data.Reading(model=folder / name, block=1024, cache=folder / "cache", share=0.1)
    opened[name] = data.open_data([str(folder / "mixed.json")], [], reading, seen)
qwen = Theirs(Qwen2_5_VLProcessor, qwen_pil)
compared("qwen", qwen, QWEN, qwen_images, qwen_positions)
options = {"num_image_tokens": 49, "vision_feature_select_strategy": "full"}
onevision = Theirs(LlavaOnevisionProcessor, onevision_pil, **options)
compared("onevision", onevision, ONEVISION, onevision_images, None)


def tiny(config, name):
    """A model of transformers that sees images as the opened data does, and ours with its weights."""
    family, config = config["model_type"], {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(0)
    theirs = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **config)).float().eval()
    with torch.no_grad():
        for each in theirs.parameters():
            each.copy_(torch.randn_like(each) * 0.08 + (each.dim() == 1))
    theirs.save_pretrained(folder / f"tiny {name}")
    shape = families.read_shape(folder / f"tiny {name}")
    ours = shape.make().eval()
    fill(ours, weights.read(shape, folder / f"tiny {name}"))
    return theirs, ours


@torch.no_grad()
def losses(name, config, processor, template):
    """From files to the loss: packed rows through our model beside single samples through transformers."""
    theirs, ours = tiny(config, name)
    source = opened[name].packed(1)
    apart = images = 0
    for step in range(2):
        batch = source.batch(Layout(0, 1, 1, 2), step, 0)
        more = {"positions": batch.positions, "images": batch.images}
        mine = ours(batch.tokens, batch.targets, ends=batch.ends, count=torch.tensor(batch.count), **more)
        total = torch.zeros(())
        for row in range(2):
            place = 0
            for sample in source.plan.row(2 * step + row):
                length, (_, inside) = source.plan.lengths[sample], source.origin(sample)
                found = processor(rows[inside], template)
                if name != "qwen":
                    found.pop("mm_token_type_ids", None)
                targets = batch.targets[row, place : place + length]
                total += F.cross_entropy(theirs(**found).logits[0, :-1], targets, reduction="sum")
                place += length
                images += len(rows[inside]["images"])
        apart = max(apart, float(abs(mine - total / batch.count)))
    tell("losses " + name, apart=apart, images=images)


losses("qwen", QWEN_CONFIG, qwen, QWEN)
few = {"image_grid_pinpoints": onevision_pil.image_grid_pinpoints}  # those with at most nine tiles
losses("onevision", {**ONEVISION_CONFIG, **few}, onevision, ONEVISION)


# The same conversation in every format
path = "pictures/2.png"
asked = {"from": "human", "value": "<image>\nwhat is it"}
answer = {"from": "gpt", "value": "the sea"}
in_text = base64.b64encode((folder / path).read_bytes()).decode()


def parts(image):
    said = [image, {"type": "text", "text": "what is it"}]
    return [{"role": "user", "content": said}, {"role": "assistant", "content": [{"type": "text", "text": "the sea"}]}]


FORMATS = {
    "sharegpt": {"conversations": [asked, answer], "images": [path]},
    "llava": {"id": "7", "image": path, "conversations": [asked, answer]},
    "factory": {
        "messages": [{"role": "user", "content": "<image>what is it"}, {"role": "assistant", "content": "the sea"}],
        "images": [path],
    },
    "part": {"messages": parts({"type": "image", "image": path})},
    "part without path": {"messages": parts({"type": "image"}), "images": [path]},
    "absolute": {"messages": parts({"type": "image", "image": str(folder / path)})},
    "file": {"messages": parts({"type": "image_url", "image_url": {"url": f"file://{folder / path}"}})},
    "data": {"messages": parts({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{in_text}"}})},
    "alpaca": {"instruction": "<image>", "input": "what is it", "output": "the sea", "images": [path]},
    "parquet": {"conversations": [asked, answer], "images": [{"bytes": (folder / path).read_bytes(), "path": None}]},
}


def written(name, records):
    where = folder / f"{name}.{'parquet' if name == 'parquet' else 'jsonl'}"
    if name == "parquet":
        pq.write_table(pa.Table.from_pylist(records), where)
    else:
        where.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(where)


def opened_alone(records, name="records", **options):
    options = {"model": folder / "qwen", "block": 256, "cache": folder / "cache", **options}
    return data.open_data([written(name, records)], [], data.Reading(**options), seen_by(folder / "qwen"))


same = {}
for name, record in FORMATS.items():
    batch = opened_alone([record], name).packed(0).batch(Layout(0, 1, 1, 1), 0, 0)
    same[name] = [batch.tokens.tolist(), batch.targets.tolist(), batch.images.patches.double().sum().item()]
tell("formats", same=[name for name, found in same.items() if found == same["sharegpt"]])
moved = opened_alone([{**FORMATS["llava"], "image": "2.png"}], images=str(folder / "pictures"))
tell("folder", same=moved.packed(0).batch(Layout(0, 1, 1, 1), 0, 0).tokens.tolist() == same["sharegpt"][0])
(folder / "moved").mkdir()
shutil.copytree(folder / "pictures", folder / "moved/pictures")
shutil.copy(folder / "llava.jsonl", folder / "moved/llava.jsonl")
reading = data.Reading(model=folder / "qwen", block=256, cache=folder / "cache")
elsewhere = data.open_data([str(folder / "moved/llava.jsonl")], [], reading, seen_by(folder / "qwen"))
known = opened_alone([FORMATS["llava"]], "llava").identity()
tell("moved", same=elsewhere.identity() == known, root=str(elsewhere.train[0].source.root.name))

# A tower that is put behind a decoder: the decoder's template takes texts, and its tokenizer gets the image token
tower = folder / "tower"
tower.mkdir()
described = Tower(patch=4, side=30)
(tower / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
decoder = folder / "decoder"
decoder.mkdir()
plain = tokens.train_bpe([said() for _ in range(50)], 300).tokenizer
plain.add_special_tokens(["<|im_start|>", "<|im_end|>"])
plain.save(str(decoder / "tokenizer.json"))
reading = data.Reading(model=decoder, block=512, cache=folder / "cache", template="chatml")
composed = data.open_data([written("composed", [FORMATS["llava"]])], [], reading, processing.of_tower(described, tower))
batch = composed.packed(0).batch(Layout(0, 1, 1, 1), 0, 0)
text = plain.decode([each for each in batch.tokens[0].tolist() if 0 < each < composed.processing.token], False)
images = int((batch.tokens == composed.processing.token).sum())
number = composed.processing.token - plain.get_vocab_size()
tell("composed", text=text, token=number, images=images, of_images=composed.capacity.tokens)

# The image token that a tokenizer has, the next number, and a number that it has not
pads = trained.to_str(), plain.to_str()
whole = processing.of_tower(described, tower)
found = {"own": encoding.with_token(pads[0], whole), "next": encoding.with_token(pads[1], whole)}
again = encoding.with_token(found["next"][0], replace(whole, token=plain.get_vocab_size()))[2]
try:
    encoding.with_token(pads[1], replace(whole, token=plain.get_vocab_size() + 1))
except RefusedError as error:
    refused = str(error)
texts = {name: text for name, (_, text, _) in found.items()}
tell("tokens", **texts, same=again.token == plain.get_vocab_size() == found["next"][2].token, refused=refused)

# What cannot be read
bad = folder / "bad"
bad.mkdir()
good = io.BytesIO()
picture(300, 200).save(good, "JPEG")
thumbnail = picture(300, 200).getexif()
thumbnail[0x010E] = "a small picture in EXIF ends like a whole one: \xff\xd9".encode("latin1")
picture(300, 200).save(small := io.BytesIO(), "JPEG", exif=thumbnail)
noise = io.BytesIO()
Image.fromarray(np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype="u1")).save(noise, "JPEG", quality=95)
png = (folder / path).read_bytes()
huge = b"IHDR" + (50_000).to_bytes(4, "big") * 2 + png[24:29]
FILES = {
    "empty.jpg": b"",
    "truncated.jpg": good.getvalue()[:3000],
    "large.jpg": noise.getvalue()[:-2000],
    "small.jpg": small.getvalue()[:3000],
    "truncated.png": png[: len(png) // 2],
    "text.png": b"no picture at all",
    "bomb.png": png[:12] + huge + zlib.crc32(huge).to_bytes(4, "big") + png[33:],
}
for name, content in FILES.items():
    (bad / name).write_bytes(content)
picture(1, 5000).save(bad / "thin.png")
os.mkfifo(bad / "pipe.png")
WRONG = [*FILES, "thin.png", "pipe.png", "missing.png", "../" * 30 + "etc/passwd", "x\0y", "n" * 5000]
WRONG += ["http://example.com/a.png", "data:image/png,abc", "data:image/png;base64,???"]
right = FORMATS["llava"]


def refusal(records, **options):
    try:
        opened_alone(records, **options)
    except RefusedError as error:
        return str(error)
    return ""


found = {}
for each in WRONG:
    at = each if ":" in each or "/" in each or len(each) > 100 else f"bad/{each}"
    found[each[:40]] = refusal([right, {**right, "image": at}])
found["bytes"] = refusal([{**right, "images": [{"bytes": b"no picture", "path": None}], "image": None}], name="parquet")
for name, images, text in (
    ("fewer", [path], "<image> <image>"),
    ("more", [path] * 2, "<image>"),
    ("none", [], "<image>"),
):
    found[name] = refusal([right, {"conversations": [{**asked, "value": text}, answer], "images": images}])
found["number"] = refusal([{**right, "image": 7}])
found["token"] = refusal([{**right, "conversations": [{**asked, "value": "<image><|image_pad|>"}, answer]}])
found["answer"] = refusal([{**right, "conversations": [{**asked, "value": "x"}, {**answer, "value": "<image>"}]}])
middle = bytearray(noise.getvalue())
middle[5000:5000] = b"\xff\xc0\x00\x11"  # a second header
(bad / "middle.jpg").write_bytes(middle)
Image.new("F", (30, 30)).save(bad / "floats.tiff")
for name in ("middle.jpg", "floats.tiff"):
    found[name] = refusal([right, {**right, "image": f"bad/{name}"}], decodes=True)
found["header"] = refusal([right, {**right, "image": "bad/middle.jpg"}])
tell("refused", **found)
tell("skipped", notes=opened_alone([right, {**right, "image": "bad/empty.jpg"}, right], skips=True).notes)

# Unusual images that are read, as Pillow's convert("RGB") has them
grey = Image.fromarray(np.arange(64 * 80, dtype="u2").reshape(64, 80) * 12)
turned = picture(60, 40)
exif = turned.getexif()
exif[0x0112] = 6
palette = picture(50, 60).quantize(16)
palette.info["transparency"] = bytes(range(16))
UNUSUAL = {
    "dot.png": (picture(1, 1), {}),
    "animated.gif": (picture(40, 30).quantize(8), {"save_all": True, "append_images": [picture(40, 30)] * 2}),
    "cmyk.jpg": (picture(64, 64).convert("CMYK"), {}),
    "palette.png": (palette, {}),
    "alpha.png": (picture(50, 60).convert("RGBA"), {}),
    "grey.jpg": (picture(50, 60).convert("L"), {}),
    "bit.png": (picture(50, 60).convert("1"), {}),
    "deep.png": (grey, {}),
    "turned.jpg": (turned, {"exif": exif}),
    "web.webp": (picture(64, 50), {}),
    "fax.tiff": (picture(64, 50), {}),
}
kinds = {}
for name, (image, options) in UNUSUAL.items():
    image.save(bad / name, **options)
    one = opened_alone([{**right, "image": f"bad/{name}"}]).packed(0)
    found = one.batch(Layout(0, 1, 1, 1), 0, 0).images
    shown = Image.open(bad / name)
    shown = Image.fromarray((np.asarray(grey) >> 8).astype("u1")) if name == "deep.png" else shown.convert("RGB")
    shown = shown.transpose(Image.Transpose.ROTATE_270) if name == "turned.jpg" else shown
    wanted = qwen_images(qwen_pil([shown.convert("RGB")], return_tensors="pt"))[0]
    kinds[name] = torch.allclose(found.patches[: len(wanted)], wanted, atol=1e-5)
tell("unusual", **kinds)

# An image that breaks after it was encoded, or changes
late = {}
for name, change in (
    ("gone", lambda at: at.unlink()),
    ("torn", lambda at: at.write_bytes(good.getvalue()[:3000])),
    ("changed", lambda at: picture(31, 31).save(at)),
):
    at = bad / f"{name}.jpg"
    at.write_bytes(good.getvalue())
    source = opened_alone([{**right, "image": f"bad/{name}.jpg"}]).packed(0)
    change(at)
    try:
        source.batch(Layout(0, 1, 1, 1), 0, 0)
    except FailedError as error:
        late[name] = str(error)
tell("late", **late)

# Samples longer than a row end before the first image that does not fit, and capacities are kept
several = {"conversations": talk(1), "images": [path]}
several["conversations"] += [{"from": "human", "value": "<image>"}, answer]
several["images"].append("pictures/0.png")
short = opened_alone([several] * 3, block=100)
tell("cut", tokens=list(short.train[0].lengths), patches=data.patches_in(short.train[0]), notes=short.notes)
narrow = opened_alone([several] * 3, patches=64)
tell("narrow", tokens=list(narrow.train[0].lengths), patches=data.patches_in(narrow.train[0]))
text = opened_alone([{"conversations": talk(0), "images": []}] * 3).packed(0).batch(Layout(0, 1, 1, 2), 0, 0)
tell("text", images=int((text.images.places < text.tokens.numel()).sum()), ends=text.images.ends.tolist())

# Padding of a mix as LLaVA's: most samples have an image of any size, some several, the others none
places = []
for number in range(40):
    picture(drawn.randint(60, 640), drawn.randint(60, 640)).save(folder / f"pictures/mix{number}.jpg")
    places.append(f"pictures/mix{number}.jpg")
mix = []
for _ in range(1500):
    count = drawn.choices([0, 1, drawn.randint(2, 4)], [0.3, 0.6, 0.1])[0]
    mix.append({"conversations": talk(count, drawn.choice([1, 1, 2, 4])), "images": drawn.choices(places, k=count)})
large = opened_alone(mix, block=2048)
source = large.packed(0)
found = {"tokens": source.plan.padding(), "patches": source.plan.padding_of_second()}
tell("padding", **found, rows=source.plan.rows(1), report=source.report(), room=source.capacity.patches)

# As trainer.lm holds data: with an evaluation of what was held back
config = SimpleNamespace(seed=1, batch_size=2, eval_iters=3)
held = sources.of_chats(config, opened["qwen"])
evaluated = held.evaluated["mixed"]
batch = evaluated.source.batch(evaluated.layout(0, 1, 2), 0, 0)
shapes = [list(each.images.patches.shape) for each in (batch, held.train.batch(Layout(0, 1, 1, 2), 0, 0))]
tell(
    "held",
    steps=held.train.steps(3, 2),
    rows=held.train.plan.rows(3),
    shapes=shapes,
    notes=held.notes,
    padding=held.padding,
    images=int((batch.images.places < batch.tokens.numel()).sum()),
)

# Rows are the same on one rank and on two
source = opened["qwen"].packed(1)
whole = source.batch(Layout(0, 1, 1, 2), 1, 0)
halves = [opened["qwen"].packed(1).batch(Layout(rank, 2, 1, 1), 1, 0) for rank in range(2)]
equal = all(torch.equal(whole.tokens[rank : rank + 1], halves[rank].tokens) for rank in range(2))
pixels = [half.images.patches.double().sum().item() for half in halves]
tell(
    "ranks",
    equal=equal,
    pixels=[whole.images.patches.double().sum().item(), sum(pixels)],
    counts=[whole.count, *(half.count for half in halves)],
)
