"""GPT-2 weights in Hugging Face's format, ``config.json`` and ``model.safetensors``: reads and writes them.

https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/gpt2/modeling_gpt2.py: its matrices
are Conv1D's, the transpose of Linear's, and ``lm_head`` is the embedding. Files of older versions lack the prefix
``transformer.`` and contain attention masks.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from safetensors import SafetensorError, safe_open

from trainer.bounds import Bound
from trainer.lm.checkpoint import Entry, write_tensors
from trainer.lm.errors import RefusedError
from trainer.lm.model import Named, Shape, sizes
from trainer.lm.tokens import Tokens

TURNED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
PREFIX = "transformer."
DIGEST = "vocabulary_digest"  # in config.json: digest of the vocabulary of the training
GPT2 = 50257  # tokens of GPT-2's vocabulary, whose last one ends a text
_SIZE = Bound(low=1, high=1 << 24)
_NEEDED = ("n_layer", "n_head", "n_embd", "vocab_size")


def read_shape(folder: Path) -> Shape:
    """Read the shape of the model in a Hugging Face folder.

    Raises:
        RefusedError: config.json is missing, or describes another kind of model.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RefusedError(
            "%s cannot be read: %s" % (path, error), "name a folder with config.json and weights"
        ) from error
    if not isinstance(config, dict):
        raise RefusedError("%s is not a JSON object" % path, "use the config.json that came with the weights")
    if config.get("model_type", "gpt2") != "gpt2":
        raise RefusedError("%s: a model of type %s, not gpt2" % (path, config["model_type"]), "use a GPT-2 folder")
    positions: Any = config.get("n_positions", config.get("n_ctx"))
    missing = [key for key in _NEEDED if key not in config] + ([] if positions else ["n_positions"])
    if missing:
        raise RefusedError(
            "%s has no %s" % (path, ", ".join(missing)), "use the config.json that came with the weights"
        )
    if config.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
        raise RefusedError(
            "%s: activation %s is not GPT-2's" % (path, config["activation_function"]), "use a GPT-2 folder"
        )
    found = {**{key: config[key] for key in _NEEDED}, "n_positions": positions}
    for key, size in found.items():
        if type(size) is not int or not _SIZE.allows(size):
            raise RefusedError("%s: %s %r must be %s" % (path, key, size, _SIZE), "use the config.json of the weights")
    if found["n_embd"] % found["n_head"]:
        what = "%s: n_embd %d must be a multiple of n_head %d" % (path, found["n_embd"], found["n_head"])
        raise RefusedError(what, "use the config.json that came with the weights")
    return Shape(config["n_layer"], config["n_head"], config["n_embd"], positions, config["vocab_size"])


def read_digest(folder: Path) -> Optional[str]:
    """Return the digest of an exported model's vocabulary, or None if none is stored."""
    digest = json.loads((folder / "config.json").read_text(encoding="utf-8")).get(DIGEST)
    return str(digest) if digest else None


def _tensors(folder: Path) -> Iterator[Any]:
    """Yield the names and tensors of all files of a folder, one by one."""
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                yield name, file.get_tensor(name)
    if not files:
        found = sorted(folder.glob("pytorch_model*.bin"))
        if not found:
            raise RefusedError("%s contains no weights" % folder, "copy model.safetensors beside config.json")
        for path in found:
            maps = zipfile.is_zipfile(path)  # files from before torch 1.6 are not archives and cannot be mapped
            yield from torch.load(path, map_location="cpu", weights_only=True, mmap=maps).items()


def read(shape: Shape, folder: Path) -> Iterator[Named]:
    """Yield the weights of a model one by one, in our layout, without positions beyond its block.

    Raises:
        RefusedError: weights are missing or have another shape.
    """
    wanted = sizes(shape)
    try:
        for name, theirs in _tensors(folder):
            ours = name if name.startswith(PREFIX) else PREFIX + name
            size = wanted.pop(ours, None)
            if size is None:
                continue  # masks and lm_head
            tensor = theirs.t() if TURNED.search(ours) else theirs
            if ours.endswith("wpe.weight"):
                tensor = tensor[: size[0]]
            elif ours.endswith("wte.weight"):
                tensor = F.pad(tensor, (0, 0, 0, max(0, shape.rows - len(tensor))))
            if size != tensor.shape:
                what = "%s: %s is %s, config.json says %s" % (folder, name, list(tensor.shape), list(size))
                raise RefusedError(what, "use the config.json that came with the weights")
            yield ours, tensor
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError) as error:
        raise RefusedError("%s cannot be read: %s" % (folder, error), "copy the folder again") from error
    if wanted:
        raise RefusedError("%s has no %s" % (folder, min(wanted)), "use a complete copy of the model")


def export(
    shape: Shape, whole: Callable[[str, torch.Size], torch.Tensor], folder: Path, vocabulary: Optional[Tokens] = None
) -> None:
    """Write fp32 weights for transformers. ``whole`` returns a padded parameter by name and size.

    Both configurations name the vocabulary's end token, so that generated text can end.

    Raises:
        OSError: the disk is full.
    """
    entries: List[Entry] = []
    for name, padded in sizes(shape).items():
        size = list(padded)
        if name.endswith("wte.weight"):
            size[0] = shape.vocab_size
        entries.append(Entry(name, size[::-1] if TURNED.search(name) else size))

    def tensors() -> Iterator[torch.Tensor]:
        for name, size in sizes(shape).items():
            tensor = whole(name, size)
            if name.endswith("wte.weight"):
                tensor = tensor[: shape.vocab_size]
            yield tensor.t().contiguous() if TURNED.search(name) else tensor

    write_tensors(folder / "model.safetensors", entries, tensors())
    end = vocabulary.end if vocabulary else GPT2 - 1 if shape.vocab_size == GPT2 else None
    ends = {"bos_token_id": end, "eos_token_id": end}
    digest = {DIGEST: vocabulary.digest} if vocabulary else {}
    for name, content in (("config.json", {**_config(shape), **ends, **digest}), ("generation_config.json", ends)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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
