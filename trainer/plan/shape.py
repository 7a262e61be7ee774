"""The shape of a model, which determines its parameters, activations and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer.

    Attributes:
        name: the usual name.
        family: ``gpt2`` (LayerNorm, biases, learned positions, GELU) or ``llama`` (RMSNorm, rotary, SwiGLU).
        layers: how many blocks.
        hidden: width of the residual stream.
        heads: of attention.
        kv_heads: heads of keys and values; fewer than ``heads`` with grouped-query attention.
        head_dim: width of a head.
        intermediate: width inside the MLP.
        vocab: tokens of the vocabulary.
        context: positions that the model supports.
        tied: the output layer is the embedding.
        qkv_bias: queries, keys and values have biases (Qwen2, GPT-2).
        template: LLaMA-Factory's template.
        qk_norm: queries and keys have norms (Qwen3), one weight per unit of a head.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    tied: bool
    qkv_bias: bool = False
    template: str = "default"
    qk_norm: bool = False

    @property
    def attention_width(self) -> int:
        """Width of all queries together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all keys together."""
        return self.kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Parameters of one block's matrices."""
        attention = self.hidden * (2 * self.attention_width + 2 * self.kv_width)
        return attention + (2 if self.family == "gpt2" else 3) * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """Parameters of one block."""
        biases = self.attention_width + 2 * self.kv_width if self.qkv_bias else 0
        if self.family == "gpt2":
            return self.layer_matrices + biases + self.hidden + self.intermediate + self.hidden + 4 * self.hidden
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return self.layer_matrices + biases + norms

    @property
    def embeddings(self) -> int:
        """Parameters of the embedding, the positions and a separate output layer."""
        positions = self.context * self.hidden if self.family == "gpt2" else 0
        return self.vocab * self.hidden * (1 if self.tied else 2) + positions

    @property
    def parameters(self) -> int:
        """All parameters."""
        last_norm = self.hidden * (2 if self.family == "gpt2" else 1)
        return self.embeddings + self.layers * self.layer_parameters + last_norm

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of LoRA adapters of ``rank`` for every matrix of the blocks: rank x (in + out) each.

        GPT-2 has one matrix for queries, keys and values.
        """
        attention = 2 * (self.hidden + self.attention_width) + 2 * (self.hidden + self.kv_width)
        if self.family == "gpt2":
            attention = 2 * self.hidden + 2 * self.attention_width + 2 * self.kv_width
        mlp = (2 if self.family == "gpt2" else 3) * (self.hidden + self.intermediate)
        return self.layers * rank * (attention + mlp)

    def flops(self, seq: int) -> float:
        """Floating-point operations per token of a forward pass: 2 per parameter that multiplies, and attention's.

        Three times that is the usual 6 N + 12 L H Q T of PaLM's appendix B (arXiv 2204.02311), causal or not.
        """
        return self.head_flops + self.layers * (2.0 * self.layer_matrices + 4.0 * self.attention_width * seq)

    @property
    def head_flops(self) -> float:
        """Operations of the output layer alone."""
        return 2.0 * self.vocab * self.hidden
