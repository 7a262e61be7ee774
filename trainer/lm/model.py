"""A decoder: GPT-2, Llama, Qwen2 and Qwen3 in one model (``shape.py`` says what they differ in).

Matrices have the layout of torch's Linear. Queries, keys and values are one matrix, as are gate and up of the MLP:
fewer, larger products. ``families.py`` maps them to the names of Hugging Face. The vocabulary is padded to a multiple
of 128 rows, which is faster on GPUs; padding rows stay zero and are not used.

A batch may hold documents that must not see each other. ``Borders`` has their ends; attention and positions start again
in each of them.
"""

from __future__ import annotations

import inspect
import math
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    cast,
)

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.lm.loss import Pieces, chunked_loss, loss_and_gradient
from trainer.lm.shape import LayerShape, Rope, Shape

Named = Tuple[str, torch.Tensor]
CHECKPOINTING = ("off", "selective", "full")
ACTIVATIONS: Dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # names as in config.json
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


class Borders(NamedTuple):
    """The documents of a batch. ``ends``: int32, from 0 to all tokens; repeated values are empty documents.

    ``mask`` is None on a GPU, whose kernel reads the ends; elsewhere (1, 1, tokens, tokens), true where one token sees
    another. ``longest`` is at least the tokens of the longest document. ``is_causal``: a token sees none after it.
    """

    ends: torch.Tensor
    longest: int
    mask: Optional[torch.Tensor]
    is_causal: bool = True


def borders_of(ends: torch.Tensor, tokens: int, longest: int, is_causal: bool = True) -> Tuple[Borders, torch.Tensor]:
    """Return the borders of documents, and each token's position in its document, (tokens,), int64."""
    places = torch.arange(tokens, device=ends.device)
    document = torch.searchsorted(ends, places, right=True)
    positions = places - ends[document - 1]
    if ends.device.type == "cuda":
        return Borders(ends, longest, None, is_causal), positions
    sees = document.unsqueeze(0) == document.unsqueeze(1)
    if is_causal:
        sees = sees & (places.unsqueeze(1) >= places)
    return Borders(ends, longest, sees.view(1, 1, tokens, tokens), is_causal), positions


class Past:
    """Keys and values of the ``seen`` tokens of one attention layer, so that only new tokens are computed."""

    def __init__(self) -> None:
        self.seen = 0
        self._keys = self._values = torch.empty(0)

    def join(self, keys: torch.Tensor, values: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values of new tokens, each (batch, heads, tokens, head width). Return those of all tokens."""
        if self.seen:
            keys = torch.cat([self._keys, keys], dim=2)
            values = torch.cat([self._values, values], dim=2)
        self._keys, self._values, self.seen = keys, values, keys.shape[2]
        return keys, values


def frequencies(rope: Rope, head: int, positions: int) -> Tuple[torch.Tensor, float]:
    """Return the angle per position of each pair of a head, (head / 2,), float32, and the factor of its cos and sin.

    As transformers v4.57.0, ``modeling_rope_utils.py``. ``positions``: the model's.
    """
    pairs = torch.arange(0, head, 2, dtype=torch.int64).float() / head
    plain = 1.0 / rope.theta**pairs
    original = rope.original or positions
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "dynamic":
        longer = max(positions, original)
        theta = rope.theta * (rope.factor * longer / original - (rope.factor - 1)) ** (head / (head - 2))
        return 1.0 / theta**pairs, 1.0
    if rope.kind == "llama3":
        wave = 2 * math.pi / plain
        smooth = (original / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        between = (1 - smooth) * plain / rope.factor + smooth * plain
        low, high = wave > original / rope.low_freq_factor, wave < original / rope.high_freq_factor
        return torch.where(low, plain / rope.factor, torch.where(high, plain, between)), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, head, original)
    return plain, 1.0


@lru_cache(maxsize=8)  # no buffer of the model: DeepSpeed would round it to 16 bits
def _frequencies_on(shape: Shape, device: torch.device) -> Tuple[torch.Tensor, float]:
    angle, factor = frequencies(shape.rope or Rope(), shape.head, shape.block_size)
    return angle.to(device), factor


def _yarn(rope: Rope, plain: torch.Tensor, head: int, original: int) -> Tuple[torch.Tensor, float]:
    def pair(rotations: float) -> float:  # the pair that turns this often over the original positions
        return head * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    def scale(amount: float) -> float:
        return 0.1 * amount * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, head - 1.0)
    ramp = ((torch.arange(head // 2).float() - low) / ((high - low) or 0.001)).clamp(0, 1)
    factor = rope.attention_factor
    if factor is None:
        both = rope.mscale and rope.mscale_all_dim
        factor = scale(rope.mscale) / scale(rope.mscale_all_dim) if both else scale(1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp), factor


Turn = Tuple[torch.Tensor, torch.Tensor]  # cos and sin: (tokens or batch x tokens, 1, head width / 2)


def turned(x: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Rotate queries or keys, (batch, tokens, heads, head width), by their positions. Computed in fp32."""
    cos, sin = turn
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Norm(nn.Module):
    """LayerNorm with bias, or RMSNorm."""

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., width) to the same shape."""
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Self-attention, causal without borders, with as many heads of keys and values as queries, or fewer."""

    def __init__(self, shape: LayerShape, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(shape.n_embd, shape.qkv, bias=shape.qkv_bias)
        self.out = nn.Linear(shape.n_head * shape.head, shape.n_embd, bias=shape.out_bias)
        self.q_norm = Norm(shape.head, shape.norm_eps, bias=False) if shape.qk_norm else None
        self.k_norm = Norm(shape.head, shape.norm_eps, bias=False) if shape.qk_norm else None
        self.heads = (shape.n_head, shape.kv_heads, shape.head)
        self.dropout = dropout

    def forward(
        self, x: torch.Tensor, turn: Optional[Turn], borders: Optional[Borders], past: Optional[Past] = None
    ) -> torch.Tensor:
        """Map (batch, tokens, width) to the same shape. After a past, a single token attends to all of it."""
        batch, tokens, _ = x.shape
        heads, kv_heads, head = self.heads
        split = self.qkv(x).view(batch, tokens, heads + 2 * kv_heads, head)
        q, k, v = split.split((heads, kv_heads, kv_heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if turn is not None:
            q, k = turned(q, turn), turned(k, turn)
        dropped = self.dropout if self.training else 0.0
        if borders is not None and borders.mask is None:
            y = varlen_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), borders)
        else:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
            if past is not None:
                k, v = past.join(k, v)
            if borders is not None:  # all documents of the batch are in one line
                q, k, v = (each.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0) for each in (q, k, v))
            is_causal = borders is None and (past is None or past.seen == tokens)
            mask = None if borders is None else borders.mask
            grouped = {"enable_gqa": True} if heads != kv_heads else {}
            y = F.scaled_dot_product_attention(q, k, v, mask, dropped, is_causal, **grouped).transpose(1, 2)
        y = self.out(y.reshape(batch, tokens, heads * head))
        return F.dropout(y, self.dropout, self.training)


def varlen_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, borders: Borders) -> torch.Tensor:
    """Attention within each document, on a GPU. All have the shape (tokens, heads, head width)."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - torch 2.11 and later

    if q.shape[1] != k.shape[1]:
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    at = (borders.ends, borders.ends, borders.longest, borders.longest)
    return cast("torch.Tensor", varlen_attn(q, k, v, *at, window_size=(-1, 0 if borders.is_causal else -1)))


class MLP(nn.Module):
    """Two matrices with an activation between them, perhaps gated: SwiGLU (arXiv 2002.05202)."""

    def __init__(self, shape: LayerShape, dropout: float) -> None:
        super().__init__()
        self.gated = shape.is_gated
        self.activation = shape.activation
        self.up = nn.Linear(shape.n_embd, (1 + self.gated) * shape.inner, bias=shape.mlp_bias)
        self.down = nn.Linear(shape.inner, shape.n_embd, bias=shape.mlp_bias)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, tokens, width) to the same shape."""
        x, activate = self.up(x), ACTIVATIONS[self.activation]
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            x = activate(gate) * up
        else:
            x = activate(x)
        return F.dropout(self.down(x), self.dropout, self.training)


class Layer(nn.Module):
    """A transformer layer. ``checkpointing`` is one of ``CHECKPOINTING``."""

    def __init__(self, shape: LayerShape, dropout: float, checkpointing: str = "off") -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.norm1 = Norm(shape.n_embd, shape.norm_eps, bias=not shape.is_gated)
        self.attention = Attention(shape, dropout)
        self.norm2 = Norm(shape.n_embd, shape.norm_eps, bias=not shape.is_gated)
        self.mlp = MLP(shape, dropout)

    def forward(
        self, x: torch.Tensor, turn: Optional[Turn], borders: Optional[Borders], past: Optional[Past] = None
    ) -> torch.Tensor:
        """Map (batch, tokens, width) to the same shape."""
        if self.checkpointing == "off" or not self.training:
            return self._run(x, turn, borders, past)
        # Here and not around the layer, so that it is compiled with the layer, and inside of the hooks of FSDP.
        context = {"context_fn": _keep_products} if self.checkpointing == "selective" else {}
        found = checkpoint(self._run, x, turn, borders, use_reentrant=False, **context)
        return cast("torch.Tensor", found)

    def _run(
        self, x: torch.Tensor, turn: Optional[Turn], borders: Optional[Borders], past: Optional[Past] = None
    ) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), turn, borders, past)
        return x + self.mlp(self.norm2(x))


def embedding(rows: int, width: int) -> nn.Embedding:
    """Create an embedding. On the device "meta", torch would import its compiler to draw weights that do not exist."""
    given = torch.empty(rows, width) if torch.empty(0).is_meta else None
    return nn.Embedding(rows, width, _weight=given)


class Decoder(nn.Module):
    """The model. ``forward`` returns the loss if it gets targets, else logits."""

    def __init__(self, shape: Shape, dropout: float = 0.0, checkpointing: str = "off") -> None:
        super().__init__()
        self.shape = shape
        self.dropout = dropout
        self.pieces: Pieces = loss_and_gradient
        self._whole: Optional[Callable[..., torch.Tensor]] = None
        self.embed = embedding(shape.rows, shape.n_embd)
        self.places = embedding(shape.block_size, shape.n_embd) if shape.is_gpt2 else None
        self.layers = nn.ModuleList([Layer(shape, dropout, checkpointing) for _ in range(shape.n_layer)])
        self.norm = Norm(shape.n_embd, shape.norm_eps, bias=not shape.is_gated)
        self.head = None if shape.tied else nn.Linear(shape.n_embd, shape.rows, bias=False)

    def compile_whole(self) -> None:
        """Compile all layers as one, and the loss apart: in one graph all gradients were 0 on a GPU with torch 2.11."""
        self._whole = torch.compile(self.hidden)
        self.pieces = torch.compile(loss_and_gradient)

    def part_of(self, name: str) -> str:
        """Return the part that a parameter belongs to, one of ``config.PARTS``: a decoder is all language."""
        del name
        return "language"

    @property
    def blocks(self) -> List[Layer]:
        """All transformer layers: what is compiled, sharded and gathered one by one."""
        return [cast("Layer", layer) for layer in self.layers]

    @property
    def sections(self) -> List[nn.Module]:
        """What else FSDP gathers apart from the rest. A tied embedding is also the output matrix, so it stays."""
        return [] if self.head is None else [self.embed]

    @property
    def output(self) -> torch.Tensor:
        """The matrix of the output layer, (rows, width)."""
        return self.embed.weight if self.head is None else self.head.weight

    def forward(
        self,
        tokens: torch.Tensor,
        targets: Optional[torch.Tensor] = None,
        past: Optional[Sequence[Past]] = None,
        ends: Optional[torch.Tensor] = None,
        count: Optional[torch.Tensor] = None,
        positions: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Map tokens (batch, n), int64, to the loss, a float32 scalar; without targets to the last logits.

        Args:
            tokens: (batch, n), int64.
            targets: (batch, n), int64; ``IGNORED`` has no loss.
            past: one for each layer. These tokens follow the tokens in it and are added to it: any number at first,
                then one at a time, ``block_size`` in total.
            ends: of the documents over the whole batch, int32, starting with 0; None: each row is one document.
            count: what the sum of the losses is divided by; None: all targets.
            positions: (3, batch, n), int64: in time, height and width (M-RoPE); None: the places in the documents.

        Returns:
            The loss; or the logits of the last token, (batch, vocabulary), float32.
        """
        return self.loss(self.embed(tokens), targets, past, ends, count, positions)

    def loss(
        self,
        x: torch.Tensor,
        targets: Optional[torch.Tensor],
        past: Optional[Sequence[Past]],
        ends: Optional[torch.Tensor],
        count: Optional[torch.Tensor],
        positions: Optional[torch.Tensor],
    ) -> torch.Tensor:
        """Map embedded tokens (batch, n, width) to what ``forward`` returns."""
        hidden = self._whole if self._whole and self.training else self.hidden  # an evaluation is not compiled again
        x = hidden(x, past, ends, positions)
        if targets is None:
            return F.linear(x[:, -1], self.output)[:, : self.shape.vocab_size].float()
        flat = x.reshape(-1, x.shape[-1])
        total = chunked_loss(flat, self.output, targets.reshape(-1), self.shape.vocab_size, self.pieces)
        return total / (targets.numel() if count is None else count)

    def hidden(
        self,
        x: torch.Tensor,
        past: Optional[Sequence[Past]] = None,
        ends: Optional[torch.Tensor] = None,
        positions: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Map embedded tokens (batch, n, width) to the last hidden states, of the same shape. See ``forward``."""
        batch, n, _ = x.shape
        borders: Optional[Borders] = None
        if ends is not None:
            borders, places = borders_of(ends, batch * n, n)
            places = places.view(batch, n)
        else:
            first = past[0].seen if past else 0
            places = torch.arange(first, first + n, device=x.device).unsqueeze(0)
        turn: Optional[Turn] = None
        if self.places is not None:
            x = x + self.places(places)
        else:
            turn = self._turn(places if positions is None else positions)
        x = F.dropout(x, self.dropout, self.training)
        for number, layer in enumerate(self.layers):
            x = layer(x, turn, borders, past[number] if past else None)
        return cast("torch.Tensor", self.norm(x))

    def _turn(self, positions: torch.Tensor) -> Turn:
        angle, factor = _frequencies_on(self.shape, positions.device)
        angles = positions.unsqueeze(-1).float() * angle
        if positions.dim() == 3:  # M-RoPE: some pairs turn with the time, others with the height and the width
            assert self.shape.rope
            parts = angles.split(self.shape.rope.sections, dim=-1)
            angles = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
        angles = angles.unsqueeze(2)
        return angles.cos() * factor, angles.sin() * factor


# Selective checkpointing keeps the outputs of matrix products and of attention, and recomputes the rest: nearly all of
# the memory of the elementwise operations for a few percent of time (torchtitan does the same).
_KEPT = ("mm.default", "addmm.default", "_scaled_mm.default", "_varlen_attn.default", "_scaled_dot_product_")


def _policy(_: Any, operation: Any, *args: Any, **named: Any) -> CheckpointPolicy:
    del args, named
    name = str(operation).partition(".")[2]
    return CheckpointPolicy.MUST_SAVE if name.startswith(_KEPT) else CheckpointPolicy.PREFER_RECOMPUTE


_keep_products = partial(create_selective_checkpoint_contexts, _policy)


def sizes(shape: Shape) -> Dict[str, torch.Size]:
    """Return the size of each parameter of a model, without allocating it."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in shape.make().named_parameters()}


def first_weights(shape: Shape, seed: int, device: torch.device) -> Iterator[Named]:
    """Yield GPT-2's initial weights, fp32, by parameter. Equal seeds and device types give equal weights."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, size in sizes(shape).items():
        if len(size) < 2:
            yield name, torch.full(size, 1.0 if "norm" in name and name.endswith("weight") else 0.0, device=device)
            continue
        # The two branches of each layer add to the residual stream and would increase its variance (GPT-2 paper, 2.3).
        adds = name.endswith(("attention.out.weight", "mlp.down.weight"))
        scale = 1 / math.sqrt(2 * shape.n_layer) if adds else 1.0
        drawn = torch.empty(size, device=device).normal_(0.0, 0.02 * scale, generator=generator)
        if size[0] == shape.rows and name in ("embed.weight", "head.weight"):
            drawn[shape.vocab_size :] = 0.0
        yield name, drawn


def put(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    """Copy a tensor into a parameter that is not sharded."""
    parameter.copy_(tensor)


@torch.no_grad()
def fill(model: Decoder, weights: Iterable[Named], put: Callable[[nn.Parameter, torch.Tensor], None] = put) -> None:
    """Copy weights into a model, one parameter at a time. ``put`` copies one, perhaps into a sharded parameter."""
    for name, tensor in weights:
        put(model.get_parameter(name), tensor)


def flops_per_token(shape: Shape, tokens: int, is_frozen: bool = False) -> float:
    """Return the floating point operations per token, forward and backward, as MFU counts them: 6N + 12·L·D·T.

    Frozen weights need no gradients: 4N.

    PaLM, appendix B (https://arxiv.org/abs/2204.02311), and torchtitan, which leaves out the embedding if it is not
    also the output layer. Recomputed activations do not count. D is the width of all heads together.
    """
    unused = 0 if shape.tied else shape.vocab_size * shape.n_embd
    attention = 12.0 * shape.n_layer * shape.n_head * shape.head * tokens
    return (4.0 if is_frozen else 6.0) * (shape.decoder_parameters - unused) + attention


def fastest_attention(device: torch.device) -> ContextManager[Any]:
    """Within it, attention on a GPU prefers cuDNN's kernel where possible, unlike torch's default."""
    if device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415 - torch 2.3 and later

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if "set_priority" in inspect.signature(sdpa_kernel).parameters:  # torch 2.6 and later
        return cast("ContextManager[Any]", sdpa_kernel(order, set_priority=True))
    return cast("ContextManager[Any]", sdpa_kernel(order))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it, dropout and gradients are off."""
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was)
