"""The loss of the output layer, computed in chunks of tokens, so that the logits of a batch never exist as a whole.

For 8192 tokens and 128,256 words the logits and their gradient would take 12 GB in fp32. Here the gradient of each
chunk is computed right after its logits, as in Liger's kernel (arXiv 2410.10989): nothing is computed twice, and the
backward pass only scales what the forward pass found. The gradient of the matrix is summed in fp32.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from trainer.lm.batch import IGNORED

LOGITS = 1 << 29  # numbers of logits at a time: 1 GiB in 16 bits, and as much for their gradient
LEAST = 256  # tokens in a chunk: fewer leave a GPU idle

Pieces = Callable[[torch.Tensor, torch.Tensor, int], Tuple[torch.Tensor, torch.Tensor]]


def loss_and_gradient(logits: torch.Tensor, targets: torch.Tensor, size: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of a chunk, float32, and its gradient with respect to the logits, in their type.

    Args:
        logits: (tokens, rows).
        targets: (tokens,), int64; ``IGNORED`` has no loss.
        size: of the vocabulary. Rows beyond it are padding: they take no part.
    """
    columns = torch.arange(logits.shape[1], device=logits.device)
    values = logits.float().masked_fill(columns >= size, float("-inf"))
    top = values.logsumexp(dim=1, keepdim=True)
    counts = (targets != IGNORED).unsqueeze(1)
    hit = columns == targets.unsqueeze(1)
    loss = (torch.where(counts, top, 0.0)).sum() - torch.where(hit, values, 0.0).sum()
    gradient = torch.where(counts, (values - top).exp() - hit.to(values.dtype), 0.0)
    return loss, gradient.to(logits.dtype)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, size: int, chunk: int, pieces: Pieces
    ) -> torch.Tensor:
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        total = torch.zeros((), device=x.device)
        of_x = torch.empty_like(x) if wants_x else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        for start in range(0, len(x), chunk):
            part = slice(start, start + chunk)
            loss, gradient = pieces(F.linear(x[part], weight), targets[part], size)
            total += loss
            if of_x is not None:
                of_x[part] = gradient @ weight
            if of_weight is not None:
                of_weight += gradient.t() @ x[part]
        ctx.save_for_backward(of_x, of_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tuple[Optional[torch.Tensor], ...]:
        of_x, of_weight = ctx.saved_tensors
        scale = gradients[0]
        of_x = None if of_x is None else of_x * scale.to(of_x.dtype)
        return of_x, None if of_weight is None else (of_weight * scale).to(ctx.dtype), None, None, None, None


def chunked_loss(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, size: int, pieces: Pieces = loss_and_gradient
) -> torch.Tensor:
    """Return the sum of the losses, in nats, of an output layer: a float32 scalar.

    Args:
        x: (tokens, width), the last hidden states.
        weight: (rows, width), of the output layer.
        targets: (tokens,), int64; ``IGNORED`` has no loss.
        size: of the vocabulary.
        pieces: ``loss_and_gradient``, or the same compiled.
    """
    chunk = max(LEAST, LOGITS // weight.shape[0] // LEAST * LEAST)
    found = _ChunkedLoss.apply(x, weight, targets, size, chunk, pieces)
    assert isinstance(found, torch.Tensor)
    return found
