"""Run by the rehearsal environment's Python: conversations as batches. ``packed.py FOLDER`` prints JSON objects.

FOLDER gets a model's tokenizer and template, and data sets. Each object has a ``name`` and what was found.
"""

import contextlib
import itertools
import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from trainer.lm import chat, finetune, packing, records, sources, tokenized, tokens
from trainer.lm.batch import IGNORED, Layout
from trainer.lm.conversations import Conversation
from trainer.lm.errors import RefusedError

TEMPLATE = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
MARKED = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else -%}{{ message.content + '<|im_end|>\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
SAYINGS = "the king and queen said that they would not go to sea again, naïve café 語 😀\n\n  indented 12345"
WORDS = SAYINGS.split(" ")
BLOCK = 96

folder = Path(sys.argv[1])
drawn = random.Random(5)


def said():
    return " ".join(drawn.choice(WORDS) for _ in range(drawn.randint(1, 40)))


def conversation():
    return [{"role": role, "content": said()} for _ in range(drawn.randint(1, 3)) for role in ("user", "assistant")]


def tell(name, **found):
    sys.stdout.write(json.dumps({"name": name, **found}) + "\n")


# A model's tokenizer with special tokens, and two data sets
talks = {name: [conversation() for _ in range(count)] for name, count in (("first", 150), ("second", 40))}
trained = tokens.train_bpe([turn["content"] for talk in talks["first"] for turn in talk], 500).tokenizer
trained.add_special_tokens(["<|im_start|>", "<|im_end|>"])
model = folder / "model"
model.mkdir()
trained.save(str(model / "tokenizer.json"))
(model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
for name, found in talks.items():
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in found))
reading = finetune.Reading(model=model, block=BLOCK, cache=folder / "cache", share=0.1)
paths = [str(folder / "first.jsonl"), str(folder / "second.jsonl:2")]
opened = finetune.open_data(paths, [], reading)
source = opened.packed(seed=7, epochs=2)
tell("opened", notes=opened.notes, held_back={name: len(part.numbers) for name, part in opened.held_back.items()})

# Tokens and masks as transformers has them
theirs = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|im_end|>")
for name, text in (("compared", TEMPLATE), ("marked", MARKED)):
    template = chat.ChatTemplate(text, {"eos_token": "<|im_end|>"}, "it")
    same = masks = 0
    for talk in talks["first"]:
        rendered = template.render(Conversation(talk), "here")
        ((ids, answers),) = chat.encode(trained, [rendered])
        mask = np.zeros(len(ids), dtype=int)
        for start, end in answers:
            mask[start:end] = 1
        wanted = theirs.apply_chat_template(
            talk, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
        )
        same += list(wanted["input_ids"]) == list(ids)
        wanted_mask = np.asarray(wanted["assistant_masks"])
        if name == "compared":  # the line end after an answer belongs to it, as in LLaMA-Factory
            wanted_mask = wanted_mask | np.roll(wanted_mask, 1)
        masks += bool((wanted_mask == mask).all())
    tell(name, talks=len(talks["first"]), tokens=same, masks=masks)

# A step has the same rows on any number of ranks, and its count is that of its targets
steps = source.steps(2, 8)


def step_of(step, world, micro_steps, batch):
    tokens_of, targets_of, counts = [], [], []
    for micro in range(micro_steps):
        for rank in range(world):
            layout = Layout(rank, world, micro_steps, batch)
            found = source.batch(layout, step, micro)
            tokens_of.append(found.tokens)
            targets_of.append(found.targets)
            counts.append(found.count * world * micro_steps)
    return torch.cat(tokens_of), torch.cat(targets_of), counts


differ = wrong = 0
for step in range(steps):
    one = step_of(step, 1, 2, 4)
    wrong += any(round(count) != int((one[1] != IGNORED).sum()) for count in one[2])
    for world, micro_steps, batch in ((2, 2, 2), (4, 1, 2), (8, 1, 1), (1, 8, 1)):
        other = step_of(step, world, micro_steps, batch)
        differ += not (torch.equal(one[0], other[0]) and torch.equal(one[1], other[1]) and one[2][0] == other[2][0])
after = step_of(steps, 1, 1, 8)
tell("ranks", steps=steps, differ=differ, wrong=wrong, after=int((after[1] != IGNORED).sum()))

# Every document between two ends is a sample, or padding
samples = {}
for part in opened.train:
    for _place, number in enumerate(part.numbers):
        ids, answers = part.source.sample(number, BLOCK + 1)
        samples[tuple(ids[:-1].tolist()), tuple(np.where(answers[1:], ids[1:], IGNORED).tolist())] = part.source.name
seen, padding, lengths = {}, 0, set()
for step in range(source.steps(1, 1)):
    batch = source.batch(Layout(0, 1, 1, 1), step, 0)
    lengths.add(len(batch.ends))
    ends = batch.ends.tolist()
    line, targets = batch.tokens[0].tolist(), batch.targets[0].tolist()
    for start, end in itertools.pairwise(ends):
        key = (tuple(line[start:end]), tuple(targets[start:end]))
        if key in samples:
            seen[key] = seen.get(key, 0) + 1
        elif end > start:
            padding += 1
            assert set(line[start:end]) == {0}
            assert set(targets[start:end]) == {IGNORED}
times = {name: sorted({seen.get(key, 0) for key, where in samples.items() if where == name}) for name in talks}
tell("documents", times=times, lengths=len(lengths), rows=source.plan.rows(1), padding=padding)

# Evaluations: all samples of a set, once, in step 0
for name, evaluation in opened.evaluations().items():
    evaluated = sources.Evaluated(evaluation, evaluation.batches(2))
    layouts = [evaluated.layout(rank, 3, 2) for rank in range(3)]
    found = [evaluation.batch(layout, 0, micro) for layout in layouts for micro in range(layout.micro_steps)]
    targets = sum(int((each.targets != IGNORED).sum()) for each in found)
    counted = found[0].count * 3 * layouts[0].micro_steps
    tell("evaluation " + name, targets=targets, counted=round(counted), held=sum(opened.held_back[name].targets))

# The cache: unchanged by another opening; a part that is left of an earlier process is used
cache = {path.name: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*.bin")}
finetune.open_data(paths, [], reading)
again = {path.name: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*.bin")}
records.GROUP = 2000
encoding = tokenized.Encoding(trained.to_str(), chat.load(model))
whole = tokenized.prepare([folder / "first.jsonl"], "whole", encoding, folder / "whole")
write, parts = records.write, []


class KilledError(Exception):
    """What ends this writer."""


def killed(path, data):
    write(path, data)
    parts.append(path)
    if len(parts) == 9:
        raise KilledError


records.write = killed
with contextlib.suppress(KilledError):
    tokenized.prepare([folder / "first.jsonl"], "halves", encoding, folder / "halves")
kept = {path: path.stat().st_mtime_ns for path in parts[:8]}
records.write = lambda path, data: (parts.append(path), write(path, data))
halves = tokenized.prepare([folder / "first.jsonl"], "halves", encoding, folder / "halves")
tell(
    "cache",
    unchanged=cache == again,
    rewritten=len(set(parts[9:]) & set(kept)),
    parts=len(parts),
    same=bool((whole.tokens == halves.tokens).all() and (whole.lengths == halves.lengths).all()),
    left=len(list((folder / "halves").rglob("part-*"))),
)
records.write = write

# Wrong records
lines = [*(folder / "first.jsonl").read_text().splitlines()[:20], '{"text": "x"}', '{"messages": [7]}']
(folder / "wrong.jsonl").write_text("\n".join(lines) + "\n")


def refusal(*argv, **options):
    try:
        finetune.open_data(*argv, finetune.Reading(**{**vars(reading), **options}))
    except RefusedError as error:
        return str(error).replace(str(folder), "DIR")
    return ""


wrong_path = [str(folder / "wrong.jsonl")]
tell(
    "refused",
    record=refusal(wrong_path, []),
    short=refusal([str(folder / "first.jsonl")], [], block=3),
    missing=refusal([str(folder / "none.jsonl")], []),
    weight=refusal([paths[0] + ":0"], []),
)
skipped = finetune.open_data(wrong_path, [], finetune.Reading(**{**vars(reading), "skips": True}))
tell("skipped", notes=[note.replace(str(folder), "DIR") for note in skipped.notes])
try:
    finetune.check_vocabulary(opened, 300, model)
except RefusedError as error:
    tell("vocabulary", says=str(error).replace(str(folder), "DIR"))
tell("steps", of_rows=packing.steps(source.plan.rows(2), 8) == steps)
