"""Run by the rehearsal environment's Python: the lengths of a configuration's samples, and those of LLaMA-Factory.

``lengths.py CONFIG``: prints a JSON object for each.
"""

import json
import os
import sys
from pathlib import Path

import yaml
from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import get_train_args
from llamafactory.model import load_tokenizer

sys.path.append(str(Path(__file__).parents[2]))

from provision.run.config_text import read
from provision.tasks.data_lengths import measure


def say(name, **values):
    sys.stdout.write(f"SAYS {json.dumps({'name': name, **values})}\n")


def main(config):
    file = Path(config)
    os.chdir(file.parent)
    found, _ = measure(read(file), Path("model"))
    say("plan", tokens=found.tokens, exact=found.exact)
    model, data, training, *_ = get_train_args(yaml.safe_load(file.read_text(encoding="utf-8")))
    tokenizer = load_tokenizer(model)
    template = get_template_and_fix_tokenizer(tokenizer["tokenizer"], data)
    rows = get_dataset(template, model, data, training, stage="sft", **tokenizer)["train_dataset"]
    say("factory", tokens=[len(row) for row in rows["input_ids"]])


if __name__ == "__main__":
    main(*sys.argv[1:])
