"""Small configurations of every architecture: a family and what its ``config.json`` says beside ``SIZES``."""

VOCABULARY = 300
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
LONGER = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES = {
    "llama": ("llama", {}),
    "llama, biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, llama3": ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}}),
    "llama, linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama, dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "qwen2": ("qwen2", {}),
    "qwen2, yarn": ("qwen2", {"rope_scaling": {"rope_type": "yarn", **LONGER}}),
    "qwen3, wide heads": ("qwen3", {"head_dim": 32}),
    "qwen3, biases, tied": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {"n_layer": 3, "n_head": 4, "n_embd": 64, "n_positions": 256}),
}
