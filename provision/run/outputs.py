"""Finds the folder of a script's checkpoints, without running anything.

Its arguments have precedence over configuration files that they name, and these over the defaults in its source.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from provision.errors import UsageError
from provision.run.config_text import load_either
from provision.run.job import Job, is_file
from provision.run.script_source import Source
from trainer.words import Option, read

# Options of transformers, nanoGPT, litgpt, Lightning, Megatron-LM and usual scripts. The first of these has precedence:
# some programs read an initial model from a --checkpoint_dir and write to an --output_dir (torchtune, litgpt).
NAMES = (
    *("output_dir", "out_dir", "save_dir", "default_root_dir", "save_path", "save", "ckpt_dir", "checkpoint_dir"),
    *("checkpoints_dir", "save_folder", "output_path", "output", "out", "dump_folder", "logdir", "log_dir"),
)
_CONFIGURATIONS = (".yaml", ".yml", ".json")
_DEPTH = 4  # levels of a configuration
_CHECKPOINTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")


def output_of(job: Job, folder: Path | None, source: Source) -> str | None:
    """The folder of the checkpoints as the script names it; None if it is not known.

    Args:
        job: a script or module. Its ``output`` has precedence.
        folder: the folder that is sent, in which the script starts; None: nothing is sent.
        source: the script's.
    """
    if job.output is not None:
        return job.output
    options = read(job.args)
    typed = {option.name.rpartition(".")[2]: option.values[0] for option in options if option.values}
    for values in (typed, *_configurations(options, folder), source.defaults(NAMES)):
        for name in NAMES:
            if found := _folder(values.get(name)):
                return found
    return None


def _folder(value: Any) -> str | None:
    """A value as a folder: of a checkpoint's file, the parent. The folder that is sent is none: its files are code."""
    if not isinstance(value, str) or not value.strip() or "{" in value or "$" in value or "\0" in value:
        return None
    path = posixpath.normpath(value.replace("\\", "/"))
    if path.lower().endswith(_CHECKPOINTS):
        path = posixpath.dirname(path)
    return path if path not in ("", ".", "/", "-") and "://" not in value else None


def _configurations(options: tuple[Option, ...], folder: Path | None) -> Iterator[Mapping[str, Any]]:
    """The values of the configuration files that the arguments name."""
    for name in (value for option in options for value in option.values) if folder is not None else ():
        path = Path(folder or "") / name.replace("\\", "/")
        if Path(name).suffix.lower() in _CONFIGURATIONS and is_file(path):
            try:
                yield _flat(load_either(path, hint=""), _DEPTH)
            except UsageError:  # the program reads it, in whatever format it is
                continue
        elif Path(name).suffix == ".py" and is_file(path):  # nanoGPT's config/train_x.py
            yield Source.read([path]).globals()


def _flat(value: Any, depth: int) -> dict[str, Any]:
    """The values of nested mappings by key; an outer one has precedence."""
    if not isinstance(value, dict):
        return {}
    found: dict[str, Any] = {}
    for each in value.values() if depth else ():
        found = {**_flat(each, depth - 1), **found}
    return {
        **found,
        **{str(key).replace("-", "_").lower(): each for key, each in value.items() if not isinstance(each, dict)},
    }
