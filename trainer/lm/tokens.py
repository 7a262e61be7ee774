"""Text to tokens and back: single characters, or a byte-level BPE of the ``tokenizers`` library.

A vocabulary is stored beside the shards and in every checkpoint, as ``characters.json`` (a list in the order of the
tokens) or as ``tokenizer.json`` (the library's format). Its *digest* shows whether two vocabularies are equal.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence

from trainer.lm.errors import RefusedError

CHARACTERS = "characters.json"
BPE = "tokenizer.json"
GPT2 = 50257  # tokens of GPT-2's vocabulary, whose last one ends a text
END = "<|endoftext|>"  # GPT-2's and Qwen's
# The token after a document, the first that a vocabulary has: also Llama 3's, Llama 2's, Gemma's and DeepSeek's.
ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>")


class Tokens:
    """A vocabulary. ``end`` is the token between documents, if any."""

    file = ""
    end: Optional[int] = None

    def __init__(self, vocabulary: Dict[str, int]) -> None:
        entries = json.dumps(sorted(vocabulary.items()), ensure_ascii=True).encode()
        self.digest = hashlib.sha256(entries).hexdigest()[:16]
        self.size = max(vocabulary.values(), default=-1) + 1

    def encode(self, text: str) -> Sequence[int]:
        """Return a text's tokens."""
        raise NotImplementedError

    def encode_all(self, texts: Sequence[str]) -> List[Sequence[int]]:
        """Return the tokens of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        raise NotImplementedError

    def content(self) -> str:
        """Return everything that determines the tokens of a text."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Write the file that ``load`` reads."""
        raise NotImplementedError


class Characters(Tokens):
    """One token per character."""

    file = CHARACTERS

    def __init__(self, characters: Sequence[str]) -> None:
        self.characters = list(characters)
        self._numbers = {character: number for number, character in enumerate(self.characters)}
        super().__init__(self._numbers)

    def encode(self, text: str) -> List[int]:
        """See ``Tokens``.

        Raises:
            RefusedError: a character is not in the vocabulary.
        """
        try:
            return [self._numbers[character] for character in text]
        except KeyError as error:
            what = "the vocabulary has no character %r" % error.args[0]
            raise RefusedError(what, "prepare all texts in one call, or with --tokens bpe") from error

    def decode(self, tokens: Sequence[int]) -> str:
        """See ``Tokens``."""
        return "".join(self.characters[token] for token in tokens)

    def content(self) -> str:
        """See ``Tokens``."""
        return "".join(self.characters)

    def save(self, folder: Path) -> None:
        """See ``Tokens``."""
        (folder / CHARACTERS).write_text(json.dumps(self.characters, ensure_ascii=False), encoding="utf-8")


class Bpe(Tokens):
    """A byte-level BPE, like GPT-2's."""

    file = BPE

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        super().__init__(tokenizer.get_vocab())
        numbers = (tokenizer.token_to_id(each) for each in ENDS)
        self.end = next((each for each in numbers if each is not None), None)

    def encode(self, text: str) -> List[int]:
        """See ``Tokens``."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_all(self, texts: Sequence[str]) -> List[Sequence[int]]:
        """See ``Tokens``."""
        # Without the places of the tokens in the text, where the library offers it (tokenizers 0.20).
        encode = getattr(self.tokenizer, "encode_batch_fast", self.tokenizer.encode_batch)
        return [each.ids for each in encode(texts, add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        """See ``Tokens``."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def content(self) -> str:
        """See ``Tokens``."""
        return str(self.tokenizer.to_str())

    def save(self, folder: Path) -> None:
        """See ``Tokens``."""
        self.tokenizer.save(str(folder / BPE))


def train_bpe(texts: Iterable[str], size: int) -> Bpe:
    """Train a vocabulary of ``size`` tokens on texts. It contains all 256 bytes, so it can encode any text."""
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Bpe(tokenizer)


def load(folder: Path) -> Optional[Tokens]:
    """Load the vocabulary in a folder of shards, a checkpoint or a Hugging Face model. Return None without one.

    Raises:
        RefusedError: the file cannot be read.
    """
    try:
        if (folder / CHARACTERS).is_file():
            return _read_characters(folder / CHARACTERS)
        if (folder / BPE).is_file():
            return read_bpe(folder / BPE)
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            return read_bpe(folder)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        what = "%s: the vocabulary cannot be read: %s" % (folder, error)
        raise RefusedError(what, "restore the vocabulary that was prepared with the data") from error
    return None


def _read_characters(path: Path) -> Characters:
    characters = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(characters, list) or not all(isinstance(each, str) and len(each) == 1 for each in characters):
        raise ValueError("%s is not a list of characters" % path.name)
    if len(set(characters)) != len(characters):
        raise ValueError("%s contains a character twice" % path.name)
    return Characters(characters)


def check(vocabulary: Optional[Tokens], digest: Optional[str], folder: Path) -> None:
    """Compare the vocabulary in a folder with the one that its model was trained with, if both are known.

    Raises:
        RefusedError: they differ.
    """
    if vocabulary and digest and vocabulary.digest != digest:
        what = "%s: %s is not the vocabulary of the model: its digest is %s, not %s"
        raise RefusedError(
            what % (folder, vocabulary.file, vocabulary.digest, digest),
            "copy the %s of the model's data there" % vocabulary.file,
        )


def read_bpe(path: Path) -> Bpe:
    """Read a ``tokenizer.json``, or a folder with GPT-2's older ``vocab.json`` and ``merges.txt``.

    Raises:
        RefusedError: the vocabulary cannot be read.
    """
    library = _library()
    try:
        if path.is_dir() and not (path / BPE).is_file():
            model = library.models.BPE.from_file(str(path / "vocab.json"), str(path / "merges.txt"))
            tokenizer = library.Tokenizer(model)
            tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = library.decoders.ByteLevel()
            if END in tokenizer.get_vocab():
                tokenizer.add_special_tokens([END])
            return Bpe(tokenizer)
        return Bpe(library.Tokenizer.from_file(str(path / BPE if path.is_dir() else path)))
    except Exception as error:  # the library raises nothing narrower
        raise RefusedError("%s: the vocabulary cannot be read: %s" % (path, error)) from error


def parse_bpe(text: str) -> Bpe:
    """Parse the text of a ``tokenizer.json``."""
    return Bpe(_library().Tokenizer.from_str(text))


def _library() -> Any:
    try:
        import tokenizers  # noqa: PLC0415 - single characters need no library
        import tokenizers.decoders  # noqa: PLC0415
        import tokenizers.models  # noqa: PLC0415
        import tokenizers.pre_tokenizers  # noqa: PLC0415
        import tokenizers.trainers  # noqa: PLC0415
    except ImportError as error:
        raise RefusedError(
            "the package tokenizers is not installed", "use --tokens characters, which does not need it"
        ) from error
    return tokenizers
