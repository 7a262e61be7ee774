"""Reads nanoGPT's ``meta.pkl`` without running anything that a pickle could name.

The file holds a dictionary with ``vocab_size``, ``itos`` and ``stoi``
(https://github.com/karpathy/nanoGPT/blob/master/data/shakespeare_char/prepare.py): plain Python, so that a pickle which
asks for any class or function is not one of these.
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
        raise pickle.UnpicklingError("it asks for %s.%s" % (module, name))


def read_meta(path: Path) -> Characters:
    """The vocabulary of a ``meta.pkl``.

    Raises:
        RefusedError: it is no such file, or holds more than data.
    """
    try:
        with path.open("rb") as file:
            said = _Plain(file).load()
        letters = said["itos"]
        characters = [letters[number] for number in range(len(letters))]
    except _DAMAGED as error:
        what = "%s is not nanoGPT's list of characters: %s" % (path, error)
        raise RefusedError(what, "python -m trainer.gpt.prepare TEXT --out DIR") from error
    if not all(isinstance(character, str) for character in characters):
        raise RefusedError("%s is not nanoGPT's list of characters" % path)
    return Characters(characters)
