"""LoRA (arXiv 2106.09685): trains small matrices A and B beside the frozen matrices of a model, as peft does.

A matrix W with an adapter computes ``W x + scale B A x``. The adapters are peft's: one for each of Hugging Face's
matrices, although some of ours join several of them (``families.theirs``). Checkpoints contain the adapters only, and a
record of the model that they belong to, the *base*.

``--quantize nf4`` (QLoRA, arXiv 2305.14314) keeps the frozen matrices of the layers in 4 bits. It needs bitsandbytes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple, Union

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn

from trainer.lm import checkpoint, families, weights
from trainer.lm.checkpoint import Checkpoint, Entry, Reader, write_tensors
from trainer.lm.config import Config
from trainer.lm.errors import RefusedError
from trainer.lm.model import Decoder, Named, fill, sizes
from trainer.lm.model import put as model_put
from trainer.lm.shape import Shape

ADAPTER = "adapter_model.safetensors"  # peft's names of its files
ADAPTER_CONFIG = "adapter_config.json"
_PARTS = ("lora_A", "lora_B")
_SAMPLE = 1 << 16  # bytes at each end of a file that the digest of a base covers
_HEADER = 100 << 20  # bytes of a safetensors header at most, as in the library


@dataclass(frozen=True)
class Settings:
    """The options of the adapters. ``alpha`` 0 is twice the rank. ``targets``: names, or ``all``."""

    rank: int
    alpha: float
    dropout: float
    targets: str
    rslora: bool

    @property
    def scale(self) -> float:
        """The factor of the adapters' outputs; rsLoRA (arXiv 2312.03732) divides by the rank's square root."""
        alpha = self.alpha or 2.0 * self.rank
        return alpha / math.sqrt(self.rank) if self.rslora else alpha / self.rank


def settings_of(options: Mapping[str, Any]) -> Settings:
    """Return the settings among the options of a training."""
    names = ("rank", "alpha", "dropout", "targets", "rslora")
    return Settings(**{name: options["lora_" + name] for name in names})


class Place(NamedTuple):
    """One adapter: for ``rows`` rows from ``start`` of our matrix ``module``, which is Hugging Face's ``theirs``."""

    module: str
    theirs: str
    start: int
    rows: int
    width: int

    @property
    def target(self) -> str:
        """The name that ``--lora-targets`` has for it."""
        return self.theirs.rpartition(".")[2]

    def tensors(self, rank: int) -> Iterator[Tuple[str, str, torch.Size]]:
        """Yield our name, peft's name and the size of A, then of B."""
        for part, size in zip(_PARTS, ((rank, self.width), (self.rows, rank))):  # noqa: B905 - two each
            ours = "%s.adapters.%s.%s" % (self.module, self.target, part)
            yield ours, "base_model.model.%s.%s.weight" % (self.theirs, part), torch.Size(size)


def places(shape: Shape, targets: str) -> List[Place]:
    """Return the adapters of a model.

    Raises:
        RefusedError: a target does not exist.
    """
    found = []
    for name, size in sizes(shape).items():
        if name.startswith("layers.") and name.endswith(".weight") and len(size) > 1:
            for each in shape.format.theirs(shape, name):
                rows = each.rows or size[0]
                found.append(Place(name[: -len(".weight")], each.name[: -len(".weight")], each.start, rows, size[1]))
    known = list(dict.fromkeys(each.target for each in found))
    chosen = known if targets == "all" else targets.split(",")
    unknown = [name for name in chosen if name not in known]
    if unknown:
        what = "--lora-targets %s: a %s model has no %s" % (
            targets,
            shape.family,
            unknown[0] or "target without a name",
        )
        raise RefusedError(what, "--lora-targets all, or some of %s" % ",".join(known))
    return [each for each in found if each.target in chosen]


class Adapter(nn.Module):
    """A and B for the rows of a matrix from ``start`` to ``stop``."""

    def __init__(self, place: Place, settings: Settings) -> None:
        super().__init__()
        self.start, self.stop = place.start, place.start + place.rows
        self.scale, self.dropout = settings.scale, settings.dropout
        self.lora_A = nn.Parameter(torch.empty(settings.rank, place.width))
        self.lora_B = nn.Parameter(torch.empty(place.rows, settings.rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., width) to what is added to these rows, (..., rows)."""
        x = F.dropout(x, self.dropout, self.training)
        return F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale


class Adapted(nn.Module):
    """A frozen matrix with adapters. Its own parameters keep their names."""

    def __init__(self, weight: Optional[nn.Parameter], bias: Optional[nn.Parameter]) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.adapters = nn.ModuleDict()  # in the order of their rows

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the frozen matrix."""
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., width) to (..., rows)."""
        y = self.product(x)
        parts, at = [], 0
        for each in self.adapters.values():
            parts += [y[..., at : each.start], y[..., each.start : each.stop] + each(x)]
            at = each.stop
        parts.append(y[..., at:])
        parts = [part for part in parts if part.shape[-1]]
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


class Quantized(Adapted):
    """The same with the frozen matrix in 4 bits, and bias and adapters, if any, of another module."""

    def __init__(self, weight: torch.Tensor, module: Union[nn.Linear, Adapted]) -> None:
        from bitsandbytes import functional  # noqa: PLC0415 - it is optional

        super().__init__(None, module.bias)
        if isinstance(module, Adapted):
            self.adapters = module.adapters
        packed, self.state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        self.register_buffer("packed", packed, persistent=False)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the frozen matrix."""
        import bitsandbytes  # noqa: PLC0415 - it is optional

        y: torch.Tensor = bitsandbytes.matmul_4bit(x, self.packed.t(), bias=self.bias, quant_state=self.state)
        return y


def check_quantize() -> None:
    """Refuse 4 bits without bitsandbytes.

    Raises:
        RefusedError: it is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        what = "--quantize nf4 needs the package bitsandbytes, which is not installed"
        raise RefusedError(what, "pip install bitsandbytes; or --quantize none")


def make_model(
    shape: Shape,
    base: Base,
    config: Config,
    device: torch.device,
    dtype: torch.dtype,
    shard: Optional[Callable[[Decoder], None]] = None,
    put: Callable[[nn.Parameter, torch.Tensor], None] = model_put,
) -> Decoder:
    """Create the model with the frozen weights of its base in ``dtype``, and new adapters in fp32.

    The weights are read one by one, so no copy of the model in fp32 exists.

    Args:
        shape: of the model.
        base: whose weights are frozen.
        config: with the options of the adapters.
        device: on which adapters are drawn.
        dtype: of the frozen weights.
        shard: allocates the model, which is on ``meta``; None: whole, on the device.
        put: copies a whole tensor into a parameter of it.

    Raises:
        RefusedError: the base cannot be read, a target does not exist, or 4 bits are not possible.
    """
    settings = settings_of(vars(config))
    wanted = places(shape, settings.targets)
    quantizes = config.quantize != "none"
    if quantizes:
        check_quantize()
    with torch.device("meta"):
        model = shape.make(config.dropout, config.checkpointing)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)
        for place in wanted:
            linear: Any = model.get_submodule(place.module)
            if not isinstance(linear, Adapted):
                linear = Adapted(linear.weight, linear.bias)
                model.set_submodule(place.module, linear)
            linear.adapters[place.target] = Adapter(place, settings)
    matrices = _take_matrices(model) if quantizes else {}
    if shard is None:
        model.to_empty(device=device)
    else:
        shard(model)
    for name, tensor in base.weights(shape):
        if name in matrices:
            held = tensor.to(device, dtype, copy=True).contiguous()
            model.set_submodule(name.rpartition(".")[0], Quantized(held, matrices[name]))
        else:
            fill(model, [(name, tensor)], put)
    fill(model, first_weights(wanted, settings.rank, config.seed, device), put)
    return model


def _take_matrices(model: Decoder) -> Dict[str, Any]:
    """Take the weights from the matrices of the layers. Return their modules by the weight's name."""
    found = {}
    for name, module in model.named_modules():
        if name.startswith("layers.") and isinstance(module, (nn.Linear, Adapted)):
            module.weight = None
            found[name + ".weight"] = module
    return found


def first_weights(chosen: List[Place], rank: int, seed: int, device: torch.device) -> Iterator[Named]:
    """Yield the initial weights of adapters, by parameter: A as torch's Linear, and so peft, draws it, and B is 0."""
    generator = torch.Generator(device).manual_seed(seed)
    for place in chosen:
        limit = 1 / math.sqrt(place.width)
        (first, _, of_first), (second, _, of_second) = place.tensors(rank)
        yield first, torch.empty(of_first, device=device).uniform_(-limit, limit, generator=generator)
        yield second, torch.zeros(of_second, device=device)


def described(model: nn.Module, config: Config) -> str:
    """Return a line about the adapters."""
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    line = "LoRA: rank %d, %s, %s trained parameters" % (config.lora_rank, config.lora_targets, format(trained, ","))
    return line + (", base in 4 bits (nf4)" if config.quantize == "nf4" else "")


@dataclass(frozen=True)
class Base:
    """The model that adapters belong to: a Hugging Face folder, or a checkpoint."""

    folder: Path
    digest: str

    @property
    def record(self) -> Dict[str, str]:
        """What a checkpoint stores."""
        return {"folder": str(self.folder), "digest": self.digest}

    def weights(self, shape: Shape) -> Iterator[Named]:
        """Yield the weights one by one, in the order of ``sizes``.

        Raises:
            RefusedError: weights are missing or have another shape.
        """
        if not checkpoint.is_checkpoint(self.folder):
            yield from weights.read(shape, self.folder)
            return
        with checkpoint.find(self.folder).reader() as reader:
            for name, size in sizes(shape).items():
                yield name, reader.whole(name, size)


def find_base(folder: Path) -> Base:
    """Find a base.

    Raises:
        RefusedError: there is none, its files cannot be read, or it consists of adapters.
    """
    if checkpoint.is_checkpoint(folder):
        found = checkpoint.find(folder)
        if found.state.base:
            what = "%s contains adapters, not a whole model" % folder
            raise RefusedError(what, "python -m trainer.lm.export %s MERGED, then --init MERGED" % folder)
        folder = found.folder
    names = (checkpoint.COMPLETE, families.CONFIG, weights.INDEX)
    paths = [folder / name for name in names if (folder / name).is_file()]
    tensors = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not paths or not tensors:
        raise RefusedError("%s: no model" % folder, "name a folder with config.json and weights, or a checkpoint")
    try:
        return Base(folder.resolve(), _digest([*paths, *tensors]))
    except OSError as error:
        raise RefusedError("%s cannot be read: %s" % (folder, error.strerror), "ls -l %s" % folder) from error


def _digest(paths: List[Path]) -> str:
    """Return a digest of names, sizes and both ends of files: their headers, and weights that a fine-tuning changes."""
    total = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        total.update(("%s %d\n" % (path.name, size)).encode())
        with path.open("rb") as file:
            head = int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else 0
            file.seek(0)
            total.update(file.read(min(head, _HEADER) + _SAMPLE))
            file.seek(max(0, size - _SAMPLE))
            total.update(file.read(_SAMPLE))
    return total.hexdigest()


def base_of(found: Checkpoint, folder: Optional[Path] = None) -> Base:
    """Find the base of a checkpoint's adapters again: in ``folder``, or where it was.

    Raises:
        RefusedError: it does not exist, or is another model.
    """
    record = found.state.base or {}
    folder = folder or Path(record["folder"])
    if not folder.exists():
        raise RefusedError("%s: its base model %s does not exist" % (found.folder, folder), "copy the model there")
    base = find_base(folder)
    if base.digest != record["digest"]:
        what = "%s: its adapters belong to another model than the one in %s" % (found.folder, folder)
        raise RefusedError(what, "restore the model that was at %s when the training started" % record["folder"])
    return base


def weights_of(found: Checkpoint, reader: Reader, folder: Optional[Path] = None) -> Iterator[Named]:
    """Yield the weights of a checkpoint in the order of ``sizes``, with its adapters merged into their base.

    Args:
        found: the checkpoint.
        reader: of it.
        folder: of the base; None: where it was.

    Raises:
        RefusedError: see ``base_of``.
    """
    shape = found.state.shape
    if not found.state.base:
        for name, size in sizes(shape).items():
            yield name, reader.whole(name, size)
        return
    settings = settings_of(found.state.config)
    by_name: Dict[str, List[Place]] = {}
    for place in places(shape, settings.targets):
        by_name.setdefault(place.module + ".weight", []).append(place)
    for name, tensor in base_of(found, folder).weights(shape):
        if name in by_name:
            tensor = tensor.to(torch.float32, copy=True)  # noqa: PLW2901 - the merged one
        for place in by_name.get(name, ()):
            first, second = (reader.whole(ours, size) for ours, _, size in place.tensors(settings.rank))
            tensor[place.start : place.start + place.rows] += settings.scale * (second @ first)
        yield name, tensor


def in_order(named: Iterator[Named]) -> Callable[[str, torch.Size], torch.Tensor]:
    """Return a function that returns the parameters one by one, by name, in the order in which they come."""

    def whole(name: str, _: torch.Size) -> torch.Tensor:
        found, tensor = next(named)
        assert found == name, (found, name)
        return tensor

    return whole


def export_adapter(found: Checkpoint, reader: Reader, folder: Path, dtype: str) -> None:
    """Write a folder for peft's ``PeftModel.from_pretrained``.

    Raises:
        RefusedError: the checkpoint contains no adapters.
        OSError: the disk is full.
    """
    if not found.state.base:
        raise RefusedError("%s contains no adapters" % found.folder, "export it without --adapter")
    shape, settings = found.state.shape, settings_of(found.state.config)
    chosen = places(shape, settings.targets)
    targets, names = shape.format.adapted(shape, [place.theirs for place in chosen])
    renamed = [place._replace(theirs=names[place.theirs]) for place in chosen]
    tensors = [each for place in renamed for each in place.tensors(settings.rank)]
    entries = [Entry(name, list(size), dtype) for _, name, size in tensors]
    write_tensors(folder / ADAPTER, entries, (reader.whole(ours, size) for ours, _, size in tensors))
    alpha = settings.alpha or 2.0 * settings.rank
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": found.state.base["folder"],
        "r": settings.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rslora,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": shape.is_gpt2,
        "inference_mode": True,
    }
    for name, held in found.kept().items():  # the tokens and their template, as peft's folders have them
        if name != families.CONFIG:
            (folder / name).write_bytes(held)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
