"""The sizes of a decoder, and what its family decides. It needs no torch.

Families and where their definitions are (transformers v4.57.0, ``src/transformers/models``): ``gpt2``, ``llama``,
``qwen2`` (Qwen2 and Qwen2.5) and ``qwen3``. They differ in normalisation, positions, activation and biases only, so one
model covers them all (``model.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional, Protocol, Tuple

if TYPE_CHECKING:
    from trainer.lm.families import Format
    from trainer.lm.model import Decoder

PAD = 128  # rows
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Rope:
    """Rotary positions (arXiv 2104.09864) and their scaling for longer texts; names as in ``config.json``.

    ``kind``: ``default``, ``linear``, ``dynamic``, ``yarn`` (arXiv 2309.00071) or ``llama3``.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original: int = 0  # positions before scaling; 0: the model's
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: Optional[float] = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    sections: Tuple[int, ...] = ()  # pairs of a head that turn with time, height and width (M-RoPE); (): with places


class LayerShape(Protocol):
    """The sizes of a transformer layer, of a decoder or of a vision tower.

    ``is_gated``: SwiGLU and RMSNorm, instead of an ``activation`` between two matrices and LayerNorm. ``kv_heads``:
    heads of keys and of values. ``head``: width of a head. ``inner``: width between the matrices of the MLP. ``qkv``:
    rows of the matrix of queries, keys and values.
    """

    @property
    def n_head(self) -> int: ...  # noqa: D102 - above
    @property
    def n_embd(self) -> int: ...  # noqa: D102
    @property
    def norm_eps(self) -> float: ...  # noqa: D102
    @property
    def qkv_bias(self) -> bool: ...  # noqa: D102
    @property
    def out_bias(self) -> bool: ...  # noqa: D102
    @property
    def mlp_bias(self) -> bool: ...  # noqa: D102
    @property
    def qk_norm(self) -> bool: ...  # noqa: D102
    @property
    def is_gated(self) -> bool: ...  # noqa: D102
    @property
    def activation(self) -> str: ...  # noqa: D102
    @property
    def kv_heads(self) -> int: ...  # noqa: D102
    @property
    def head(self) -> int: ...  # noqa: D102
    @property
    def inner(self) -> int: ...  # noqa: D102
    @property
    def qkv(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; ``vocab_size`` without padding. The defaults are GPT-2's, as 0 in a size is.

    ``n_kv_head``: heads of keys and values; 0: ``n_head``. ``head_width``: 0: ``n_embd / n_head``. ``n_inner``: width
    between the matrices of the MLP; 0: ``4 n_embd``.
    """

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    family: str = "gpt2"
    n_kv_head: int = 0
    head_width: int = 0
    n_inner: int = 0
    norm_eps: float = 1e-5
    tied: bool = True
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    rope: Optional[Rope] = None

    @property
    def is_gpt2(self) -> bool:
        """Whether the model has learned positions, LayerNorm and GELU, instead of rotary ones, RMSNorm and SwiGLU."""
        return self.family == "gpt2"

    @property
    def is_gated(self) -> bool:
        """See ``LayerShape``."""
        return not self.is_gpt2

    @property
    def activation(self) -> str:
        """One of ``model.ACTIVATIONS``: GPT-2's GELU is the tanh approximation."""
        return "gelu_pytorch_tanh" if self.is_gpt2 else "silu"

    @property
    def qk_norm(self) -> bool:
        """Whether each head of queries and keys is normalised."""
        return self.family == "qwen3"

    @property
    def kv_heads(self) -> int:
        """Heads of keys and of values."""
        return self.n_kv_head or self.n_head

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.head_width or self.n_embd // self.n_head

    @property
    def inner(self) -> int:
        """Width between the matrices of the MLP."""
        return self.n_inner or 4 * self.n_embd

    @property
    def qkv(self) -> int:
        """Rows of the matrix of queries, keys and values."""
        return (self.n_head + 2 * self.kv_heads) * self.head

    @property
    def rows(self) -> int:
        """Rows of the embedding, including padding."""
        return -(-self.vocab_size // PAD) * PAD

    @property
    def parameters(self) -> int:
        """All parameters, without padding."""
        return self.decoder_parameters

    @property
    def decoder_parameters(self) -> int:
        """Parameters of the decoder without padding. With ``tied`` the output layer shares the embedding's matrix."""
        width, gated = self.n_embd, self.is_gated
        attention = width * self.qkv + self.n_head * self.head * width
        attention += self.qkv_bias * self.qkv + self.out_bias * width + self.qk_norm * 2 * self.head
        mlp = (2 + gated) * width * self.inner + self.mlp_bias * ((1 + gated) * self.inner + width)
        norms = width if gated else 2 * width
        around = self.vocab_size * width * (1 if self.tied else 2) + norms + (0 if gated else self.block_size * width)
        return around + self.n_layer * (attention + mlp + 2 * norms)

    def make(self, dropout: float = 0.0, checkpointing: str = "off") -> Decoder:
        """Create the model, with torch's initial weights. See ``Decoder``."""
        from trainer.lm.model import Decoder  # noqa: PLC0415 - it imports this module, and torch

        return Decoder(self, dropout, checkpointing)

    @property
    def format(self) -> Format:
        """How Hugging Face stores models of this kind."""
        from trainer.lm import families  # noqa: PLC0415 - it imports this module

        return families


def from_record(record: Mapping[str, Any]) -> Shape:
    """Return the shape that ``dataclasses.asdict`` made a record of. Fields of later versions are skipped."""
    if "tower" in record:
        from trainer.vlm import shape as vlm  # noqa: PLC0415 - it imports this module

        return vlm.from_record(record)
    return Shape(**known_fields(Shape, record))


def known_fields(kind: Any, record: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the arguments that a record has for ``Shape``, or for a class derived from it."""
    known = {each.name: record[each.name] for each in fields(kind) if each.name in record}
    rope: Optional[Dict[str, Any]] = known.get("rope")
    turns = dict(rope, sections=tuple(rope.get("sections", ()))) if rope else None
    return dict(known, rope=Rope(**turns) if turns else None)
