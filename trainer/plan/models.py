"""The shapes of models: by name, or from a ``config.json`` as transformers writes it.

The known models have the sizes of their published ``config.json``. Their numbers of parameters equal those of
transformers' models (``tests/lm/test_plan_parameters.py``).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Dict

from trainer.agent.contract.untrusted import LIMIT, UntrustedError, parse_object
from trainer.plan.config_json import parse
from trainer.plan.shape import PlanError, Shape

_EXPERTS = re.compile(r"-a\d+(?:\.\d+)?b\b|-moe\b|x\d+b\b")  # qwen3-30b-a3b, mixtral-8x7b


def _gpt2(name: str, layers: int, hidden: int, heads: int) -> Shape:
    sizes = (layers, hidden, heads, heads, 64, 4 * hidden, 50257, 1024)
    return Shape(name, "gpt2", *sizes, tied=True, qkv_bias=True, kind="gpt2")


def _llama(name: str, layers: int, hidden: int, heads: int, kv: int, inner: int, vocab: int, context: int) -> Shape:
    template = {32000: "llama2", 128256: "llama3", 32768: "mistral"}[vocab]
    kind = "mistral" if vocab == 32768 else "llama"
    template = "default" if context == 2048 else template  # the first Llama has no template
    return Shape(
        name, "llama", layers, hidden, heads, kv, 128, inner, vocab, context, tied=False, template=template, kind=kind
    )


def _qwen(name: str, layers: int, hidden: int, heads: int, kv: int, inner: int, vocab: int, *, tied: bool) -> Shape:
    width = hidden // heads
    return Shape(name, "llama", layers, hidden, heads, kv, width, inner, vocab, 32768, tied, True, "qwen", kind="qwen2")


def _llama3(name: str, layers: int, hidden: int, heads: int, inner: int, *, width: int = 128, tied: bool) -> Shape:
    context = 131072
    return Shape(name, "llama", layers, hidden, heads, 8, width, inner, 128256, context, tied, template="llama3")


def _qwen3(name: str, layers: int, hidden: int, heads: int, inner: int, *, tied: bool) -> Shape:
    vocab, context = 151936, 40960
    sizes = (layers, hidden, heads, 8, 128, inner, vocab, context)
    return Shape(name, "llama", *sizes, tied, False, "qwen3", True, kind="qwen3")


def _gemma2(name: str, layers: int, hidden: int, heads: int, kv: int, inner: int) -> Shape:
    sizes = (layers, hidden, heads, kv, 256, inner, 256000, 8192)
    return Shape(name, "llama", *sizes, tied=True, template="gemma2", kind="gemma2", norms=4)


# fmt: off
_MIXTRAL = Shape(
    "mixtral-8x7b", "llama", 32, 4096, 32, 8, 128, 14336, 32000, 32768, tied=False, template="mistral", kind="mixtral",
    experts=8, chosen=2, expert_inner=14336,
)
_QWEN3_MOE = Shape(
    "qwen3-30b-a3b", "llama", 48, 2048, 32, 4, 128, 6144, 151936, 40960, tied=False, template="qwen3", qk_norm=True,
    kind="qwen3_moe", experts=128, chosen=8, expert_inner=768,
)
# fmt: on

MODELS: Dict[str, Shape] = {
    each.name: each
    for each in (
        # huggingface.co/openai-community; layers and widths: "Language Models are Unsupervised Multitask Learners",
        # table 2, whose numbers of parameters (117 M to 1542 M) differ from those of the published models
        _gpt2("gpt2", 12, 768, 12),
        _gpt2("gpt2-medium", 24, 1024, 16),
        _gpt2("gpt2-large", 36, 1280, 20),
        _gpt2("gpt2-xl", 48, 1600, 25),
        # huggingface.co/meta-llama; Llama 3's: arXiv 2407.21783, table 3, where the vocabulary is rounded to 128,000
        # the first Llama: huggingface.co/huggyllama, arXiv 2302.13971, table 2 (33B is 30b there)
        _llama("llama-7b", 32, 4096, 32, 32, 11008, 32000, 2048),
        _llama("llama-13b", 40, 5120, 40, 40, 13824, 32000, 2048),
        _llama("llama-30b", 60, 6656, 52, 52, 17920, 32000, 2048),
        _llama("llama-65b", 80, 8192, 64, 64, 22016, 32000, 2048),
        _llama("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 4096),
        _llama("llama-2-13b", 40, 5120, 40, 40, 13824, 32000, 4096),
        _llama("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, 4096),
        _llama("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 8192),
        _llama("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 8192),
        _llama3("llama-3.1-8b", 32, 4096, 32, 14336, tied=False),
        _llama3("llama-3.1-70b", 80, 8192, 64, 28672, tied=False),
        _llama3("llama-3.1-405b", 126, 16384, 128, 53248, tied=False),
        _llama3("llama-3.2-1b", 16, 2048, 32, 8192, width=64, tied=True),
        _llama3("llama-3.2-3b", 28, 3072, 24, 8192, tied=True),
        _llama3("llama-3.3-70b", 80, 8192, 64, 28672, tied=False),
        # huggingface.co/Qwen; arXiv 2412.15115, table 1. Positions of the Instruct models; the base models' config.json
        # says 131072 from 7B on
        _qwen("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151936, tied=True),
        _qwen("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151936, tied=True),
        _qwen("qwen2.5-3b", 36, 2048, 16, 2, 11008, 151936, tied=True),
        _qwen("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, tied=False),
        _qwen("qwen2.5-14b", 48, 5120, 40, 8, 13824, 152064, tied=False),
        _qwen("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064, tied=False),
        _qwen("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152064, tied=False),
        # huggingface.co/Qwen; arXiv 2505.09388, table 1: the dense ones
        _qwen3("qwen3-0.6b", 28, 1024, 16, 3072, tied=True),
        _qwen3("qwen3-1.7b", 28, 2048, 16, 6144, tied=True),
        _qwen3("qwen3-4b", 36, 2560, 32, 9728, tied=True),
        _qwen3("qwen3-8b", 36, 4096, 32, 12288, tied=False),
        _qwen3("qwen3-14b", 40, 5120, 40, 17408, tied=False),
        _qwen3("qwen3-32b", 64, 5120, 64, 25600, tied=False),
        # huggingface.co/mistralai/Mistral-7B-v0.3; the paper, arXiv 2310.06825, describes v0.1, with 32000 tokens
        _llama("mistral-7b", 32, 4096, 32, 8, 14336, 32768, 32768),
        # huggingface.co/google: gemma-2-2b, gemma-2-9b; arXiv 2408.00118, table 1
        _gemma2("gemma-2-2b", 26, 2304, 8, 4, 9216),
        _gemma2("gemma-2-9b", 42, 3584, 16, 8, 14336),
        # experts: huggingface.co/mistralai/Mixtral-8x7B-v0.1, arXiv 2401.04088, table 1; arXiv 2505.09388, table 2
        _MIXTRAL,
        _QWEN3_MOE,
    )
}


def named(name: str) -> Shape:
    """Return the shape of a known name, in any case, with or without the hub's owner and a suffix.

    Raises:
        PlanError: the name is unknown.
    """
    word = name.lower().rpartition("/")[2].replace("_", "-").replace("meta-", "")
    fitting = [key for key in MODELS if word == key or word.startswith(f"{key}-")]
    if _EXPERTS.search(word) and not any(MODELS[key].experts for key in fitting):
        raise PlanError(
            f"{name} is a mixture of experts whose shape is not in the table",
            hint="name a folder with its config.json",
        )
    if not fitting:
        raise PlanError(
            f"unknown model {name}: neither a config.json nor a known name",
            hint=f"name a folder with a config.json, or one of {', '.join(MODELS)}",
        )
    return MODELS[max(fitting, key=len)]


def load(model: str) -> Shape:
    """Load the shape of a ``config.json``, of a folder with one, or of a known name.

    Raises:
        PlanError: there is no such model, or its config.json is not usable.
    """
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise PlanError(f"{path} has no config.json", hint="name a model's folder, as save_pretrained writes it")
    if not file.exists():
        if model.endswith(".json") or model.startswith((".", "/")):
            raise PlanError(f"{file} does not exist")
        return named(model)
    try:
        with file.open("rb") as opened:
            config = parse_object(opened.read(LIMIT + 1))
    except UntrustedError as error:
        raise PlanError(f"{file} {error}") from error
    except OSError as error:
        raise PlanError(f"cannot read {file}: {error.strerror}") from error
    name = path.name if path.is_dir() else file.parent.resolve().name
    return parse(config, str(file), name)
