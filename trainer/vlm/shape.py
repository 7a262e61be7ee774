"""The sizes of a vision-language model: those of its decoder, and of its vision tower. It needs no torch.

Two kinds of models, as transformers v5.6.0 defines them (``src/transformers/models``): ``llava_onevision`` with a tower
of SigLIP or CLIP and a decoder of type llama, qwen2 or qwen3, and ``qwen2_5_vl`` with its own tower.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Mapping, Tuple

from trainer.lm.shape import Shape, known_fields

if TYPE_CHECKING:
    from trainer.lm.families import Format
    from trainer.vlm.model import VisionLanguage

KINDS = ("llava_onevision", "qwen2_5_vl")


@dataclass(frozen=True)
class Tower:
    """The sizes of a vision tower (see ``LayerShape``). The defaults are those of SigLIP so400m.

    Attributes:
        kind: ``siglip``, ``clip`` or ``qwen2_5_vl``.
        n_layer: the layers that run. Layers after the one whose output is used are not part of our model.
        n_head: heads of attention.
        n_embd: width.
        inner: width between the matrices of the MLP.
        patch: side of a patch in pixels.
        side: of an image or tile in pixels; 0: any.
        channels: of a pixel.
        frames: of a patch. A still image is repeated in all of them.
        merge: side, in patches, of the square that becomes one feature.
        window: side, in pixels, of the square in which patches attend to each other; 0: the image or tile.
        whole: the numbers of the layers that attend to the whole image despite ``window``.
        norm_eps: of the norms.
        activation: of the MLP.
    """

    kind: str = "siglip"
    n_layer: int = 26
    n_head: int = 16
    n_embd: int = 1152
    inner: int = 4304
    patch: int = 14
    side: int = 384
    channels: int = 3
    frames: int = 1
    merge: int = 1
    window: int = 0
    whole: Tuple[int, ...] = ()
    norm_eps: float = 1e-6
    activation: str = "gelu_pytorch_tanh"

    qkv_bias = out_bias = mlp_bias = True
    qk_norm = False

    @property
    def is_gated(self) -> bool:
        """See ``LayerShape``."""
        return self.kind == "qwen2_5_vl"

    @property
    def has_class_token(self) -> bool:
        """Whether each image or tile starts with a token that is no patch."""
        return self.kind == "clip"

    @property
    def kv_heads(self) -> int:
        """Heads of keys and of values."""
        return self.n_head

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.n_embd // self.n_head

    @property
    def qkv(self) -> int:
        """Rows of the matrix of queries, keys and values."""
        return 3 * self.n_embd

    @property
    def pixels(self) -> int:
        """Numbers of a patch in ``Images.patches``: channels x height x width."""
        return self.channels * self.patch**2

    @property
    def grid(self) -> int:
        """Patches along a side of an image or tile; 0: any number."""
        return self.side // self.patch

    @property
    def places(self) -> int:
        """Learned positions; 0: they are rotary."""
        return self.grid**2 + self.has_class_token if self.side else 0

    @property
    def window_patches(self) -> int:
        """Patches of a window; 0: there are no windows."""
        return (self.window // self.patch) ** 2

    @property
    def feature(self) -> int:
        """Numbers that the projector makes one feature of: those of ``merge x merge`` patches."""
        return self.merge**2 * self.n_embd

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer."""
        norms = 2 * self.n_embd if self.is_gated else 4 * self.n_embd
        attention = self.n_embd * (self.qkv + 1 + self.n_embd) + self.qkv
        mlp = (2 + self.is_gated) * self.n_embd * self.inner + (1 + self.is_gated) * self.inner + self.n_embd
        return norms + attention + mlp

    @property
    def parameters(self) -> int:
        """All parameters."""
        patch = self.n_embd * self.pixels * self.frames + (self.n_embd if self.kind == "siglip" else 0)
        start = 3 * self.n_embd if self.has_class_token else 0  # and the norm after it
        return patch + start + self.places * self.n_embd + self.n_layer * self.layer_parameters


@dataclass(frozen=True)
class VlmShape(Shape):
    """The sizes of a vision-language model. Those of ``Shape`` are the decoder's.

    Attributes:
        kind: one of ``KINDS``.
        tower: of the images.
        image_token: the token that stands for a feature of an image in texts.
        projector_bias: whether the projector's matrices have biases.
        pinpoints: (height, width) in pixels of the sizes that an image may be cut into tiles at (LLaVA-OneVision).
        tiles: at most this many tiles' features of an image keep their resolution (``anyres_max_9``: 9).
    """

    kind: str = "llava_onevision"
    tower: Tower = Tower()
    image_token: int = 0
    projector_bias: bool = True
    pinpoints: Tuple[Tuple[int, int], ...] = ()
    tiles: int = 9

    @property
    def has_newline(self) -> bool:
        """Whether an embedding of a line end follows the features of each row (``image_newline``)."""
        return self.kind == "llava_onevision"

    @property
    def projector_inner(self) -> int:
        """Width between the projector's matrices."""
        return self.tower.feature if self.kind == "qwen2_5_vl" else self.n_embd

    @property
    def projector_parameters(self) -> int:
        """Parameters of the projector, its norm, and the line end."""
        inner, width = self.projector_inner, self.n_embd
        matrices = self.tower.feature * inner + inner * width + self.projector_bias * (inner + width)
        return matrices + (self.n_embd if self.has_newline else self.tower.n_embd)

    @property
    def parameters(self) -> int:
        """All parameters, without padding."""
        return self.decoder_parameters + self.tower.parameters + self.projector_parameters

    def make(self, dropout: float = 0.0, checkpointing: str = "off") -> VisionLanguage:
        """Create the model, with torch's initial weights. See ``Decoder``."""
        from trainer.vlm.model import VisionLanguage  # noqa: PLC0415 - it imports this module, and torch

        return VisionLanguage(self, dropout, checkpointing)

    @property
    def format(self) -> Format:
        """How Hugging Face stores models of this kind."""
        from trainer.vlm import families  # noqa: PLC0415 - it imports this module

        return families


def from_record(record: Mapping[str, Any]) -> VlmShape:
    """Return the shape that ``dataclasses.asdict`` made a record of. Fields of later versions are skipped."""
    known = known_fields(VlmShape, record)
    tower = {each.name: record["tower"][each.name] for each in fields(Tower) if each.name in record["tower"]}
    known["tower"] = Tower(**dict(tower, whole=tuple(tower.get("whole", ()))))
    known["pinpoints"] = tuple((height, width) for height, width in known.get("pinpoints", ()))
    return VlmShape(**known)
