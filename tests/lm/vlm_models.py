"""Run by the rehearsal environment's Python: our vision-language models beside transformers' with random weights.

``vlm_models.py FOLDER`` prints a JSON object by case: how far logits, losses and gradients of documents with images of
several sizes are apart, alone and packed, with transformers' own pixels and positions.
"""

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import NamedTuple

import peft
import safetensors.torch
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.clip import CLIPModel
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip import SiglipModel, SiglipVisionModel
from vlm_models_cases import CASES, COMPOSED, IMAGE, TEXT, TOWER, VOCABULARY

from trainer.lm import checkpoint, lora, weights
from trainer.lm import shape as shapes
from trainer.lm import tokens as vocabularies
from trainer.lm.batch import IGNORED, Images
from trainer.lm.config import Config
from trainer.lm.engine import Plain
from trainer.lm.log import Watch
from trainer.lm.model import fill, sizes
from trainer.lm.ranks import Ranks
from trainer.vlm import families
from trainer.vlm.compose import PREPROCESSOR, compose
from trainer.vlm.model import flops_per_patch

SIZES = ([(30, 75)], [(28, 28), (50, 20), (64, 64)], [], [(61, 58)])  # of the images of each document, in pixels


@torch.no_grad()
def randomise(model):
    """Random weights and biases: fresh models have zeros and ones that would hide mistakes."""
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.08 + (parameter.dim() == 1))


def apart(one, other):
    """The largest difference."""
    return float((one - other).detach().abs().max())


class Llava:
    """Documents for LLaVA-OneVision: one image is cut into tiles, several ones are not."""

    def __init__(self, theirs):
        self.side, self.patch = TOWER["image_size"], TOWER["patch_size"]
        self.model, self.pinpoints = theirs.model, theirs.config.image_grid_pinpoints
        size = {"height": self.side, "width": self.side}
        self.processor = LlavaOnevisionImageProcessorPil(size=size, image_grid_pinpoints=self.pinpoints)

    def theirs(self, images):
        """What their model needs beside tokens."""
        found = self.processor([images], return_tensors="pt")
        return {"pixel_values": found.pixel_values, "image_sizes": found.image_sizes, "batch_num_images": [len(images)]}

    def parts(self, given):
        """Patches, positions, segments, windows, and the features of each image of a document; -1: a line end."""
        tiles = [len(each) for each in given["pixel_values"]]
        pixels = given["pixel_values"].flatten(0, 1)
        patches = F.unfold(pixels, self.patch, stride=self.patch).transpose(1, 2)
        grid = self.side // self.patch
        positions = torch.cartesian_prod(torch.arange(grid), torch.arange(grid)).repeat(sum(tiles), 1)
        numbers = torch.arange(sum(tiles) * grid**2).view(sum(tiles), grid**2, 1).float()
        packed, _ = self.model.pack_image_features(numbers.split(tiles), given["image_sizes"], torch.tensor([-1.0]))
        features = [each.flatten().long() for each in packed]
        return patches.flatten(0, 1), positions, [grid**2] * sum(tiles), None, features

    def positions(self, tokens, given):
        """M-RoPE positions of a document: there are none."""
        del tokens, given


class Qwen:
    """Documents for Qwen2.5-VL."""

    def __init__(self, theirs):
        vision = theirs.config.vision_config
        self.model, self.patch = theirs.model, vision.patch_size
        self.processor = Qwen2VLImageProcessorPil(
            patch_size=self.patch, min_pixels=self.patch**2 * 4, max_pixels=100 * self.patch**2
        )

    def theirs(self, images):
        """What their model needs beside tokens."""
        found = self.processor(images, return_tensors="pt")
        return {"pixel_values": found.pixel_values, "image_grid_thw": found.image_grid_thw}

    def parts(self, given):
        """See ``Llava``."""
        grids = given["image_grid_thw"]
        order, ends = self.model.visual.get_window_index(grids)
        ends = torch.unique_consecutive(torch.tensor(ends))
        patches = given["pixel_values"].view(-1, 3, 2, self.patch**2)[:, :, 0].flatten(1)
        whole = [torch.cartesian_prod(torch.arange(h), torch.arange(w)) for _, h, w in grids.tolist()]
        squares = [
            each.view(h // 2, 2, w // 2, 2, 2).transpose(1, 2).flatten(0, 3)
            for each, (_, h, w) in zip(whole, grids.tolist(), strict=True)
        ]
        patches, positions = (each.unflatten(0, (-1, 4))[order].flatten(0, 1) for each in (patches, torch.cat(squares)))
        lengths = grids.prod(1).tolist()
        features = torch.argsort(order).split([length // 4 for length in lengths])
        return patches, positions, lengths, ends.diff().tolist(), features

    def positions(self, tokens, given):
        """M-RoPE positions of a document, (3, 1, n)."""
        if not given:
            return torch.arange(tokens.shape[1]).expand(3, 1, -1)
        return self.model.get_rope_index(tokens, (tokens == IMAGE).int(), given["image_grid_thw"])[0]


def images_of(parts, tokens, padding, pixels):
    """The images of documents that follow each other in a batch; ``padding`` patches follow."""
    patches, positions, lengths, windows, features, first = [], [], [], [], [], 0
    has_windows = any(part[3] for part in parts)
    for part in parts:
        patches.append(part[0])
        positions.append(part[1])
        lengths += part[2]
        windows += part[3] or part[2]
        features += [torch.where(each < 0, -1, each + first) for each in part[4]]
        first += len(part[0]) // (4 if has_windows else 1)
    patches.append(torch.zeros(padding, pixels))
    positions.append(torch.zeros(padding, 2, dtype=torch.long))
    chosen = torch.cat([*features, torch.zeros(5, dtype=torch.long)])
    places = torch.cat([(tokens.flatten() == IMAGE).nonzero().flatten(), torch.full((5,), tokens.numel())])
    total = first + padding // (4 if has_windows else 1)
    pieces = [8] * (padding // 8)  # a window has 16 patches
    ends, narrow = (
        torch.tensor([0, *itertools.accumulate([*each, *rest, 0, 0])], dtype=torch.int32)
        for each, rest in ((lengths, [padding]), (windows, pieces))
    )
    return Images(
        patches=torch.cat(patches),
        positions=torch.cat(positions),
        ends=ends,
        windows=narrow if has_windows else None,
        longest=max([*lengths, padding]),
        features=torch.where(chosen < 0, total, chosen),
        places=places,
    )


class Document(NamedTuple):
    """A text with images: what their model takes beside tokens, and the parts of ours; None without images."""

    tokens: torch.Tensor
    targets: torch.Tensor
    given: dict
    part: tuple
    positions: torch.Tensor


def document(kind, sizes_of_images):
    """Random text around random images."""
    pictures = [
        Image.frombytes("RGB", size, bytes(torch.randint(0, 256, (size[0] * size[1] * 3,)).tolist()))
        for size in sizes_of_images
    ]
    given = kind.theirs(pictures) if pictures else {}
    part = kind.parts(given) if pictures else None
    each_image = [torch.tensor([290, *[IMAGE] * len(features)]) for features in (part[4] if part else [])]
    tokens = torch.cat((torch.randint(0, 290, (9,)), *each_image, torch.randint(0, 290, (9,)))).unsqueeze(0)
    following = tokens.roll(-1, 1)
    targets = following.masked_fill((following == IMAGE) | (torch.rand(tokens.shape) < 0.2), IGNORED)
    return Document(tokens, targets, given, part, kind.positions(tokens, given))


def logits_of(model, tokens, images, positions):
    """Those of our model."""
    x = model.with_images(model.embed(tokens), images)
    return F.linear(model.hidden(x, positions=positions), model.output)[..., :VOCABULARY]


def load(shape, found, **more):
    """Our model with weights."""
    model = shape.make(**more)
    fill(model, found)
    return model.eval()


def gradients(model, loss):
    """The gradients of a loss, by parameter; None without one."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True))


def their_gradients(shape, theirs, loss):
    """The gradients of their model, in our layout."""
    names, parameters = zip(*theirs.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    stored = {families.stored_name(shape, name): each for name, each in zip(names, found, strict=True)}
    ours = {}
    for name, size in sizes(shape).items():
        wanted = (VOCABULARY, *size[1:]) if name in ("embed.weight", "head.weight") else size
        parts = [stored[each.name] for each in families.theirs(shape, name)]
        ours[name] = torch.cat(parts).reshape(wanted)
    return ours


def export(model, folder, kept):
    """Write our model."""
    held = {key: parameter.data for key, parameter in model.named_parameters()}
    folder.mkdir()
    weights.export(model.shape, lambda key, _: held[key], folder, kept=kept)


def loaded(folder):
    """Their model of a folder, and the names that it misses or does not know."""
    model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    return model.eval(), sorted([*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]])


def exchanged(model, their_folder, folder):
    """Their models of our exports, with the files that ours came with and without, and the parameters they miss."""
    found, problems = [], []
    for name, kept in (("ours", weights.read_kept(their_folder)), ("bare", {})):
        export(model, folder / name, kept)
        again, more = loaded(folder / name)
        found.append(again)
        problems += more
    return found, problems


def far(model, one, other):
    """The largest difference of gradients, in parts of the largest gradient of vision, projector or language."""
    largest = {}
    for name, each in other.items():
        part = model.part_of(name)
        largest[part] = max(largest.get(part, 0.0), float(each.abs().max()))
    return max(apart(one[name][: len(each)], each) / largest[model.part_of(name)] for name, each in other.items())


def packed(documents, pixels):
    """The arguments of a batch of two rows with all documents, and its images."""
    tokens, targets = (torch.cat([each[which] for each in documents], 1) for which in (0, 1))
    spare = -tokens.shape[1] % 2
    tokens, targets = F.pad(tokens, (0, spare)), F.pad(targets, (0, spare), value=IGNORED)
    ends = [0, *itertools.accumulate(each.tokens.shape[1] for each in documents), tokens.numel()]
    images = images_of([each.part for each in documents if each.part], tokens, 16, pixels)
    more = {"ends": torch.tensor(ends, dtype=torch.int32), "images": images, "positions": None}
    if documents[0].positions is not None:
        line = torch.cat([each.positions for each in documents], 2)
        more["positions"] = F.pad(line, (0, spare)).view(3, 2, -1)
    return {"tokens": tokens.view(2, -1), "targets": targets.view(2, -1), **more}


def of_documents(model, theirs, copies, documents, source):
    """How far the models are apart, on documents alone and packed."""
    shape, pixels = model.shape, model.shape.tower.pixels
    count = torch.tensor(float(sum(each.tokens.numel() for each in documents)))
    found, ours, total = {"logits": 0.0, "exported": 0.0}, 0.0, 0.0
    for tokens, targets, given, part, positions in documents:
        images = images_of([part] if part else [], tokens, 8, pixels)
        wanted, *others = (each(tokens, position_ids=positions, **given).logits for each in (theirs, *copies))
        found["logits"] = max(found["logits"], apart(logits_of(model, tokens, images, positions), wanted))
        found["exported"] = max(found["exported"], *(apart(other, wanted) for other in others))
        ours += model(tokens, targets, count=count, positions=positions, images=images)
        total += F.cross_entropy(wanted[0], targets[0], ignore_index=IGNORED, reduction="sum") / count
    batch = packed(documents, pixels)
    together = model(count=count, **batch)
    wanted = their_gradients(shape, theirs, total)
    alone, of_packed = gradients(model, ours), gradients(model, together)
    found.update(loss=apart(ours, total), packed=apart(together, ours))
    found.update(gradient=far(model, alone, wanted), packed_gradient=far(model, of_packed, alone))
    for how in ("selective", "full"):
        other = load(shape, weights.read(shape, source), checkpointing=how).train()
        found[how] = far(model, gradients(other, other(count=count, **batch)), of_packed)
    found["parameters"] = shape.parameters == sum(each.numel() for each in wanted.values())
    return found


def of_text(model, text, positions):
    """Gradients of a text in a batch without images."""
    images = images_of([], text, 16, model.shape.tower.pixels)
    if model.shape.tower.window:
        images = dataclasses.replace(images, windows=images.ends)
    without = gradients(model, model(text, text, positions=positions, images=images))
    plain = gradients(model, model(text, text, positions=positions))
    seen = [each for key, each in without.items() if model.part_of(key) != "language"]
    with FlopCounterMode(display=False) as counter:
        model.features(images)
    products = sum(count for kind, count in counter.get_flop_counts()["Global"].items() if "mm" in str(kind))
    estimated = flops_per_patch(model.shape, 0) / 3 * len(images.patches)
    language = [key for key in without if model.part_of(key) == "language"]
    return {
        "without images": bool(seen) and all(each is not None and not each.any() for each in seen),
        "flops": products / estimated,
        "attention": (flops_per_patch(model.shape, 1600) - flops_per_patch(model.shape, 0))
        / 12
        / model.shape.tower.n_embd,
        "text": max(apart(without[key], plain[key]) for key in language),
    }


def of_adapters(theirs, documents, folder):
    """How far peft's model with our adapters is from ours, and what it misses."""
    config = Config(lora_rank=4, init=str(folder / "theirs"))
    base, shape = lora.find_base(folder / "theirs"), families.read_shape(folder / "theirs")
    model = lora.make_model(shape, base, config, torch.device("cpu"), torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1
    checkpoint_of = folder / "adapted" / "iter_1"
    saved(model, config, base, checkpoint_of)
    (folder / "adapter").mkdir()
    found = checkpoint.find(checkpoint_of)
    with found.reader() as reader:
        lora.export_adapter(found, reader, folder / "adapter", "float32")
    adapted = peft.PeftModel.from_pretrained(theirs, folder / "adapter").eval()
    stored = set(safetensors.torch.load_file(folder / "adapter" / "adapter_model.safetensors"))
    theirs_have = set(peft.get_peft_model_state_dict(adapted))
    tokens, _, given, part, positions = documents[0]
    wanted = adapted(input_ids=tokens, position_ids=positions, **given).logits
    images = images_of([part], tokens, 8, shape.tower.pixels)
    far = apart(logits_of(model, tokens, images, positions), wanted)
    return {"adapter": far, "unlike": sorted(stored ^ theirs_have), "adapters": len(stored)}


def saved(model, config, base, folder):
    """Write a checkpoint of adapters, as the trainer does."""
    alone = Ranks(0, 0, 1, torch.device("cpu"))
    engine = Plain(model, config, alone, 1, torch.float32, Watch(alone.device))
    state = checkpoint.State(
        step=1, updates=1, shape=model.shape, best_loss=None, worse=0, scale=1.0, world=1, engine=engine.name,
        vocabulary=None, config=dataclasses.asdict(config), base=base.record,
    )  # fmt: skip
    folder.mkdir(parents=True)
    part = folder / "part-00000-of-00001.safetensors"
    checkpoint.write_tensors(part, checkpoint.entries(engine.pieces()), engine.tensors())
    record = dict(dataclasses.asdict(state), format=checkpoint.FORMAT, files={part.name: 1})
    (folder / checkpoint.COMPLETE).write_text(json.dumps(record))


def compared(name, folder):
    """The differences of one case."""
    family, config = CASES[name]
    torch.manual_seed(0)
    theirs = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **config)).float().eval()
    randomise(theirs)
    theirs.save_pretrained(folder / "theirs")
    shape = families.read_shape(folder / "theirs")
    model = load(shape, weights.read(shape, folder / "theirs"))
    copies, problems = exchanged(model, folder / "theirs", folder)
    kind = (Llava if family == "llava_onevision" else Qwen)(theirs)
    documents = [document(kind, each) for each in SIZES]
    text = documents[2]
    return {
        "problems": problems,
        **of_documents(model, theirs, copies, documents, folder / "theirs"),
        **of_text(model, text.tokens, text.positions),
        **of_adapters(theirs, documents, folder),
        "record": shapes.from_record(json.loads(json.dumps(dataclasses.asdict(shape)))) == shape,
        "read": families.read_shape(folder / "bare") == shape,
    }


def composed(name, folder):
    """A model of two folders, in transformers."""
    tower, config, decoder = COMPOSED[name]
    torch.manual_seed(0)
    kinds = {"siglip": SiglipModel, "siglip_vision_model": SiglipVisionModel, "clip": CLIPModel}
    vision = kinds[tower](AutoConfig.for_model(tower, **config)).float().eval()
    text = AutoModelForCausalLM.from_config(AutoConfig.for_model(decoder, **TEXT)).float().eval()
    for each, where in ((vision, "vision"), (text, "text")):
        randomise(each)
        each.save_pretrained(folder / where)
    words = [chr(97 + number % 26) * 2 + chr(97 + number // 26) * 2 for number in range(26 * 26)]
    vocabularies.train_bpe(words, VOCABULARY - 1).tokenizer.save(str(folder / "text/tokenizer.json"))
    (folder / "vision" / PREPROCESSOR).write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3]}))
    described = compose(folder / "vision", folder / "text", tiles=4)
    assert described.shape.image_token == IMAGE
    shape = described.shape
    drawn = [dict(described.weights(seed, torch.device("cpu"))) for seed in (1, 1, 2)]
    model = load(shape, drawn[0].items())
    export(model, folder / "ours", described.kept())
    theirs, problems = loaded(folder / "ours")
    kind, found = Llava(theirs), {"problems": problems, "logits": 0.0}
    for tokens, _, given, part, _ in (document(kind, each) for each in SIZES):
        images = images_of([part] if part else [], tokens, 8, shape.tower.pixels)
        found["logits"] = max(
            found["logits"], apart(logits_of(model, tokens, images, None), theirs(tokens, **given).logits)
        )
    words = torch.randint(0, 290, (1, 20))
    found["text"] = apart(theirs(words).logits, text(words).logits)
    pixels = torch.randn(2, 3, TOWER["image_size"], TOWER["image_size"])
    parts = [getattr(each, "vision_model", each) for each in (theirs.model.vision_tower, vision)]
    states = [each(pixels, output_hidden_states=True).hidden_states for each in parts]
    found["tower"] = apart(states[0][-1], states[1][-2 if tower == "clip" else -1])
    processor = LlavaOnevisionImageProcessorPil.from_pretrained(folder / "ours")
    found["images"] = [processor.size["height"], len(processor.image_grid_pinpoints), *processor.image_mean]
    found["seeds"] = [all(one.equal(other[key]) for key, one in drawn[0].items()) for other in drawn[1:]]
    return found


if __name__ == "__main__":
    for cases, run in ((CASES, compared), (COMPOSED, composed)):
        for case in cases:
            sys.stdout.write(json.dumps({"case": case, **run(case, Path(sys.argv[1]) / case)}) + "\n")
