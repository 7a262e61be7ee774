"""``sample.write`` beside reading the whole line for every token: ``written.py CHECKPOINT``.

Prints a JSON object for each prompt and temperature: what was written, what the logits that it had choose, how far
these are from the logits of the whole line (as a share of how much logits differ), and how many tokens were read.
"""

import json
import sys
from pathlib import Path

import torch

from trainer.lm import sample

COUNT = 24
model, _ = sample.load(Path(sys.argv[1]))
given, seen = [], []
model.embed.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0].numel()))
model.register_forward_hook(lambda _, __, logits: seen.append(logits[0].clone()))


@torch.no_grad()
def choose(line, logits, temperature, generator):
    """The token that follows from logits, and how far these are from those of the whole block without a past."""
    whole = model(torch.tensor([line[-model.shape.block_size :]]))[0]
    apart = float((logits - whole).abs().max() / whole.std())
    if not temperature:
        return int(logits.argmax()), apart
    least = logits.topk(9).values[-1]
    weights = (logits / temperature).masked_fill(logits / temperature < least / temperature, float("-inf")).softmax(-1)
    return int(torch.multinomial(weights, 1, generator=generator)), apart


model.eval()
letters = torch.Generator().manual_seed(0)
for length in (1, 8, 20, 32, 40):  # the block has 32 places
    prompt = torch.randint(0, model.shape.vocab_size, (length,), generator=letters).tolist()
    for temperature in (0.0, 1.5):
        drawn = [torch.Generator().manual_seed(length) for _ in range(2)]
        given.clear()
        seen.clear()
        ours = sample.write(model, prompt, COUNT, temperature, 9, drawn[1])
        reported = {"length": length, "temperature": temperature, "ours": ours, "given": [*given]}
        logits = [*seen]
        chosen = [choose([*prompt, *ours[:at]], each, temperature, drawn[0]) for at, each in enumerate(logits)]
        reported.update(chosen=[token for token, _ in chosen], apart=max(apart for _, apart in chosen))
        reported["few"] = sample.write(model, prompt, 8, temperature, 9, drawn[1], 3)
        sys.stdout.write(json.dumps(reported) + "\n")
