"""Run by the rehearsal environment's Python: how many parameters transformers' models of given configurations have.

``parameters.py CONFIGS.json``: configurations by name. The models are made without memory, on the meta device. Also
told is what peft's LoRA of rank 8 adds to them, beside the modules that LLaMA-Factory finds for ``lora_target: all``,
and to GPT-2's beside those that it is given.
"""

import json
import sys
from pathlib import Path

import torch
import torchao  # noqa: F401 - peft imports it inside of the device meta, where its tables cannot be made
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText


def targets(model):
    if hasattr(model.config, "vision_config"):
        return ["q_proj"]  # only text models' adapters are compared
    found = {name.rpartition(".")[2] for name, each in model.named_modules() if type(each).__name__ == "Linear"}
    return sorted(found - {"lm_head"}) or ["c_attn", "c_proj", "c_fc"]


def main(file):
    for name, given in json.loads(Path(file).read_text(encoding="utf-8")).items():
        with torch.device("meta"):
            config = AutoConfig.for_model(**given)
            seeing = "vision_config" in given
            kind = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
            model = kind.from_config(config)
            reported = {"name": name, "parameters": model.num_parameters()}
            if seeing:
                text = sum(each.numel() for each in model.model.language_model.parameters())
                head = 0 if config.tie_word_embeddings else model.lm_head.weight.numel()
                reported["vision"] = model.num_parameters() - text - head
            lora = get_peft_model(model, LoraConfig(r=8, target_modules=targets(model)))
        reported["adapters"] = lora.get_nb_trainable_parameters()[0]
        sys.stdout.write(f"SAYS {json.dumps(reported)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
