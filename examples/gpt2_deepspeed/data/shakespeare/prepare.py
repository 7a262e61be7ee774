"""Makes train.bin, val.bin and meta.pkl from input.txt: one uint16 for each character, nine tenths for the training.

Without input.txt it writes one first: verses from a small grammar, so that this works without a network.
"""

import os
import pickle
import random

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
SPEAKERS = ["FIRST CITIZEN", "SECOND CITIZEN", "MENENIUS", "VOLUMNIA", "CORIOLANUS"]
WORDS = {
    "who": ["the king", "my lord", "thy brother", "a gentle heart", "the weary night", "our noble friend"],
    "does": ["shall keep", "doth love", "will forsake", "hath seen", "must follow", "would deny"],
    "what": ["the crown", "thy counsel", "a winter's tale", "the morning star", "his word", "this hour"],
}


def verses(count):
    choose = random.Random(1337)
    for number in range(count):
        line = " ".join(choose.choice(WORDS[kind]) for kind in ("who", "does", "what"))
        yield f"{choose.choice(SPEAKERS)}:\n{line.capitalize()},\n" if number % 2 else f"{line.capitalize()}.\n\n"


source = os.path.join(HERE, "input.txt")
if not os.path.exists(source):
    with open(source, "w", encoding="utf-8") as file:
        file.writelines(verses(4000))
with open(source, encoding="utf-8") as file:
    text = file.read()
letters = sorted(set(text))
stoi = {letter: number for number, letter in enumerate(letters)}
ids = np.array([stoi[letter] for letter in text], dtype=np.uint16)
split = int(0.9 * len(ids))
ids[:split].tofile(os.path.join(HERE, "train.bin"))
ids[split:].tofile(os.path.join(HERE, "val.bin"))
with open(os.path.join(HERE, "meta.pkl"), "wb") as file:
    pickle.dump({"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": stoi}, file)
print(f"train has {split:,} tokens, val has {len(ids) - split:,} tokens")
