"""Cases of adapters: an architecture and the options of a training."""

ADAPTED = {
    "llama": ("llama", {}),
    "biases": ("llama, biases, tied", {"lora_targets": "q_proj,v_proj,down_proj", "lora_alpha": 3.0}),
    "qwen2": ("qwen2", {"lora_targets": "k_proj,up_proj", "lora_rslora": True}),
    "qwen3": ("qwen3, wide heads", {"lora_targets": "o_proj,gate_proj"}),
    "gpt2": ("gpt2", {}),
    "gpt2 c_proj": ("gpt2", {"lora_targets": "c_proj"}),
}
