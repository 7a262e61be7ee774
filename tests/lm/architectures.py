"""Run by the rehearsal environment's Python: our decoder beside transformers' models with random weights.

``architectures.py FOLDER`` prints a JSON object by case: how far logits, the loss, the exported model's logits and the
outputs of packed documents are apart, and whether the parameters are counted alike.
"""

import itertools
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from architectures_cases import CASES, SIZES, VOCABULARY
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.lm import families, weights
from trainer.lm.batch import IGNORED
from trainer.lm.model import Decoder, fill

ENDS = (0, 30, 75, 100, 160, 200, 200, 200)  # of documents in 2 x 100 tokens; the last ones are empty


@torch.no_grad()
def randomise(model):
    """Random weights and biases: fresh models have zeros and ones that would hide mistakes."""
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.08 + (parameter.dim() == 1))


def apart(one, other):
    """The largest difference."""
    return float((one - other).detach().abs().max())


def gradient(model, loss):
    """The gradients of a loss, by parameter."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def compared(name, folder):
    """The differences of one case."""
    family, more = CASES[name]
    sizes = {"vocab_size": VOCABULARY} if family == "gpt2" else SIZES
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **more})).float().eval()
    randomise(theirs)
    theirs.save_pretrained(folder / "theirs")
    shape = families.read_shape(folder / "theirs")
    ours = Decoder(shape).eval()
    fill(ours, weights.read(shape, folder / "theirs"))
    tokens = torch.randint(0, VOCABULARY, (2, 100))
    targets = tokens.roll(-1, 1).masked_fill(torch.rand(2, 100) < 0.3, IGNORED)
    wanted = theirs(tokens).logits
    logits = F.linear(ours.hidden(ours.embed(tokens)), ours.output)[..., :VOCABULARY]
    count = (targets != IGNORED).sum().float()
    loss = ours(tokens, targets, count=count)
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    kept = gradient(ours, plain)
    held = {key: parameter.data for key, parameter in ours.named_parameters()}
    (folder / "ours").mkdir()
    weights.export(shape, lambda key, _: held[key], folder / "ours", kept=weights.read_kept(folder / "theirs"))
    again = AutoModelForCausalLM.from_pretrained(folder / "ours").eval()
    ends = torch.tensor(ENDS, dtype=torch.int32)
    spans = [(start, end) for start, end in itertools.pairwise(ENDS) if end > start]
    line, following = tokens.view(1, -1), targets.view(1, -1)
    alone = sum(ours(line[:, a:b], following[:, a:b], count=count) for a, b in spans)
    packed = ours(tokens, targets, ends=ends, count=count)
    of_alone, of_packed = gradient(ours, alone), gradient(ours, packed)
    return {
        "logits": apart(logits, wanted),
        "exported": apart(again(tokens).logits, wanted),
        "loss": apart(loss, F.cross_entropy(wanted.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)),
        "gradient": max(apart(each, kept[key]) for key, each in gradient(ours, loss).items()),
        "packed": apart(alone, packed),
        "packed gradient": max(apart(each, of_alone[key]) for key, each in of_packed.items()),
        "parameters": sum(each.numel() for each in theirs.parameters()) == shape.parameters,
    }


for case in CASES:
    sys.stdout.write(json.dumps({"case": case, **compared(case, Path(sys.argv[1]) / case)}) + "\n")
