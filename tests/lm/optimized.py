"""Run by the rehearsal environment's Python: what the optimizers of the plain engine compute, as a JSON object."""

import dataclasses
import json
import sys

import torch

from trainer.lm import optimizers
from trainer.lm.batch import Batch
from trainer.lm.config import Config
from trainer.lm.engine import Plain, make_buckets
from trainer.lm.log import Watch
from trainer.lm.model import Decoder, fill, first_weights
from trainer.lm.ranks import Ranks
from trainer.lm.shape import Shape

DEVICE = torch.device("cpu")
SHAPE = Shape(2, 4, 32, 16, 100, "llama", n_kv_head=2, n_inner=48, norm_eps=1e-5, tied=False, qkv_bias=False,
              out_bias=False, mlp_bias=False)  # fmt: skip
RATE = 1e-2


def kept(is_square):
    """How exact 8 bits are, and what a second rounding changes."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(40 * 128 - 5, generator=generator) * 10 ** torch.randint(
        -9, 3, (40 * 128 - 5,), generator=generator
    )
    numbers[256:384] = 0
    numbers[130] = -1e4  # the largest number of a block is negative
    numbers = numbers.square() if is_square else numbers
    whole = torch.nn.functional.pad(numbers, (0, 5)).view(40, 128)
    held, again = (optimizers.Bits8.empty(40, DEVICE, is_square) for _ in range(2))
    fresh = optimizers.Bits8.unpack(held, is_square)
    optimizers.Bits8.pack(whole, held, is_square)
    once = optimizers.Bits8.unpack(held, is_square)
    optimizers.Bits8.pack(once, again, is_square)
    error = (once - whole).abs().amax(1) / whole.abs().amax(1).clamp(min=1e-30)
    return {
        "stays": all(map(torch.equal, held, again)),
        "error": float(error.max()),
        "zeros": int(((once == 0) & (whole != 0)).sum()) if is_square else 0,
        "fresh": float(fresh.abs().max()),
    }


def batch(step):
    """The same batch in every training."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 100, (4, 16), generator=generator)
    return Batch(tokens, (tokens * 7 + 3) % 100, None, torch.tensor(64.0))


def trained(name, steps=40):
    """The losses of a training."""
    config = dataclasses.replace(Config(), optimizer=name, weight_decay=0.1)
    model = Decoder(SHAPE)
    fill(model, first_weights(SHAPE, 0, DEVICE))
    engine = Plain(model, config, Ranks(0, 0, 1, DEVICE), 1, torch.float32, Watch(DEVICE))
    losses = []
    for step in range(steps):
        losses.append(float(engine.micro_step(batch(step), 0)))
        engine.step(RATE)
    return losses


def muon_apart():
    """How far a step is from torch's Muon on each of Hugging Face's matrices, with torch's AdamW on the rest."""
    config = dataclasses.replace(Config(), optimizer="muon", weight_decay=0.1)
    model, plain = Decoder(SHAPE), Decoder(SHAPE)
    for each in (model, plain):
        fill(each, first_weights(SHAPE, 0, DEVICE))
    engine = Plain(model, config, Ranks(0, 0, 1, DEVICE), 1, torch.float32, Watch(DEVICE))
    cuts = {"attention.qkv.weight": (32, 16, 16), "mlp.up.weight": (48, 48)}
    parts, rest = [], []
    for name, parameter in plain.named_parameters():
        if name.startswith("layers.") and parameter.dim() == 2:
            sizes = next((cut for end, cut in cuts.items() if name.endswith(end)), (len(parameter),))
            parts.append(
                (parameter, [torch.nn.Parameter(part.detach().clone()) for part in parameter.split(sizes)], sizes)
            )
        else:
            rest.append(parameter)
    muon = torch.optim.Muon([part for _, each, _ in parts for part in each], RATE, 0.1, adjust_lr_fn="match_rms_adamw")
    decay = [{"params": [each for each in rest if (each.dim() > 1) == is_matrix], "weight_decay": 0.1 * is_matrix}
             for is_matrix in (True, False)]  # fmt: skip
    adam = torch.optim.AdamW(decay, RATE, (config.beta1, config.beta2), config.epsilon)
    for step in range(2):  # more steps would amplify the rounding of its bf16 products
        engine.micro_step(batch(step), 0)
        engine.step(RATE)
        plain.zero_grad()
        one = batch(step)
        plain(one.tokens, one.targets, None, None, one.count).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), config.grad_clip)
        for parameter, each, sizes in parts:
            for part, gradient in zip(each, parameter.grad.split(sizes), strict=True):
                part.grad = gradient.clone()
        muon.step()
        adam.step()
        with torch.no_grad():
            for parameter, each, _ in parts:
                parameter.copy_(torch.cat(list(each)))
    ours = dict(model.named_parameters())
    return max(float((parameter - ours[name]).abs().max().detach()) for name, parameter in plain.named_parameters())


def buckets_of_muon():
    """Whether each bucket is either Muon's or AdamW's."""
    model = Decoder(SHAPE)
    found = make_buckets(model, 0, 1, torch.float32, hidden_apart=True)
    kinds = [{optimizers.is_hidden(slot.name, slot.parameter) for slot in bucket.slots} for bucket in found]
    return [sorted(kind) for kind in kinds]


def shares_of_muon(world):
    """The matrices of the layers on each rank: parts of one, names, and the share of numbers that are padding."""
    pieces, held, numels = [], 0, 0
    for rank in range(world):
        model = Decoder(SHAPE)
        size = {name: parameter.numel() for name, parameter in model.named_parameters() if name.startswith("layers.")
                and parameter.dim() > 1}  # fmt: skip
        hidden = [each for each in make_buckets(model, rank, world, torch.float32, hidden_apart=True)
                  if each.slots[0].name in size]  # fmt: skip
        pieces += [piece for bucket in hidden for piece, _ in bucket.pieces()]
        held += sum(bucket.weight.numel() for bucket in hidden)
        numels = sum(size.values())
    cut = sum(piece.numel != size[piece.name] for piece in pieces)
    names = [piece.name for piece in pieces]
    return {"cut": cut, "names": names, "all": list(size), "padding": 1 - numels / held}


result = {"signed": kept(is_square=False), "square": kept(is_square=True), "muon": muon_apart()}
result["losses"] = {name: trained(name) for name in ("adamw", "adamw-bf16", "adamw8bit", "muon")}
result["shares"] = {world: shares_of_muon(world) for world in (1, 2, 3)}
result["buckets"] = buckets_of_muon()
result["levels"] = [len(set(optimizers.levels(signed, DEVICE)[0].tolist())) for signed in (True, False)]
sys.stdout.write(json.dumps(result) + "\n")
