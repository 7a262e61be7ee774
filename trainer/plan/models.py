"""Shapes that are known by name. Each is what the model's published ``config.json`` says.

Their parameters are those of transformers' models of these shapes (``tests/gpt/test_plan_parameters.py``).
"""

from __future__ import annotations

from typing import Dict

from trainer.plan.errors import PlanError
from trainer.plan.shape import Shape


def _gpt2(name: str, layers: int, hidden: int, heads: int) -> Shape:
    return Shape(name, "gpt2", layers, hidden, heads, heads, 64, 4 * hidden, 50257, 1024, tied=True, qkv_bias=True)


def _llama(name: str, layers: int, hidden: int, heads: int, kv: int, inner: int, vocab: int, context: int) -> Shape:
    template = {32000: "llama2", 128256: "llama3", 32768: "mistral"}[vocab]
    return Shape(name, "llama", layers, hidden, heads, kv, 128, inner, vocab, context, tied=False, template=template)


def _qwen(name: str, layers: int, hidden: int, heads: int, kv: int, inner: int, vocab: int, *, tied: bool) -> Shape:
    width = hidden // heads
    return Shape(name, "llama", layers, hidden, heads, kv, width, inner, vocab, 32768, tied, True, "qwen")


MODELS: Dict[str, Shape] = {
    each.name: each
    for each in (
        # huggingface.co/openai-community; layers and widths: "Language Models are Unsupervised Multitask Learners",
        # table 2, whose own counts of parameters (117 M to 1542 M) are not those of the published models
        _gpt2("gpt2", 12, 768, 12),
        _gpt2("gpt2-medium", 24, 1024, 16),
        _gpt2("gpt2-large", 36, 1280, 20),
        _gpt2("gpt2-xl", 48, 1600, 25),
        # huggingface.co/meta-llama; Llama 3's: arXiv 2407.21783, table 3, where the vocabulary is rounded to 128,000
        _llama("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 4096),
        _llama("llama-2-13b", 40, 5120, 40, 40, 13824, 32000, 4096),
        _llama("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, 4096),
        _llama("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 8192),
        _llama("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 8192),
        # huggingface.co/Qwen; arXiv 2412.15115, table 1. Positions are those of the Instruct models; of the others,
        # from 7B on, config.json says 131072
        _qwen("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151936, tied=True),
        _qwen("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151936, tied=True),
        _qwen("qwen2.5-3b", 36, 2048, 16, 2, 11008, 151936, tied=True),
        _qwen("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, tied=False),
        _qwen("qwen2.5-14b", 48, 5120, 40, 8, 13824, 152064, tied=False),
        _qwen("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064, tied=False),
        _qwen("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152064, tied=False),
        # huggingface.co/mistralai/Mistral-7B-v0.3; the paper, arXiv 2310.06825, is v0.1's, with 32000 tokens
        _llama("mistral-7b", 32, 4096, 32, 8, 14336, 32768, 32768),
    )
}


def named(name: str) -> Shape:
    """The shape of that name, whatever its case, and with or without its hub's owner and what is behind it.

    Raises:
        PlanError: it is not in the table.
    """
    word = name.lower().rpartition("/")[2].replace("_", "-").replace("meta-", "")
    fitting = [key for key in MODELS if word == key or word.startswith(f"{key}-")]
    if not fitting:
        raise PlanError(
            f"there is no model {name}: neither a config.json nor a name of the table",
            hint=f"a folder with a config.json, or one of {', '.join(MODELS)}",
        )
    return MODELS[max(fitting, key=len)]
