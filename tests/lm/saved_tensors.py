"""Run by the rehearsal environment's Python: what transformers' blocks keep for the backward pass.

``saved_tensors.py CONFIGS.json``: configurations of small models. Prints, for each, the bytes a token that one more
block keeps, with 16-bit weights (``bytes``) and with 32-bit ones under autocast (``wide``).
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SEQ = 128
LAYERS = {"gpt2": "n_layer"}


def kept(config, seq=SEQ, *, wide=False):
    """Bytes of all tensors that autograd keeps of one sample, but the model's own."""
    dtype = torch.float32 if wide else torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    found = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that its address stays its own
        return tensor

    tokens = torch.randint(0, config.vocab_size, (1, seq))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=wide),
    ):
        model(input_ids=tokens, labels=tokens)
    return sum(size for size, _ in found.values())


def main(file):
    for name, given in json.loads(Path(file).read_text(encoding="utf-8")).items():
        key = LAYERS.get(given["model_type"], "num_hidden_layers")
        one, two = (kept(AutoConfig.for_model(**{**given, key: layers})) for layers in (1, 2))
        # Autocast's copies of the weights do not grow with the sample.
        less, more = (
            [kept(AutoConfig.for_model(**{**given, key: layers}), seq, wide=True) for layers in (1, 2)]
            for seq in (SEQ // 2, SEQ)
        )
        wide = (more[1] - more[0] - less[1] + less[0]) / (SEQ // 2)
        sys.stdout.write(f"SAYS {json.dumps({'name': name, 'bytes': (two - one) / SEQ, 'wide': wide})}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
