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
    "gemma2": {"model_type": "gemma2", **LLAMA, "head_dim": 64},
    "gemma3 text": {"model_type": "gemma3_text", **LLAMA, "head_dim": 64},
    "mixtral": {"model_type": "mixtral", **LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2 moe": {
        "model_type": "qwen2_moe", **LLAMA, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 160, "mlp_only_layers": [0],
    },
    "qwen3 moe": {
        "model_type": "qwen3_moe", **LLAMA, "head_dim": 64, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 96, "decoder_sparse_step": 2,
    },
    "small gpt2": {
        "model_type": "gpt2", "n_layer": 3, "n_embd": 128, "n_head": 4, "vocab_size": 1000, "n_positions": 128,
    },
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "image_size": 56, "patch_size": 14,
}  # fmt: skip
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
VISION = {"depth": 2, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
SEEING = {  # with a vision tower, which LLaMA-Factory freezes
    "llava": {"model_type": "llava", "text_config": {"model_type": "llama", **LLAMA}, "vision_config": CLIP},
    "llava, text by default": {
        "model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}, "vision_config": CLIP,
    },
    "qwen2 vl": {
        "model_type": "qwen2_vl", **LLAMA, "vision_config": {**VISION, "embed_dim": 64, "hidden_size": 128},
    },
    "qwen2.5 vl": {
        "model_type": "qwen2_5_vl", **LLAMA, "tie_word_embeddings": True,
        "vision_config": {**VISION, "hidden_size": 64, "intermediate_size": 90, "out_hidden_size": 128},
    },
    "gemma3": {
        "model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 512,
        "num_hidden_layers": 3, "intermediate_size": 1024}, "vision_config": SIGLIP,
    },
    "gemma3, as published": {
        "model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **LLAMA, "head_dim": 64},
        "vision_config": {**SIGLIP, "vision_use_head": False},
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
        "model_type": shape.kind,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "intermediate_size": shape.intermediate, "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context, "tie_word_embeddings": shape.tied,
        **(experts(shape) if shape.experts else {}),
    }  # fmt: skip


def experts(shape):
    number = "num_local_experts" if shape.kind == "mixtral" else "num_experts"
    return {number: shape.experts, "num_experts_per_tok": shape.chosen, "moe_intermediate_size": shape.expert_inner}


CONFIGS = {**KINDS, **SEEING, "large": LARGE, **{name: described(shape) for name, shape in MODELS.items()}}


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


@pytest.mark.parametrize("name", SEEING)
def test_a_model_with_a_vision_tower_has_the_parameters_of_its_model(counted, name):
    shape = parse(SEEING[name], name, name)
    assert (shape.parameters, shape.vision) == (counted[name]["parameters"], counted[name]["vision"])


def test_a_token_passes_only_its_experts():
    few, all_of_them = (
        parse({**KINDS["qwen3 moe"], "num_experts_per_tok": chosen}, "", "").active for chosen in (2, 6)
    )
    dense = parse(KINDS["qwen3"], "", "")
    assert few < all_of_them == parse(KINDS["qwen3 moe"], "", "").parameters
    assert dense.active == dense.parameters


@pytest.mark.parametrize("name", [*KINDS, *MODELS])
def test_adapter_sizes_match_peft(counted, name):
    assert parse(CONFIGS[name], name, name).adapter_parameters(8) == counted[name]["adapters"]


def test_parameters_outside_the_shape_are_few(counted):
    """Biases of the MLP."""
    whole = counted["large"]["parameters"]
    assert 0 < whole - parse(LARGE, "large", "large").parameters < 1e-3 * whole
