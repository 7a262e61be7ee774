"""The tokens of conversations with images: one token for each image, its size, and where it is.

Beside the files of ``trainer.lm.tokenized``, the folder has:

==================  ===================================================================================================
``counts.bin``      a uint32 per sample: its images
``images.bin``      four uint32 per image: height, width, whether the reference is the image itself, bytes of this
``references.bin``  the references: paths as records have them, or the images that were in records
==================  ===================================================================================================
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, ClassVar, Dict, List, Sequence, Tuple

import numpy as np

from trainer.lm import chat, conversations, tokenized, tokens
from trainer.lm.conversations import Conversation
from trainer.lm.errors import RefusedError
from trainer.lm.tokenized import Files
from trainer.vlm.images import Reference, reference, size_of
from trainer.vlm.processing import IMAGE, IMAGE_PAD, Processing

Known = List[Tuple[Reference, Tuple[int, int]]]


class Encoder(tokenized.Encoder):
    """Encodes groups of records in a process. It opens each image."""

    def __init__(
        self,
        tokenizer: str,
        template: Tuple[str, Dict[str, str], str],
        skips: bool,
        token: str,
        folder: str,
        decodes: bool,
    ) -> None:
        super().__init__(tokenizer, template, skips)
        self._token = token
        self._folder = Path(folder)
        self._decodes = decodes
        self._takes_parts = "image" in self.template.source

    def read(self, record: Dict[str, Any], place: str) -> Tuple[chat.Rendered, Known]:
        """See ``trainer.lm.tokenized.Encoder``."""
        conversation = conversations.read_with_images(record, place)
        found = [reference(each, place) for each in conversation.images]
        known = [(each, size_of(each, self._folder, place, self._decodes)) for each in found]
        rendered = self.template.render(self._with_contents(conversation), place)
        count = rendered.text.count(self._token)
        if count != len(known):
            what = "%s: %s makes %d image tokens (%s) of %d images"
            fix = "remove the token from the texts, or use a template for images"
            raise RefusedError(what % (place, self.template.where, count, self._token, len(known)), fix)
        return rendered, known

    def _with_contents(self, conversation: Conversation) -> Conversation:
        """Return the contents as the template takes them: parts, or texts in which images are image tokens.

        A template for parts decides what is between an image and a text, so LLaVA's line ends around images are
        removed for it.
        """
        messages = []
        for message in conversation.messages:
            parts: Any = message["content"]
            if not self._takes_parts:
                parts = "".join(part.get("text", self._token) for part in parts)
            elif any(part["type"] == "image" for part in parts):
                texts = [{**part, "text": part["text"].strip("\n")} if "text" in part else part for part in parts]
                parts = [part for part in texts if part.get("text", "image")]
            messages.append({**message, "content": parts})
        return replace(conversation, messages=messages)

    def more(self, known: Sequence[Any]) -> Files:
        """See ``trainer.lm.tokenized.Encoder``."""
        rows: List[Tuple[int, int, int, int]] = []
        data: List[bytes] = []
        for image, size in (each for sample in known for each in sample):
            data.append(image.at if isinstance(image.at, bytes) else image.at.encode("utf-8", "surrogatepass"))
            rows.append((*size, isinstance(image.at, bytes), len(data[-1])))
        counts = [len(sample) for sample in known]
        numbers = [np.asarray(each, dtype="<u4").tobytes() for each in (counts, rows)]
        return {"counts": numbers[0], "images": numbers[1], "references": b"".join(data)}


@dataclass(frozen=True)
class Encoding(tokenized.Encoding):
    """How records with images become tokens. ``token``: the text of an image token; ``images``: their folder.

    ``decodes``: see ``trainer.vlm.images.size_of``.
    """

    token: str = IMAGE
    images: str = "."
    decodes: bool = False
    files: ClassVar[Sequence[str]] = (*tokenized.Encoding.files, "counts", "images", "references")

    @property
    def encoder(self) -> Callable[..., Encoder]:
        """See ``trainer.lm.tokenized.Encoding``."""
        return Encoder

    @property
    def arguments(self) -> Tuple[Any, ...]:
        """See ``trainer.lm.tokenized.Encoding``."""
        return (*super().arguments, self.token, self.images, self.decodes)

    @property
    def digest(self) -> str:
        """See ``trainer.lm.tokenized.Encoding``."""
        return hashlib.sha256(json.dumps([super().digest, self.token]).encode()).hexdigest()

    @property
    def variant(self) -> str:
        """See ``trainer.lm.tokenized.Encoding``."""
        return "-" + hashlib.sha256(json.dumps([self.images, self.decodes]).encode()).hexdigest()[:8]


def with_token(tokenizer: str, processing: Processing) -> Tuple[str, str, Processing]:
    """Return a tokenizer that has the image token, the token's text, and the processing with its number.

    A language model that is put behind a tower has no image token, unless it is Qwen2's or later. It gets the next
    number, for which most models have an embedding.

    Raises:
        RefusedError: the tokenizer has no token with the model's number.
    """
    found = tokens.parse_bpe(tokenizer).tokenizer
    if processing.token >= 0:
        text = found.id_to_token(processing.token)
        if text is None:
            what = "the model's image token is %d, but tokenizer.json has no such token" % processing.token
            raise RefusedError(what, "copy tokenizer.json from the model again")
    else:
        known = next((name for name in (IMAGE, IMAGE_PAD) if found.token_to_id(name) is not None), IMAGE)
        text = processing.token_text or known
        if found.token_to_id(text) is None:
            found.add_special_tokens([text])
            tokenizer = found.to_str()
    number = found.token_to_id(text)
    if found.encode(text, add_special_tokens=False).ids != [number]:
        what = "tokenizer.json does not encode %s as its token %d" % (text, number)
        raise RefusedError(what, "copy tokenizer.json from the model again")
    return tokenizer, text, replace(processing, token=number)
