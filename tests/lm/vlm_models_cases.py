"""Small configurations of vision-language models, and of the pairs that one is composed of."""

VOCABULARY, IMAGE = 300, 299
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
QWEN_TOWER = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 44, "num_heads": 2, "out_hidden_size": 64, "patch_size": 7,
    "window_size": 28, "fullatt_block_indexes": [1],
}  # fmt: skip
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER}
CLIP = {"model_type": "clip_vision_model", **TOWER}
LLAVA = {"image_token_index": IMAGE, "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56], [28, 84]]}
MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
SPECIAL = {"video_token_id": 298, "vision_start_token_id": 297, "vision_end_token_id": 296}
CASES = {
    "siglip and qwen2": (
        "llava_onevision",
        {**LLAVA, "vision_config": SIGLIP, "text_config": {"model_type": "qwen2", **TEXT}},
    ),
    "siglip, one layer less, and qwen3, tied": (
        "llava_onevision",
        {
            **LLAVA, "vision_feature_layer": -2, "vision_config": SIGLIP, "tie_word_embeddings": True,
            "text_config": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True, **TEXT},
        },
    ),
    "clip and llama": (
        "llava_onevision",
        {
            **LLAVA, "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "vision_config": CLIP,
            "text_config": {"model_type": "llama", **TEXT}, "multimodal_projector_bias": False,
        },
    ),
    "qwen2.5-vl": (
        "qwen2_5_vl",
        {
            "image_token_id": IMAGE, **SPECIAL, "vision_config": QWEN_TOWER,
            "text_config": {"rope_scaling": MROPE, **TEXT},
        },
    ),
}  # fmt: skip
_TEXT_TOWER = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
_BOTH = {"vision_config": TOWER, "text_config": {"num_attention_heads": 2, **_TEXT_TOWER}}
COMPOSED = {
    "composed: siglip, qwen2": ("siglip", _BOTH, "qwen2"),
    "composed: siglip's tower, qwen3": ("siglip_vision_model", TOWER, "qwen3"),
    "composed: clip, llama": ("clip", _BOTH, "llama"),
}
