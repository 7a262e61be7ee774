"""Run by the rehearsal environment's Python: ``vlm_loads.py FOLDER...`` loads exported models in transformers.

Prints a JSON object for each: its class, and the digests of its parts' weights.
"""

import hashlib
import json
import sys

from transformers import AutoModelForImageTextToText


def part_of(name):
    if "projector" in name or "merger" in name or "newline" in name:
        return "projector"
    return "vision" if "vision" in name or "visual" in name else "language"


for folder in sys.argv[1:]:
    model, found = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    digests = {}
    for name, parameter in sorted(model.named_parameters()):
        digest = digests.setdefault(part_of(name), hashlib.sha256())
        digest.update(parameter.detach().float().numpy().tobytes())
    row = {"class": type(model).__name__, "missing": sorted(found["missing_keys"])}
    row["parts"] = {name: digest.hexdigest() for name, digest in digests.items()}
    sys.stdout.write("LOADED " + json.dumps(row) + "\n")
