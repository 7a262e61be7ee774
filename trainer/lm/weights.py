"""Model folders of Hugging Face, ``config.json`` and ``*.safetensors``: reads and writes them."""

from __future__ import annotations

import json
import pickle
import zipfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from safetensors import SafetensorError, safe_open

from trainer.lm import families
from trainer.lm.checkpoint import Entry, write_tensors
from trainer.lm.errors import RefusedError
from trainer.lm.families import CONFIG, Theirs
from trainer.lm.model import Named, sizes
from trainer.lm.shape import Shape
from trainer.lm.tokens import GPT2, Tokens

DIGEST = "vocabulary_digest"  # in config.json: digest of the vocabulary of the training
INDEX = "model.safetensors.index.json"
# Small files that belong to a model and are kept with it: its tokens, their template, and how to generate text.
KEPT = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "preprocessor_config.json",
    "processor_config.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_LARGEST = 64 << 20  # bytes of one of these files


def read_digest(folder: Path) -> Optional[str]:
    """Return the digest of an exported model's vocabulary, or None if none is stored."""
    digest = families.read_config(folder).get(DIGEST)
    return str(digest) if digest else None


def read_kept(folder: Path) -> Dict[str, bytes]:
    """Return the small files that belong to a model (``KEPT``), and its ``config.json``.

    Raises:
        RefusedError: one of them is larger than 64 MiB, or cannot be read.
    """
    found = {}
    for name in (CONFIG, *KEPT):
        path = folder / name
        if not path.is_file():
            continue
        try:
            if path.stat().st_size > _LARGEST:
                raise RefusedError("%s is larger than 64 MiB" % path, "restore the file that came with the model")
            found[name] = path.read_bytes()
        except OSError as error:
            raise RefusedError("%s cannot be read: %s" % (path, error.strerror), "ls -l %s" % path) from error
    return found


class _Stored:
    """The tensors of a folder by name. A context manager, because it keeps files open."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self._folder = folder
        self._name = partial(shape.format.stored_name, shape)
        self._open = ExitStack()
        self._readers: Dict[str, Callable[[], torch.Tensor]] = {}

    def __enter__(self) -> _Stored:  # noqa: PYI034 - Self is Python 3.11's
        _check_shards(self._folder)
        files = sorted(self._folder.glob("*.safetensors"))
        for path in files:
            file: Any = self._open.enter_context(safe_open(str(path), framework="pt"))
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                self._readers[self._name(name)] = partial(file.get_tensor, name)
        if not files:
            found = sorted(self._folder.glob("pytorch_model*.bin"))
            if not found:
                raise RefusedError("%s contains no weights" % self._folder, "copy model.safetensors beside config.json")
            for path in found:
                maps = zipfile.is_zipfile(path)  # files from before torch 1.6 are not archives and cannot be mapped
                held = torch.load(path, map_location="cpu", weights_only=True, mmap=maps)
                self._readers.update({self._name(name): partial(held.__getitem__, name) for name in held})
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor. Files of older versions of GPT-2 lack the prefix of its names."""
        read = self._readers.get(name) or self._readers.get(name.partition(".")[2])
        if read is None:
            raise RefusedError("%s has no %s" % (self._folder, name), "use a complete copy of the model")
        return read()


def _check_shards(folder: Path) -> None:
    """Refuse a folder whose index names a file that is not there."""
    path = folder / INDEX
    if not path.is_file():
        return
    try:
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / Path(name).name).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = "%s cannot be read: %s" % (path, error)
        raise RefusedError(what, "restore the file that came with the weights") from error
    if missing:
        what = "%s names %d files, but %s is missing" % (path, len(names), missing[0])
        raise RefusedError(what, "copy %s of the model to %s" % (missing[0], folder))


def read(shape: Shape, folder: Path, prefix: str = "") -> Iterator[Named]:
    """Yield the weights of a model one by one, in our layout, without positions beyond its block.

    ``prefix``: only those whose names start with it.

    Raises:
        RefusedError: weights are missing or have another shape.
    """
    try:
        with _Stored(shape, folder) as stored:
            for name, size in sizes(shape).items():
                if not name.startswith(prefix):
                    continue
                wanted = _unpadded(shape, name, size)
                parts = [_ours(stored, each, name, wanted, folder) for each in shape.format.theirs(shape, name)]
                tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
                yield name, F.pad(tensor, (0, 0, 0, size[0] - wanted[0])) if size != wanted else tensor
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError) as error:
        raise RefusedError("%s cannot be read: %s" % (folder, error), "copy the folder again") from error


def _ours(stored: _Stored, each: Theirs, name: str, size: torch.Size, folder: Path) -> torch.Tensor:
    tensor = stored.take(each.name)
    if each.turned and tensor.dim() > 1:
        tensor = tensor.t()
    if name == "places.weight":
        tensor = tensor[: size[0]]
    _check_size(folder, each.name, tensor.shape, torch.Size(each.size or (each.rows or size[0], *size[1:])))
    return tensor.reshape(size) if each.size else tensor


def _check_size(folder: Path, name: str, found: torch.Size, wanted: torch.Size) -> None:
    if found != wanted:
        what = "%s: %s is %s, config.json says %s" % (folder, name, list(found), list(wanted))
        raise RefusedError(what, "use the config.json that came with the weights")


def export(
    shape: Shape,
    whole: Callable[[str, torch.Size], torch.Tensor],
    folder: Path,
    vocabulary: Optional[Tokens] = None,
    kept: Mapping[str, bytes] = {},
    dtype: str = "float32",
) -> None:
    """Write a model for transformers.

    Args:
        shape: of the model.
        whole: returns a padded parameter by name and size.
        folder: an existing folder.
        vocabulary: of the training, if known; its end token becomes the model's, so that generated text can end.
        kept: the files of the model that the training started from: end token, template and more stay as they were.
        dtype: of the written weights; one of ``checkpoint.WRITTEN``.

    Raises:
        OSError: the disk is full.
    """
    wanted = sizes(shape)
    entries: List[Entry] = []
    for name, padded in wanted.items():
        for each in shape.format.theirs(shape, name):
            size = list(each.size or _unpadded(shape, name, padded))
            size[0] = each.rows or size[0]
            entries.append(Entry(each.name, size[::-1] if each.turned else size, dtype))
    unused = shape.format.unused(shape)
    entries.extend(Entry(name, size, dtype) for name, (size, _) in unused.items())

    def tensors() -> Iterator[torch.Tensor]:
        for name, size in wanted.items():
            tensor = whole(name, size)[: _unpadded(shape, name, size)[0]]
            for each in shape.format.theirs(shape, name):
                part = tensor[each.start : each.start + each.rows] if each.rows else tensor
                yield part.t().contiguous() if each.turned else part
        for size, value in unused.values():
            yield torch.full(size, value)

    write_tensors(folder / "model.safetensors", entries, tensors())
    for name, content in kept.items():
        (folder / name).write_bytes(content)
    for name, config in _configs(shape, vocabulary, kept, dtype).items():
        (folder / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _unpadded(shape: Shape, name: str, size: torch.Size) -> torch.Size:
    has_padding = name in ("embed.weight", "head.weight")
    return torch.Size((shape.vocab_size, *size[1:])) if has_padding else size


def _configs(
    shape: Shape, vocabulary: Optional[Tokens], kept: Mapping[str, bytes], dtype: str
) -> Dict[str, Dict[str, Any]]:
    """Return the contents of ``config.json`` and, unless the model had one, ``generation_config.json``."""
    digest = {DIGEST: vocabulary.digest} if vocabulary else {}
    ours = {**shape.format.config_of(shape), "torch_dtype": dtype, **digest}
    if CONFIG in kept:
        before = {**shape.format.updated(shape, json.loads(kept[CONFIG])), "torch_dtype": dtype, **digest}
        before.pop("dtype", None)  # transformers 5 calls it so, and would prefer it
        return {CONFIG: before}
    end = vocabulary.end if vocabulary else GPT2 - 1 if shape.vocab_size == GPT2 else None
    ends = {"bos_token_id": end, "eos_token_id": end}
    return {CONFIG: {**ours, **ends}, "generation_config.json": ends}
