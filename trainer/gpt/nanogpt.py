"""Reads nanoGPT's ``meta.pkl`` without executing code from the pickle.

The file contains a dictionary with ``vocab_size``, ``itos`` and ``stoi``
(https://github.com/karpathy/nanoGPT/blob/master/data/shakespeare_char/prepare.py). These are plain Python objects, so a
pickle that refers to any class or function is refused.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from trainer.gpt.errors import RefusedError
from trainer.gpt.tokens import Characters

_DAMAGED = (pickle.UnpicklingError, EOFError, OSError, LookupError, TypeError, ValueError, AttributeError)


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError("it refers to %s.%s" % (module, name))


def read_meta(path: Path) -> Characters:
    """Read the vocabulary of a ``meta.pkl``.

    Raises:
        RefusedError: the file is something else, or contains more than data.
    """
    try:
        with path.open("rb") as file:
            meta = _Plain(file).load()
        letters = meta["itos"]
        characters = [letters[number] for number in range(len(letters))]
    except _DAMAGED as error:
        what = "%s is not a vocabulary of nanoGPT: %s" % (path, error)
        raise RefusedError(what, "python -m trainer.gpt.prepare TEXT --out DIR") from error
    if not all(isinstance(character, str) for character in characters):
        raise RefusedError("%s is not a vocabulary of nanoGPT" % path)
    return Characters(characters)
