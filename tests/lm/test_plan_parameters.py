"""The parameters that the plan counts are those of transformers' own models."""

import pytest

from trainer.plan import MODELS, parse

LLAMA = {
    "num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 384, "vocab_size": 1000, "max_position_embeddings": 128,
}  # fmt: skip
KINDS = {  # as a config.json may say it, with what each type leaves to its defaults
    "llama": {"model_type": "llama", **LLAMA},
    "llama, tied, wide heads": {"model_type": "llama", **LLAMA, "tie_word_embeddings": True, "head_dim": 64},
    "mistral": {"model_type": "mistral", **LLAMA},
    "qwen2": {"model_type": "qwen2", **LLAMA},
    "qwen3": {"model_type": "qwen3", **LLAMA, "head_dim": 64},
    "gemma": {"model_type": "gemma", **LLAMA, "head_dim": 64},
    "small gpt2": {
        "model_type": "gpt2", "n_layer": 3, "n_embd": 128, "n_head": 4, "vocab_size": 1000, "n_positions": 128,
    },
}  # fmt: skip
LARGE = {"model_type": "llama", **LLAMA, "hidden_size": 1024, "vocab_size": 50000, "mlp_bias": True}


def described(shape):
    """The config.json of a shape of the table."""
    if shape.family == "gpt2":
        return {
            "model_type": "gpt2", "n_layer": shape.layers, "n_embd": shape.hidden, "n_head": shape.heads,
            "n_inner": shape.intermediate, "vocab_size": shape.vocab, "n_positions": shape.context,
            "tie_word_embeddings": shape.tied,
        }  # fmt: skip
    return {
        "model_type": "qwen2" if shape.qkv_bias else "qwen3" if shape.qk_norm else "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "intermediate_size": shape.intermediate, "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context, "tie_word_embeddings": shape.tied,
    }  # fmt: skip


CONFIGS = {**KINDS, "large": LARGE, **{name: described(shape) for name, shape in MODELS.items()}}


@pytest.fixture(scope="module")
def counted(of_configs):
    return of_configs("parameters.py", CONFIGS)


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts_of_the_table_match_transformers(counted, name):
    assert MODELS[name].parameters == counted[name]["parameters"]
    assert parse(CONFIGS[name], name, name).parameters == counted[name]["parameters"]


@pytest.mark.parametrize("name", KINDS)
def test_a_config_of_each_kind_has_the_parameters_of_its_model(counted, name):
    assert parse(KINDS[name], name, name).parameters == counted[name]["parameters"]


@pytest.mark.parametrize("name", [*KINDS, *MODELS])
def test_adapter_sizes_match_peft(counted, name):
    assert parse(CONFIGS[name], name, name).adapter_parameters(8) == counted[name]["adapters"]


def test_parameters_outside_the_shape_are_few(counted):
    """Biases of the MLP."""
    whole = counted["large"]["parameters"]
    assert 0 < whole - parse(LARGE, "large", "large").parameters < 1e-3 * whole
