"""The plan's activations of a block match autograd's for transformers' models."""

import pytest

from trainer.plan import Training, parse
from trainer.plan.memory import layer_bytes

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 384, "vocab_size": 1000, "max_position_embeddings": 128,
}  # fmt: skip
CONFIGS = {
    "llama": LLAMA,
    "llama, grouped queries": {**LLAMA, "num_key_value_heads": 1},
    "llama, wide": {**LLAMA, "intermediate_size": 1024},
    "llama, wide heads": {**LLAMA, "head_dim": 64},
    "mistral": {**LLAMA, "model_type": "mistral", "num_key_value_heads": 2},
    "qwen2": {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2},
    "gpt2": {
        "model_type": "gpt2", "n_layer": 1, "n_embd": 128, "n_head": 4, "vocab_size": 1000, "n_positions": 128,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def kept(of_configs):
    return of_configs("saved_tensors.py", CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_activation_memory_of_a_block_matches_the_plan(kept, name):
    training = Training(parse(CONFIGS[name], name, name), seq=128)
    assert layer_bytes(training) == pytest.approx(kept[name]["bytes"], rel=0.03)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gpt2"])
def test_activation_memory_under_autocast_matches_the_plan(kept, name):
    """LLaMA-Factory's ``bf16: true`` without DeepSpeed."""
    training = Training(parse(CONFIGS[name], name, name), seq=128)
    assert layer_bytes(training, wide=True) == pytest.approx(kept[name]["wide"], rel=0.05)
