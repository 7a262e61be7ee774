"""The shape of a decoder: what determines its parameters, activations and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer, perhaps with experts or beside a vision tower.

    It has no fields for the biases of attention's output (``attention_bias``) and of the MLP (``mlp_bias``), less than
    a thousandth of a published model's parameters.

    Attributes:
        name: the usual name.
        family: ``gpt2`` (LayerNorm, biases, learned positions, GELU) or ``llama`` (RMSNorm, rotary, SwiGLU or GeGLU).
        layers: how many blocks.
        hidden: width of the residual stream.
        heads: of attention.
        kv_heads: heads of keys and values; fewer than ``heads`` with grouped-query attention.
        head_dim: width of a head.
        intermediate: width inside the MLP; of the dense blocks if there are experts.
        vocab: tokens of the vocabulary.
        context: positions that the model supports.
        tied: the output layer is the embedding.
        qkv_bias: queries, keys and values have biases (Qwen2, GPT-2).
        template: LLaMA-Factory's template.
        qk_norm: queries and keys have norms (Qwen3, Gemma 3), one weight per unit of a head.
        kind: transformers' ``model_type``.
        norms: of a block; Gemma 2 and 3 have four.
        experts: of a block's MLP; 0: a dense MLP.
        chosen: experts that a token uses.
        expert_inner: width inside an expert.
        shared_inner: width inside the shared expert (Qwen2-MoE), which every token uses.
        dense_layers: blocks without experts.
        vision: parameters of the vision tower and its projector. LLaMA-Factory freezes them.
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
    kind: str = "llama"
    norms: int = 2
    experts: int = 0
    chosen: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    dense_layers: int = 0
    vision: int = 0

    @property
    def attention_width(self) -> int:
        """Width of all queries together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all keys together."""
        return self.kv_heads * self.head_dim

    @property
    def active_inner(self) -> int:
        """Width inside the MLP that a token passes in one block, the mean of all blocks rounded up."""
        if not self.experts:
            return self.intermediate
        sparse = self.layers - self.dense_layers
        width = sparse * (self.chosen * self.expert_inner + self.shared_inner) + self.dense_layers * self.intermediate
        return -(-width // self.layers)

    @property
    def matrices(self) -> int:
        """Parameters of the matrices of all blocks."""
        return self.layers * self._attention + self._mlp(self.experts)

    @property
    def active_matrices(self) -> int:
        """Parameters of the matrices that a token passes."""
        return self.layers * self._attention + self._mlp(self.chosen)

    @property
    def _attention(self) -> int:
        return self.hidden * (2 * self.attention_width + 2 * self.kv_width)

    def _mlp(self, experts: int) -> int:
        """Parameters of all blocks' MLPs with so many experts each, and of the routers."""
        if not self.experts:
            return self.layers * (2 if self.family == "gpt2" else 3) * self.hidden * self.intermediate
        routed = 3 * self.hidden * self.expert_inner * experts + self.hidden * self.experts
        shared = 3 * self.hidden * self.shared_inner + (self.hidden if self.shared_inner else 0)
        dense = 3 * self.hidden * self.intermediate
        return (self.layers - self.dense_layers) * (routed + shared) + self.dense_layers * dense

    @property
    def _vectors(self) -> int:
        """Parameters of one block's biases and norms."""
        biases = self.attention_width + 2 * self.kv_width if self.qkv_bias else 0
        if self.family == "gpt2":
            return biases + self.hidden + self.intermediate + self.hidden + 4 * self.hidden
        return biases + self.norms * self.hidden + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def embeddings(self) -> int:
        """Parameters of the embedding, the positions and a separate output layer."""
        positions = self.context * self.hidden if self.family == "gpt2" else 0
        return self.vocab * self.hidden * (1 if self.tied else 2) + positions

    @property
    def parameters(self) -> int:
        """All parameters, those of a vision tower too."""
        last_norm = self.hidden * (2 if self.family == "gpt2" else 1)
        return self.embeddings + self.matrices + self.layers * self._vectors + last_norm + self.vision

    @property
    def active(self) -> int:
        """Parameters that a token passes: all but the experts that it does not use."""
        return self.parameters - self.matrices + self.active_matrices

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of LoRA adapters of ``rank`` for every linear layer of the blocks: rank x (in + out) each.

        GPT-2 has one matrix for queries, keys and values. transformers 5 keeps all experts of a block in one tensor,
        which is no linear layer: they get no adapters.
        """
        attention = 2 * (self.hidden + self.attention_width) + 2 * (self.hidden + self.kv_width)
        if self.family == "gpt2":
            attention = 2 * self.hidden + 2 * self.attention_width + 2 * self.kv_width
        matrices = 2 if self.family == "gpt2" else 3
        mlp = matrices * (self.hidden + self.intermediate)
        if not self.experts:
            return self.layers * rank * (attention + mlp)
        shared = 3 * (self.hidden + self.shared_inner) + self.hidden + 1 if self.shared_inner else 0
        sparse = self.layers - self.dense_layers
        return rank * (self.layers * attention + sparse * shared + self.dense_layers * mlp)

    def flops(self, seq: int) -> float:
        """Floating-point operations per token of a forward pass: 2 per parameter that multiplies, and attention's.

        Three times that is the usual 6 N + 12 L H Q T of PaLM's appendix B (arXiv 2204.02311), causal or not. With
        experts N are those that a token uses.
        """
        return self.head_flops + 2.0 * self.active_matrices + self.layers * 4.0 * self.attention_width * seq

    @property
    def head_flops(self) -> float:
        """Operations of the output layer alone."""
        return 2.0 * self.vocab * self.hidden


class PlanError(ValueError):
    """A model, cluster or batch that cannot be planned. ``hint`` says what to type or change."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
