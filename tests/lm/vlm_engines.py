"""Run by the rehearsal environment's Python: engines train vision-language models, and some batches have no image.

``vlm_engines.py ENGINE...`` prints a JSON object by case and engine: losses and norms of the steps. With two ranks only
the first has an image; one rank takes both batches as micro-steps.
"""

import json
import sys
from pathlib import Path

import torch
from vlm_models_cases import CASES, IMAGE, VOCABULARY

from trainer.lm import engine, ranks
from trainer.lm.batch import IGNORED, Batch, Images
from trainer.lm.config import Config
from trainer.lm.errors import exit_with
from trainer.lm.log import Watch
from trainer.lm.model import fill, sizes
from trainer.vlm import families

PATCHES, PADDING, TOKENS, STEPS = 16, 8, 40, 2


def drawn(shape):
    """Random weights; the rows that pad the vocabulary are zeros."""
    generator = torch.Generator().manual_seed(0)
    for name, size in sizes(shape).items():
        tensor = torch.randn(size, generator=generator) * 0.08 + ("norm" in name and len(size) == 1)
        if name in ("embed.weight", "head.weight"):
            tensor[VOCABULARY:] = 0
        yield name, tensor


def batch_of(shape, row):
    """Row 0 has an image, row 1 has none."""
    generator = torch.Generator().manual_seed(row)
    tokens = torch.randint(0, 290, (1, TOKENS), generator=generator)
    count = PATCHES // shape.tower.merge**2 + shape.has_newline
    total = (PATCHES + PADDING) // shape.tower.merge**2
    seen = (1 - row) * PATCHES
    patches = torch.zeros(PATCHES + PADDING, shape.tower.pixels)
    features, places = torch.zeros(count, dtype=torch.long), torch.full((count,), TOKENS)
    if seen:
        tokens[:, 5 : 5 + count] = IMAGE
        patches[:seen] = torch.randn(seen, shape.tower.pixels, generator=generator)
        features, places = torch.arange(count), torch.arange(5, 5 + count)
        if shape.has_newline:
            features[-1] = total
    ends = torch.tensor([0, seen, PATCHES + PADDING, PATCHES + PADDING], dtype=torch.int32)
    grid = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    positions = torch.cat((grid, torch.zeros(PADDING, 2, dtype=torch.long)))
    windows = ends if shape.tower.window else None
    images = Images(patches, positions, ends, windows, PATCHES + PADDING, features, places)
    targets = tokens.roll(-1, 1).masked_fill(tokens.roll(-1, 1) == IMAGE, IGNORED)
    line = torch.arange(TOKENS).expand(3, 1, -1) if shape.tower.window else None
    documents = torch.tensor([0, 30, TOKENS, TOKENS], dtype=torch.int32)
    return Batch(tokens, targets, documents, float(TOKENS), images, line)


def trained(case, name, group):
    """Losses and norms of a few steps."""
    shape = families.shape_of({"model_type": CASES[case][0], **CASES[case][1]}, Path("config.json"))
    micro_steps = 2 // group.world
    config = Config(engine=name, learning_rate=1e-3, dtype="float32", batch_size=1)
    how = engine.creation(config, group, micro_steps)
    with how.context:
        model = shape.make()
    how.shard(model)
    fill(model, drawn(shape), how.put)
    made = engine.make_engine(model, config, group, micro_steps, Watch(group.device))
    losses, norms = [], []
    for _ in range(STEPS):
        loss = torch.zeros(())
        for number in range(micro_steps):
            loss += made.micro_step(batch_of(shape, group.rank + number), number) / micro_steps
        norms.append(float(made.step(1e-3)))
        losses.append(float(group.gather(loss.view(1)).mean()))
    return {"losses": losses, "norms": norms}


def compiled(case):
    """The embeddings of image tokens, eager and compiled in one graph; nothing is compiled again without an image."""
    shape = families.shape_of({"model_type": CASES[case][0], **CASES[case][1]}, Path("config.json"))
    model = shape.make()
    fill(model, drawn(shape))
    images = [batch_of(shape, row).images for row in (0, 1)]
    wanted = [model.features(each) for each in images]
    torch._dynamo.reset()
    see = torch.compile(model.features, backend="eager", fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        return [bool(torch.allclose(see(each), found)) for each, found in zip(images, wanted, strict=True)]


def main():
    """Train each case with each engine."""
    group = ranks.join("cpu")
    for case in ("clip and llama", "qwen2.5-vl"):
        if group.world == 1:
            sys.stdout.write(json.dumps({"case": case, "compiled": compiled(case)}) + "\n")
        for name in sys.argv[1:]:
            row = {"case": case, "engine": name, **trained(case, name, group)}
            if group.is_first:
                sys.stdout.write(json.dumps(row) + "\n")
    ranks.leave()


if __name__ == "__main__":
    exit_with(main)  # threads of gloo may abort the interpreter's own exit
