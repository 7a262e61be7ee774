"""GPT-2 in plain PyTorch: the classes GPT and GPTConfig."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass
class GPTConfig:
    """The shape of the model; the defaults are GPT-2's."""

    block_size: int = 1024
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True
    gradient_checkpointing: bool = False


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head = config.n_head
        self.dropout = config.dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.c_attn(x).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Logits and loss of a batch of token ids, each of shape (batch, block)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(
        self, ids: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.wte(ids) + self.wpe(positions)
        for block in self.h:
            if self.config.gradient_checkpointing and self.training:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.view(-1))

    @classmethod
    def from_pretrained(cls, name: str, **changes: object) -> GPT:
        """The weights of GPT-2 as transformers has them: ``name`` is a folder or, with a network, a name of the hub."""
        from transformers import GPT2LMHeadModel

        theirs = GPT2LMHeadModel.from_pretrained(name)
        config = GPTConfig(
            block_size=theirs.config.n_positions,
            vocab_size=theirs.config.vocab_size,
            n_layer=theirs.config.n_layer,
            n_head=theirs.config.n_head,
            n_embd=theirs.config.n_embd,
        )
        for key, value in changes.items():
            setattr(config, key, value)
        model = cls(config)
        names = {".mlp.c_fc.": ".mlp.0.", ".mlp.c_proj.": ".mlp.2."}
        state = {}
        for key, value in theirs.state_dict().items():
            if key.endswith((".attn.bias", ".attn.masked_bias")):
                continue
            mine = key.removeprefix("transformer.")
            for old, new in names.items():
                mine = mine.replace(old, new)
            conv1d = mine.endswith((".c_attn.weight", ".attn.c_proj.weight", ".mlp.0.weight", ".mlp.2.weight"))
            state[mine] = value.t().contiguous() if conv1d else value
        model.load_state_dict(state)
        return model
