"""What ``sample.write`` writes beside what reading the whole line for every token gives: ``written.py CHECKPOINT``.

Prints a JSON object for each prompt and temperature: both texts, and how many tokens the model was given for ours.
"""

import json
import sys
from pathlib import Path

import torch

from trainer.gpt import sample

COUNT = 24
model, _ = sample.load(Path(sys.argv[1]))
given = []
model.transformer["wte"].register_forward_pre_hook(lambda _, arguments: given.append(arguments[0].numel()))


@torch.no_grad()
def simply(prompt, temperature, top_k, generator):
    """Without a past: the block's last tokens, all of them, for every token."""
    line = list(prompt)
    for _ in range(COUNT):
        logits = model(torch.tensor([line[-model.shape.block_size :]]))[0]
        if temperature:
            least = logits.topk(top_k).values[-1]
            weights = (logits / temperature).masked_fill(logits < least, float("-inf")).softmax(-1)
            line.append(int(torch.multinomial(weights, 1, generator=generator)))
        else:
            line.append(int(logits.argmax()))
    return line[len(prompt) :]


model.eval()
letters = torch.Generator().manual_seed(0)
for length in (1, 8, 20, 32, 40):  # the block has 32 places
    prompt = torch.randint(0, model.shape.vocab_size, (length,), generator=letters).tolist()
    for temperature in (0.0, 1.5):
        drawn = [torch.Generator().manual_seed(length) for _ in range(2)]
        expected = simply(prompt, temperature, 9, drawn[0])
        given.clear()
        ours = sample.write(model, prompt, COUNT, temperature, 9, drawn[1])
        told = {"length": length, "temperature": temperature, "expected": expected, "ours": ours, "given": [*given]}
        told["few"] = sample.write(model, prompt, 8, temperature, 9, drawn[1], 3)
        sys.stdout.write(json.dumps(told) + "\n")
