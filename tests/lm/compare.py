"""What transformers makes of an export, beside the checkpoint itself: ``compare.py CHECKPOINT FOLDER``."""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from trainer.lm import checkpoint, sample, weights

theirs, reported = transformers.GPT2LMHeadModel.from_pretrained(sys.argv[2], output_loading_info=True)
ours, _ = sample.load(Path(sys.argv[1]))
exported, _ = sample.load(Path(sys.argv[2]))
shape = ours.shape
tokens = torch.randint(0, shape.vocab_size, (3, shape.block_size), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    logits = ours.eval()(tokens)
    apart = float((theirs.eval()(tokens).logits[:, -1] - logits).abs().max() / logits.std())
found = checkpoint.find(Path(sys.argv[1]))
files = load_file(str(Path(sys.argv[2]) / "model.safetensors"))
with found.reader() as reader:
    equal = [
        torch.equal(parameter.detach(), exported.get_parameter(name).detach())
        and torch.equal(parameter.detach().view(-1), reader.read("weight", name, 0, parameter.numel()))
        for name, parameter in ours.named_parameters()
    ]
# As older folders have them: torch's archives, and what torch wrote before.
for archive in (True, False):
    folder = Path(sys.argv[2]).with_name(f"bin-{archive}")
    folder.mkdir()
    torch.save(files, folder / "pytorch_model.bin", _use_new_zipfile_serialization=archive)
    read = dict(weights.read(shape, folder))
    equal += [torch.equal(read[name], parameter) for name, parameter in exported.named_parameters()]
types = sorted({str(tensor.dtype) for tensor in files.values()})
result = {"apart": apart, "equal": all(equal), "count": len(equal), "types": types}
result["missing"] = sorted(reported["missing_keys"]) + sorted(reported["unexpected_keys"])
result["parameters"] = theirs.num_parameters() == shape.parameters
sys.stdout.write(json.dumps(result))
