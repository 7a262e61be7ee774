"""Run by the rehearsal environment's Python: chunks of texts encoded by ``prepare.py``, beside the library's own way.

``same_tokens.py [FILE]``: prints a JSON object for each vocabulary: whether words are encoded one by one, and how many
chunks differ. FILE is a text whose words are taken besides.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

from trainer.lm import prepare, tokens

SPACES = " \n\t\r\x0b\x0c\x1c\x1f\x85\xa0\u1680\u180e\u2002\u2028\u2029\u200b\u202f\u3000\ufeff"
LETTERS = "abcdéßçЖ語の'sdtm0189٣½.,!?-_\"(){}<|>\\/@#😀👩‍🚀e\u0301"
WORDS = [
    "the",
    "don't",
    "we'll",
    "I've",
    "x = 1;",
    "<|endoftext|>",
    "a  b",
    "\n\n",
    "\n    ",
    "\r\n",
    " ",
    "  \n ",
    "'s",
]


def chunk(drawn):
    parts = []
    for _ in range(drawn.randint(1, 60)):
        kind = drawn.random()
        if kind < 0.4:
            parts.append(drawn.choice(WORDS))
        elif kind < 0.7:
            parts.append("".join(drawn.choice(LETTERS) for _ in range(drawn.randint(1, 9))))
        else:
            parts.append("".join(drawn.choice(SPACES) for _ in range(drawn.randint(1, 4))))
    return "".join(parts)


def changed(vocabulary, change):
    tokenizer = tokenizers.Tokenizer.from_str(vocabulary.tokenizer.to_str())
    change(tokenizer)
    return tokens.Bpe(tokenizer)


def prefixed(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def own_cut(tokenizer):
    split = pre_tokenizers.Split(tokenizers.Regex(r"\s*[\r\n]+|\S+\s?"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])


def qwen(tokenizer):
    """The splitting of Qwen 2 to 3; Llama 3's with ``{1,3}`` behind the digits."""
    split = pre_tokenizers.Split(tokenizers.Regex(prepare.SPLITTINGS[0]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.normalizer = normalizers.NFC()


def llama(tokenizer):
    split = pre_tokenizers.Split(tokenizers.Regex(prepare.SPLITTINGS[1]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])


def normalized(tokenizer):
    tokenizer.normalizer = normalizers.Strip()


drawn = random.Random(0)
texts = [chunk(drawn) for _ in range(3000)]
own = tokens.train_bpe(texts, 600)
vocabularies = {
    "own": own,
    "prefix": changed(own, prefixed),
    "cut": changed(own, own_cut),
    "qwen": changed(own, qwen),
    "llama": changed(own, llama),
    "normalizer": changed(own, normalized),
    "spaces": changed(own, lambda each: each.add_tokens([AddedToken("  b"), AddedToken("a ", normalized=False)])),
    "strips": changed(own, lambda each: each.add_special_tokens([AddedToken("<|x|>", lstrip=True, rstrip=True)])),
}
with tempfile.TemporaryDirectory() as folder:  # GPT-2's two older files
    own.tokenizer.model.save(folder)
    vocabularies["older"] = tokens.read_bpe(Path(folder))
prepare.KNOWN = 500  # so that some words are not remembered
for name, vocabulary in vocabularies.items():
    encoder = prepare.Encoder(vocabulary, np.dtype("<u2"))
    groups = [texts[first : first + 3] for first in range(0, len(texts), 3)]
    found = [np.frombuffer(each, dtype="u2").tolist() for group in groups for each in encoder.encode(group)]
    differ = sum(each != list(vocabulary.encode(text)) for each, text in zip(found, texts, strict=True))
    reported = {"name": name, "local": encoder.cut is not None, "differ": differ}
    sys.stdout.write(json.dumps(reported) + "\n")
