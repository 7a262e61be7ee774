"""Run by the rehearsal environment's Python: prints, as a JSON object, how each model in a folder is refused."""

import json
import sys
from pathlib import Path

from trainer.lm import weights
from trainer.lm.errors import RefusedError
from trainer.vlm import families
from trainer.vlm.compose import compose


def refusal(act):
    """The line of what is refused."""
    try:
        act()
    except RefusedError as error:
        return str(error)
    return "it was accepted"


def load(folder):
    """Read all of a model."""
    for _ in weights.read(families.read_shape(folder), folder):
        pass


found = {each.name: refusal(lambda folder=each: load(folder)) for each in sorted(Path(sys.argv[1]).iterdir())}
cases = Path(sys.argv[1]).parent
vision, text = (cases / "composed: siglip, qwen2" / part for part in ("vision", "text"))
gpt2 = cases / "gpt2"
gpt2.mkdir()
sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8, "vocab_size": 300}
(gpt2 / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
found["compose gpt2"] = refusal(lambda: compose(vision, gpt2))
full = json.loads((text / "tokenizer.json").read_text())
full["added_tokens"].append({**full["added_tokens"][0], "id": 299, "content": "<|last|>"})
(text / "tokenizer.json").write_text(json.dumps(full))
found["compose token"] = refusal(lambda: compose(vision, text))
sys.stdout.write(json.dumps(found))
