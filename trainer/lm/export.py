"""Exports a checkpoint as a model of transformers: ``python -m trainer.lm.export out/best FOLDER``."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import List, Optional

from trainer.lm import checkpoint, lora, tokens, weights
from trainer.lm.errors import RefusedError, exit_with
from trainer.lm.parser import Parser


def export(
    found: checkpoint.Checkpoint, folder: Path, dtype: str, adapter: bool = False, base: Optional[Path] = None
) -> None:
    """Write ``model.safetensors``, ``config.json`` and the vocabulary. The folder appears when it is complete.

    Args:
        found: the checkpoint.
        folder: a new one.
        dtype: of the weights.
        adapter: write LoRA's adapters for peft, instead of merging them into their base.
        base: its folder; None: where it was.

    Raises:
        RefusedError: the folder exists or is not writable, or the checkpoint has another vocabulary.
    """
    if folder.exists():
        raise RefusedError("%s already exists" % folder, "use another folder, or rm -r %s" % folder)
    vocabulary = tokens.load(found.folder)
    tokens.check(vocabulary, found.state.vocabulary, found.folder)
    temporary = folder.with_name(".%s-part" % folder.name)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        with found.reader() as reader:
            if adapter:
                lora.export_adapter(found, reader, temporary, dtype)
            else:
                whole = lora.in_order(lora.weights_of(found, reader, base))
                weights.export(found.state.shape, whole, temporary, vocabulary, found.kept(), dtype)
        if vocabulary and not (temporary / vocabulary.file).exists():
            vocabulary.save(temporary)
        temporary.rename(folder)
    except RefusedError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RefusedError("%s: %s" % (folder, error.strerror), "a writable folder with free space") from error


def make_parser() -> Parser:
    """Return the option parser."""
    parser = Parser("trainer.lm.export", __doc__)
    parser.add_argument("checkpoint", type=Path, help="out/iter_N, or out/best, out/final, out/latest")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=checkpoint.WRITTEN, default="float32", help="of the weights")
    parser.add_argument("--adapter", action="store_true", help="write LoRA's adapters for peft, without their base")
    parser.add_argument("--base", type=Path, metavar="DIR", help="the base of adapters (where it was in the training)")
    return parser


def main(argv: Optional[List[str]] = None) -> None:
    """Run the program."""
    options = argparse.Namespace(**make_parser().read(argv))
    found = checkpoint.find(options.checkpoint)
    export(found, options.folder, options.dtype, options.adapter, options.base)
    sys.stdout.write("%s: step %d of %s\n" % (options.folder, found.state.step, found.folder))


if __name__ == "__main__":
    exit_with(main)
