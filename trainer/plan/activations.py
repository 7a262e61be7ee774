"""What the forward pass keeps for the backward pass.

Counted as in Korthikanti et al. (arXiv 2205.05198, section 4), layer by layer, for 16-bit numbers and flash attention,
which keeps no seq x seq matrix. Their 34 s b h of a GPT block are 32 without dropout, and 34 again if attention's
result is kept in two layouts. Other blocks keep more: transformers' RMSNorm keeps its input in 32 bits and two results
in 16, SwiGLU four results of the inner width, and transformers' GPT-2 GELU, written in Python, five. The counts for
transformers' models come from ``torch.autograd.graph.saved_tensors_hooks`` (``tests/gpt/test_plan_activations.py``).
"""

from __future__ import annotations

from trainer.plan.wish import Setup, Training

_WIDE = 4  # bytes of a 32-bit number
_HALF = 2


def layer_bytes(training: Training) -> int:
    """Bytes per token that one block keeps, with flash attention."""
    shape = training.shape
    hidden, inner = shape.hidden, shape.intermediate
    norms_statistics = 2 * _WIDE
    attention = _HALF * (2 * shape.attention_width + 2 * shape.kv_width) + _WIDE * shape.heads
    if shape.family == "llama":
        norms = 2 * (_WIDE + _HALF + _HALF) * hidden
        return norms + attention + 4 * _HALF * inner + norms_statistics
    norms = 2 * (_HALF + _HALF) * hidden
    if training.program == "own":
        return norms + attention + _HALF * hidden + 2 * _HALF * inner + norms_statistics
    return norms + attention + 2 * _HALF * hidden + 5 * _HALF * inner + norms_statistics


def score_bytes(training: Training) -> int:
    """Bytes per token of one block's attention without flash: 5 a s of the paper.

    Softmax's result in 16 bits, dropout's mask in 8 and its result in 16. Without dropout it is less.
    """
    return 5 * training.shape.heads * training.seq


def logit_bytes(training: Training, setup: Setup) -> int:
    """Peak bytes per token of the loss.

    The losses of transformers and of trainer.gpt use 32 bits: logits and their gradient in 16 bits, log-softmax and
    its gradient in 32, 12 bytes per token of the vocabulary. A 16-bit loss keeps three times 2. In chunks it is a
    sixteenth.
    """
    each = 6 if training.half_loss else 12
    whole = each * training.shape.vocab
    return whole // 16 if setup.chunked_loss else whole


def kept(training: Training, setup: Setup) -> float:
    """Bytes that all blocks keep until the backward pass."""
    tokens = setup.micro_batch * training.seq
    outside = 4 * _HALF * training.shape.hidden  # the last norm and the layers around the blocks
    if setup.checkpointing:
        return float(tokens * (training.shape.layers * _HALF * training.shape.hidden + outside))
    return float(tokens * (training.shape.layers * _each(training, setup) + outside))


def block(training: Training, setup: Setup) -> float:
    """Bytes that one block keeps: the block of the backward pass, recomputed or not yet released."""
    return float(setup.micro_batch * training.seq * _each(training, setup))


def logits(training: Training, setup: Setup) -> float:
    """Peak bytes of the loss."""
    return float(setup.micro_batch * training.seq * logit_bytes(training, setup))


def _each(training: Training, setup: Setup) -> int:
    return layer_bytes(training) + (0 if setup.flash else score_bytes(training))
