"""Trains GPT-2 models: ``python -m trainer.lm``, with the programs ``prepare``, ``sample`` and ``export``.

The package runs in a training environment: torch, numpy and safetensors, with DeepSpeed and tokenizers where an option
needs them. Its only network traffic is between the ranks.
"""
