"""GPT-2, with the parameter names of Hugging Face's GPT2LMHeadModel, so that weights can be read and exported.

Differences: matrices have the layout of torch's Linear, transposed with respect to Hugging Face's Conv1D. The
vocabulary is padded to a multiple of 128 rows, which is faster on GPUs; padding rows stay zero and are not used. The
output layer shares the matrix of the input embedding.
"""

from __future__ import annotations

import inspect
import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Callable, ContextManager, Dict, Iterable, Iterator, Optional, Sequence, Tuple, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn
from torch.utils.checkpoint import checkpoint

PAD = 128  # rows
Named = Tuple[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; ``vocab_size`` without padding."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int

    @property
    def rows(self) -> int:
        """Rows of the embedding, including padding."""
        return -(-self.vocab_size // PAD) * PAD

    @property
    def parameters(self) -> int:
        """Parameters without padding. The output layer shares the embedding's matrix."""
        width = self.n_embd
        block = 12 * width * width + 13 * width
        return (self.vocab_size + self.block_size) * width + self.n_layer * block + 2 * width


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


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(shape.n_embd, 3 * shape.n_embd)
        self.c_proj = nn.Linear(shape.n_embd, shape.n_embd)
        self.n_head = shape.n_head
        self.dropout = dropout

    def forward(self, x: torch.Tensor, past: Optional[Past] = None) -> torch.Tensor:
        """Map (batch, tokens, width) to the same shape. After a past, a single token attends to all of it."""
        batch, tokens, width = x.shape
        split = (batch, tokens, self.n_head, width // self.n_head)
        q, k, v = (each.view(split).transpose(1, 2) for each in self.c_attn(x).split(width, dim=2))
        if past is not None:
            k, v = past.join(k, v)
        dropped = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=past is None or past.seen == tokens)
        y = self.c_proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    """Two matrices with GPT-2's GELU between them, the tanh approximation."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(shape.n_embd, 4 * shape.n_embd)
        self.c_proj = nn.Linear(4 * shape.n_embd, shape.n_embd)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, tokens, width) to the same shape."""
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")), self.dropout, self.training)


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.n_embd)
        self.attn = Attention(shape, dropout)
        self.ln_2 = nn.LayerNorm(shape.n_embd)
        self.mlp = MLP(shape, dropout)

    def forward(self, x: torch.Tensor, past: Optional[Past] = None) -> torch.Tensor:
        """Map (batch, tokens, width) to the same shape."""
        x = x + self.attn(self.ln_1(x), past)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The model. ``forward`` returns the loss if it gets targets, else logits."""

    def __init__(self, shape: Shape, dropout: float = 0.0, checkpointing: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.dropout = dropout
        self.checkpointing = checkpointing
        blocks = nn.ModuleList([Block(shape, dropout) for _ in range(shape.n_layer)])
        parts = {
            "wte": nn.Embedding(shape.rows, shape.n_embd),
            "wpe": nn.Embedding(shape.block_size, shape.n_embd),
            "h": blocks,
            "ln_f": nn.LayerNorm(shape.n_embd),
        }
        self.transformer = nn.ModuleDict(parts)

    def start(self, seed: int) -> None:
        """Set GPT-2's initial weights; see ``first_weights``."""
        fill(self, first_weights(self.shape, seed, self.transformer["wte"].weight.device))

    def forward(
        self, tokens: torch.Tensor, targets: Optional[torch.Tensor] = None, past: Optional[Sequence[Past]] = None
    ) -> torch.Tensor:
        """Map tokens (batch, n), int64, to the mean loss, a float32 scalar; without targets to the last logits.

        Logits are (batch, vocabulary), float32. With ``past``, one for each layer, these tokens follow the tokens in it
        and are added to it: any number at first, then one at a time, ``block_size`` in total.
        """
        first = past[0].seen if past else 0
        places = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](places)
        x = F.dropout(x, self.dropout, self.training)
        for layer, block in enumerate(self.transformer["h"]):
            if past:
                x = block(x, past[layer])
            else:
                recomputes = self.checkpointing and self.training
                x = checkpoint(block, x, use_reentrant=False) if recomputes else block(x)
        x = self.transformer["ln_f"](x if targets is not None else x[:, -1])
        logits = F.linear(x.view(-1, x.shape[-1]), self.transformer["wte"].weight)
        logits = logits[:, : self.shape.vocab_size].float()
        return logits if targets is None else F.cross_entropy(logits, targets.view(-1))


def sizes(shape: Shape) -> Dict[str, torch.Size]:
    """Return the size of each parameter of a model, without allocating it."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in GPT(shape).named_parameters()}


def first_weights(shape: Shape, seed: int, device: torch.device) -> Iterator[Named]:
    """Yield GPT-2's initial weights, fp32, by parameter. Equal seeds and device types give equal weights."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, size in sizes(shape).items():
        if len(size) < 2:
            yield name, torch.full(size, 1.0 if "ln_" in name and name.endswith("weight") else 0.0, device=device)
            continue
        # The two branches of each layer add to the residual stream and would increase its variance (GPT-2 paper, 2.3).
        scale = 1 / math.sqrt(2 * shape.n_layer) if name.endswith("c_proj.weight") else 1.0
        drawn = torch.empty(size, device=device).normal_(0.0, 0.02 * scale, generator=generator)
        if name.endswith("wte.weight"):
            drawn[shape.vocab_size :] = 0.0
        yield name, drawn


@torch.no_grad()
def fill(model: GPT, weights: Iterable[Named], whole: Callable[..., ContextManager[Any]] = nullcontext) -> None:
    """Copy weights into a model, one parameter at a time. ``whole`` makes a sharded parameter of ZeRO-3 whole."""
    for name, tensor in weights:
        parameter = model.get_parameter(name)
        with whole(parameter):
            parameter.copy_(tensor)


def flops_per_token(shape: Shape, tokens: int) -> float:
    """Return the floating point operations per token, forward and backward, as MFU counts them: 6N + 12·L·D·T.

    PaLM, appendix B (https://arxiv.org/abs/2204.02311); recomputed activations do not count.
    """
    return 6.0 * shape.parameters + 12.0 * shape.n_layer * shape.n_embd * tokens


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
