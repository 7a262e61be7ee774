"""Run by the rehearsal environment's Python: our adapters beside peft's, with the same random weights.

``adapted.py FOLDER`` prints a JSON object by case: how far logits, gradients, merged weights and exports are apart, and
the trained parameters of both.
"""

import dataclasses
import json
import sys
from pathlib import Path

import peft
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from adapted_cases import ADAPTED
from architectures_cases import CASES, SIZES, VOCABULARY
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.lm import checkpoint, export, families, lora
from trainer.lm.config import Config
from trainer.lm.engine import Plain
from trainer.lm.log import Watch
from trainer.lm.ranks import Ranks

DEVICE = torch.device("cpu")
ALONE = Ranks(0, 0, 1, DEVICE)


def apart(one, other):
    """The largest difference."""
    return float((one - other).detach().abs().max())


def saved(model, config, base, folder):
    """A checkpoint of the adapters, as the trainer writes it."""
    engine = Plain(model, config, ALONE, 1, torch.float32, Watch(DEVICE))
    state = checkpoint.State(
        step=1, updates=1, shape=model.shape, best_loss=None, worse=0, scale=1.0, world=1, engine=engine.name,
        vocabulary=None, config=dataclasses.asdict(config), base=base.record,
    )  # fmt: skip
    part = folder / "iter_1/part-00000-of-00001.safetensors"
    part.parent.mkdir(parents=True)
    checkpoint.write_tensors(part, checkpoint.entries(engine.pieces()), engine.tensors())
    record = dict(dataclasses.asdict(state), format=checkpoint.FORMAT, files={part.name: 1})
    (part.parent / checkpoint.COMPLETE).write_text(json.dumps(record))
    return checkpoint.find(part.parent)


def compared(name, folder):
    """The differences of one case."""
    case, options = ADAPTED[name]
    family, more = CASES[case]
    sizes = {"vocab_size": VOCABULARY} if family == "gpt2" else SIZES
    torch.manual_seed(0)
    fresh = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **more})).float().eval()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.08 + (parameter.dim() == 1))
    fresh.save_pretrained(folder / "base")

    config = Config(lora_rank=4, init=str(folder / "base"), **options)
    base = lora.find_base(folder / "base")
    shape = families.read_shape(folder / "base")
    ours = lora.make_model(shape, base, config, DEVICE, torch.float32).eval()
    settings = lora.settings_of(vars(config))
    theirs = peft.get_peft_model(
        fresh,
        peft.LoraConfig(
            r=4, lora_alpha=settings.alpha or 8, use_rslora=settings.rslora, task_type="CAUSAL_LM",
            target_modules="all-linear" if config.lora_targets == "all" else config.lora_targets.split(","),
            fan_in_fan_out=family == "gpt2",
        ),
    ).eval()  # fmt: skip
    named = {key.replace(".default", ""): parameter for key, parameter in theirs.named_parameters()}
    pairs = {
        mine: named.pop(other)
        for place in lora.places(shape, config.lora_targets)
        for mine, other, _ in place.tensors(4)
    }
    unlike = [key for key, parameter in named.items() if parameter.requires_grad]  # those without a pair
    with torch.no_grad():
        for key, parameter in pairs.items():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
            ours.get_parameter(key).copy_(parameter)

    tokens = torch.randint(0, VOCABULARY, (2, 50))
    targets = tokens.roll(-1, 1)
    wanted = theirs(tokens).logits
    F.cross_entropy(wanted.flatten(0, 1), targets.flatten()).backward()
    logits = F.linear(ours.hidden(ours.embed(tokens)), ours.output)[..., :VOCABULARY]
    ours(tokens, targets).backward()
    gradients = max(apart(ours.get_parameter(key).grad, parameter.grad) for key, parameter in pairs.items())
    frozen = [key for key, parameter in ours.named_parameters() if key not in pairs and parameter.grad is not None]

    found = saved(ours, config, base, folder / "out")
    export.export(found, folder / "adapter", "float32", adapter=True)
    export.export(found, folder / "merged", "float32")
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "adapter")
    whole = AutoModelForCausalLM.from_pretrained(folder / "merged").eval()
    trained, _ = theirs.get_nb_trainable_parameters()
    merged = dict(theirs.merge_and_unload().named_parameters())
    with torch.no_grad():
        return {
            "logits": apart(logits, wanted),
            "gradient": gradients,
            "unlike": unlike + frozen,
            "adapter": apart(again.eval()(tokens).logits, wanted),
            "merged logits": apart(whole(tokens).logits, wanted),
            "merged": max(apart(parameter, merged[key]) for key, parameter in whole.named_parameters()),
            "trained": [sum(each.numel() for each in ours.parameters() if each.requires_grad), trained],
            "stored": sum(
                piece.numel for piece in Plain(ours, config, ALONE, 1, torch.float32, Watch(DEVICE)).pieces()
            ),
        }


for each in ADAPTED:
    sys.stdout.write(json.dumps({"case": each, **compared(each, Path(sys.argv[1]) / each)}) + "\n")
