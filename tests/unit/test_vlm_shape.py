"""The shapes of published vision-language models, from the fields of their config.json."""

from pathlib import Path

import pytest

from trainer.lm.shape import Rope
from trainer.vlm import families

PATH = Path("config.json")
QWEN_TOWER = {
    "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
    "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
}  # fmt: skip
QWEN = {  # without text_config, as published
    "model_type": "qwen2_5_vl", "image_token_id": 151655, "hidden_act": "silu", "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": 32768,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip
QWEN_3B = {
    **QWEN, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    "vision_config": {**QWEN_TOWER, "out_hidden_size": 2048},
}  # fmt: skip
QWEN_7B = {
    **QWEN, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    "vision_config": {**QWEN_TOWER, "out_hidden_size": 3584},
}  # fmt: skip
ONEVISION = {  # llava-onevision-qwen2-0.5b-ov-hf
    "model_type": "llava_onevision", "image_token_index": 151646, "projector_hidden_act": "gelu",
    "vision_feature_layer": -1, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9",
    "text_config": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rope_theta": 1000000.0,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 152000,
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304,
        "num_attention_heads": 16, "num_hidden_layers": 26, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip


@pytest.mark.parametrize(("config", "parameters"), [(QWEN_3B, 3754622976), (QWEN_7B, 8292166656)])
def test_qwen_has_as_many_parameters_as_published(config, parameters):
    shape = families.shape_of(config, PATH)
    assert shape.parameters == parameters
    assert shape.rope == Rope(theta=1e6, original=128000, sections=(16, 24, 24))
    assert shape.tower.window_patches == 64


def test_onevision_has_a_tower_of_siglip_and_the_grids_of_transformers():
    shape = families.shape_of(ONEVISION, PATH)
    assert (shape.tower.grid, shape.tower.n_layer, shape.tied, shape.tiles) == (27, 26, True, 9)
    assert len(shape.pinpoints) == 36
    assert 0.88e9 < shape.parameters < 0.9e9


def test_a_tower_without_fields_has_the_sizes_of_transformers():
    siglip = families.tower_of({"model_type": "siglip", "vision_config": {}}, PATH)
    clip = families.tower_of({"model_type": "clip_vision_model"}, PATH)
    assert (siglip.n_embd, siglip.patch, siglip.places, siglip.activation) == (768, 16, 196, "gelu_pytorch_tanh")
    assert (clip.n_embd, clip.patch, clip.places, clip.activation) == (768, 32, 50, "quick_gelu")


@pytest.mark.parametrize("config", [QWEN_3B, ONEVISION])
def test_the_written_config_describes_the_same_shape(config):
    shape = families.shape_of(config, PATH)
    assert families.shape_of(families.config_of(shape), PATH) == shape
