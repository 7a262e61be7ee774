"""Trains GPT-2 models: ``python -m trainer.gpt``, beside it ``prepare``, ``sample`` and ``export``.

Everything here runs in a training environment (torch, numpy, safetensors; DeepSpeed and tokenizers where they are asked
for) and reaches no network but that between the ranks.
"""
