"""Generates text: ``python -m trainer.lm.sample out/best --prompt "Once upon"``. Equal seeds give equal texts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import List, Optional, Tuple

import torch

from trainer.bounds import Bound
from trainer.lm import checkpoint, families, lora, tokens, weights
from trainer.lm.errors import RefusedError, exit_with
from trainer.lm.model import Decoder, Past, evaluating, fill
from trainer.lm.parser import Parser


def load(path: Path, base: Optional[Path] = None) -> Tuple[Decoder, tokens.Tokens]:
    """Load the model, in fp32 on the CPU, and the vocabulary of a checkpoint or a Hugging Face folder.

    Adapters are merged into their ``base``; None: where it was.

    Raises:
        RefusedError: one of them does not exist, or they do not match.
    """
    if (path / "config.json").is_file():
        folder, digest = path, weights.read_digest(path)
        model = families.read_shape(path).make()
        fill(model, weights.read(model.shape, path))
    else:
        found = checkpoint.find(path)
        folder, digest = found.folder, found.state.vocabulary
        model = found.state.shape.make()
        with found.reader() as reader:
            fill(model, lora.weights_of(found, reader, base))
    # A fine-tuning keeps the tokenizer among the small files of its model.
    vocabulary = tokens.load(folder) or tokens.load(folder / checkpoint.MODEL)
    if vocabulary is None:
        raise RefusedError("%s has no vocabulary" % folder, "copy the tokenizer.json of its data there")
    tokens.check(vocabulary, digest, folder)
    if vocabulary.size > model.shape.vocab_size:
        what = "%s: the vocabulary has %d tokens, the model only %d" % (folder, vocabulary.size, model.shape.vocab_size)
        raise RefusedError(what, "copy the tokenizer.json of its data there")
    return model, vocabulary


def write(
    model: Decoder,
    prompt: List[int],
    count: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
    known: Optional[int] = None,
) -> List[int]:
    """Return ``count`` tokens that follow the prompt. A temperature of 0 always takes the most likely token.

    Only the first ``known`` tokens are drawn: a model may have more rows than its vocabulary has tokens.

    Each token is computed once until the text is longer than the block. From then on every new token changes the
    positions of all others, so the cache is useless and the whole block is computed again.
    """
    device = next(model.parameters()).device
    line = torch.tensor([prompt], device=device)
    block = model.shape.block_size
    past = [Past() for _ in range(model.shape.n_layer)]
    with evaluating(model):
        for _ in range(count):
            fits = line.shape[1] <= block
            logits = model(line[:, past[0].seen :], past=past) if fits else model(line[:, -block:])
            logits = logits[:, :known].cpu()  # drawn on the CPU: the same on every device
            if temperature == 0:
                chosen = logits.argmax(dim=-1, keepdim=True)
            else:
                logits /= temperature
                if top_k:
                    least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                    logits[logits < least] = float("-inf")
                chosen = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
            line = torch.cat([line, chosen.to(device)], dim=1)
    return [int(token) for token in line[0, len(prompt) :]]


def make_parser() -> Parser:
    """Return the option parser."""
    parser = Parser("trainer.lm.sample", __doc__)
    parser.add_argument("model", type=Path, help="a checkpoint, or a Hugging Face folder")
    parser.add_argument("--base", type=Path, metavar="DIR", help="the base of adapters (where it was in the training)")
    parser.add_argument("--prompt", default="\n")
    parser.number("--tokens", 200, Bound(low=1, high=1 << 30), "tokens to generate")
    parser.number("--count", 1, Bound(low=1, high=1 << 30), "texts to generate")
    parser.number(
        "--temperature", 0.8, Bound(low=0, high=1e3), "randomness of the draw (0: always the most likely token)"
    )
    parser.number("--top-k", 200, Bound(low=0, high=1 << 30), "draw from this many most likely tokens (0: all)")
    parser.number("--seed", 1337, Bound(low=0, high=(1 << 63) - 1), "for the draws")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser


def main(argv: Optional[List[str]] = None) -> None:
    """Run the program."""
    options = argparse.Namespace(**make_parser().read(argv))
    model, vocabulary = load(options.model, options.base)
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise RefusedError("--device cuda: torch %s sees no GPU here" % torch.__version__, "--device cpu")
    model.to("cuda" if has_gpu and options.device != "cpu" else "cpu")
    prompt = list(vocabulary.encode(options.prompt))
    if not prompt:
        raise RefusedError("--prompt is empty", "--prompt TEXT")
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(options.count):
        written = write(model, prompt, options.tokens, options.temperature, options.top_k, generator, vocabulary.size)
        sys.stdout.write(options.prompt + vocabulary.decode(written) + "\n")


if __name__ == "__main__":
    exit_with(main)
