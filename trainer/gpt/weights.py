"""Weights of Hugging Face's GPT-2 in and out: ``config.json`` and ``model.safetensors``, as transformers has them.

https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/gpt2/modeling_gpt2.py: matrices are
Conv1D's, which lie the other way round than Linear's; ``lm_head`` is the embedding. Older files have neither the prefix
``transformer.`` nor the masks left out.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from safetensors import SafetensorError, safe_open

from trainer.bounds import Bound
from trainer.gpt import stream
from trainer.gpt.errors import RefusedError
from trainer.gpt.model import Named, Shape, sizes
from trainer.gpt.stream import Entry
from trainer.gpt.tokens import Tokens

TURNED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
PREFIX = "transformer."
DIGEST = "vocabulary_digest"  # in config.json: of the vocabulary that the model was trained with
GPT2 = 50257  # tokens of GPT-2's vocabulary, whose last one ends a text
_SIZE = Bound(low=1, high=1 << 24)
_NEEDED = ("n_layer", "n_head", "n_embd", "vocab_size")


def read_shape(folder: Path) -> Shape:
    """What a Hugging Face folder holds.

    Raises:
        RefusedError: no GPT-2, or nothing that says so.
    """
    path = folder / "config.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RefusedError("%s cannot be read: %s" % (path, error), "a folder with config.json and weights") from error
    if not isinstance(said, dict):
        raise RefusedError("%s: no object" % path, "the config.json that came with the weights")
    if said.get("model_type", "gpt2") != "gpt2":
        raise RefusedError("%s: a model of type %s, not gpt2" % (path, said["model_type"]), "a GPT-2 folder")
    places = said.get("n_positions", said.get("n_ctx"))
    missing = [key for key in _NEEDED if key not in said] + ([] if places else ["n_positions"])
    if missing:
        raise RefusedError("%s has no %s" % (path, ", ".join(missing)), "the config.json that came with the weights")
    if said.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        raise RefusedError("%s: activation %s is not GPT-2's" % (path, said["activation_function"]), "a GPT-2 folder")
    found = {**{key: said[key] for key in _NEEDED}, "n_positions": places}
    for key, size in found.items():
        if type(size) is not int or not _SIZE.allows(size):
            raise RefusedError("%s: %s %r must be %s" % (path, key, size, _SIZE), "the config.json of the weights")
    if found["n_embd"] % found["n_head"]:
        what = "%s: n_embd %d must be a multiple of n_head %d" % (path, found["n_embd"], found["n_head"])
        raise RefusedError(what, "the config.json that came with the weights")
    return Shape(said["n_layer"], said["n_head"], said["n_embd"], places, said["vocab_size"])


def read_digest(folder: Path) -> Optional[str]:
    """The digest of the vocabulary that an exported model was trained with; None where no one wrote it."""
    said = json.loads((folder / "config.json").read_text(encoding="utf-8")).get(DIGEST)
    return str(said) if said else None


def _tensors(folder: Path) -> Iterator[Any]:
    """Names and tensors of all files of a folder, which are read one by one."""
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                yield name, file.get_tensor(name)
    if not files:
        found = sorted(folder.glob("pytorch_model*.bin"))
        if not found:
            raise RefusedError("%s: there are no weights" % folder, "model.safetensors beside config.json")
        for path in found:
            maps = zipfile.is_zipfile(path)  # files of before torch 1.6 are no archives, and are read at once
            yield from torch.load(path, map_location="cpu", weights_only=True, mmap=maps).items()


def read(shape: Shape, folder: Path) -> Iterator[Named]:
    """The weights of a model, one after the other, as ours lie; places beyond its block are left out.

    Raises:
        RefusedError: weights that are missing, or of another shape.
    """
    wanted = sizes(shape)
    try:
        for name, theirs in _tensors(folder):
            ours = name if name.startswith(PREFIX) else PREFIX + name
            size = wanted.pop(ours, None)
            if size is None:
                continue  # masks, and lm_head
            tensor = theirs.t() if TURNED.search(ours) else theirs
            if ours.endswith("wpe.weight"):
                tensor = tensor[: size[0]]
            elif ours.endswith("wte.weight"):
                tensor = F.pad(tensor, (0, 0, 0, max(0, shape.rows - len(tensor))))
            if size != tensor.shape:
                what = "%s: %s is %s, config.json says %s" % (folder, name, list(tensor.shape), list(size))
                raise RefusedError(what, "the config.json that came with the weights")
            yield ours, tensor
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError) as error:
        raise RefusedError("%s cannot be read: %s" % (folder, error), "copy the folder again") from error
    if wanted:
        raise RefusedError("%s has no %s" % (folder, min(wanted)), "a complete copy of the model")


def export(
    shape: Shape, whole: Callable[[str, torch.Size], torch.Tensor], folder: Path, vocabulary: Optional[Tokens] = None
) -> None:
    """Write fp32 weights as transformers loads them. ``whole`` gives one by name and size, with padding.

    Text that transformers generates ends at the vocabulary's end token, which both configurations name.

    Raises:
        OSError: there is no room.
    """
    entries: List[Entry] = []
    for name, padded in sizes(shape).items():
        size = list(padded)
        if name.endswith("wte.weight"):
            size[0] = shape.vocab_size
        entries.append(Entry(name, size[::-1] if TURNED.search(name) else size))

    def made() -> Iterator[torch.Tensor]:
        for name, size in sizes(shape).items():
            tensor = whole(name, size)
            if name.endswith("wte.weight"):
                tensor = tensor[: shape.vocab_size]
            yield tensor.t().contiguous() if TURNED.search(name) else tensor

    stream.write(folder / "model.safetensors", entries, made())
    end = vocabulary.end if vocabulary else GPT2 - 1 if shape.vocab_size == GPT2 else None
    ends = {"bos_token_id": end, "eos_token_id": end}
    digest = {DIGEST: vocabulary.digest} if vocabulary else {}
    for name, told in (("config.json", {**_config(shape), **ends, **digest}), ("generation_config.json", ends)):
        (folder / name).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _config(shape: Shape) -> Dict[str, Any]:
    sizes = {"n_layer": shape.n_layer, "n_head": shape.n_head, "n_embd": shape.n_embd}
    fixed = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **sizes,
        "n_positions": shape.block_size,
        "n_ctx": shape.block_size,
        "vocab_size": shape.vocab_size,
        **fixed,
        "torch_dtype": "float32",
    }
