"""What a Python script tells about its training: the libraries that it uses, and the arguments that it sets itself.

The script is parsed and never run. Modules of the same folder that it imports are read too.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provision.run.script_source import Source

_TRAINERS = ("Trainer", "TrainingArguments", "HfArgumentParser")
_ARGUMENTS = ("TrainingArguments",)
_OWN_DEFAULTS = frozenset(
    {"trl", "unsloth", "swift", "sentence_transformers", "setfit"}
)  # their arguments' defaults differ
_PARSERS = ("HfArgumentParser", "TrlParser", "TransformersArgumentParser")


@dataclass(frozen=True)
class Program:
    """A script.

    Attributes:
        modules: the top names of the modules that it imports.
        has_trainer: it uses a Trainer of transformers or of a library on top.
        reads_json: it calls ``json.load`` or ``json.loads``.
        parses: it makes TrainingArguments from the command line.
        given: by name, the constants that it gives to TrainingArguments; None if it does not construct them.
        unknown: arguments whose values or defaults cannot be read from it; ``*`` for all.
        files: JSON files that it names.
    """

    modules: frozenset[str] = frozenset()
    has_trainer: bool = False
    reads_json: bool = False
    parses: bool = False
    given: dict[str, Any] | None = None
    unknown: frozenset[str] = frozenset()
    files: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Who reads its DeepSpeed file: see ``trainer.ds_config.check.Context``."""
        if self.has_trainer:
            return "trainer"
        if "accelerate" in self.modules:
            return "accelerate"
        return "own" if "deepspeed" in self.modules else "unknown"


@dataclass
class _Found:
    modules: set[str] = field(default_factory=set)
    trainer: bool = False
    json: bool = False
    parses: bool = False
    given: dict[str, Any] | None = None
    unknown: set[str] = field(default_factory=set)
    files: dict[str, None] = field(default_factory=dict)


def read_program(source: Source | None) -> Program | None:
    """What a script's source tells; None without one that can be parsed."""
    if source is None or not source.trees:
        return None
    found = _Found()
    for tree in source.trees:
        _visit(tree, found)
    if found.modules & _OWN_DEFAULTS:
        found.unknown.add("*")
    return Program(
        frozenset(found.modules), found.trainer, found.json, found.parses, found.given, frozenset(found.unknown),
        tuple(found.files),
    )  # fmt: skip


def _visit(tree: ast.Module, found: _Found) -> None:
    """Collect what a file tells."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.modules |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            top = node.module.partition(".")[0]
            found.modules.add(top)
            if top in {"transformers", *_OWN_DEFAULTS, "llamafactory"}:
                found.trainer |= any(
                    each.name.endswith((*_TRAINERS, "Config")) and _is_trainer(top, each.name) for each in node.names
                )
                found.parses |= any(each.name in _PARSERS for each in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.trainer |= node.value.id == "transformers" and node.attr.endswith(_TRAINERS)
            found.parses |= node.attr in _PARSERS
            found.json |= node.value.id == "json" and node.attr in {"load", "loads"}
        elif isinstance(node, ast.ClassDef):
            _class(node, found)
        elif isinstance(node, ast.Call):
            _call(node, found)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(".json"):
            found.files.setdefault(node.value[:255])


def _is_trainer(top: str, name: str) -> bool:
    """``SFTConfig`` of trl is TrainingArguments; ``GPT2Config`` of transformers is a model's configuration."""
    return top != "transformers" or not name.endswith("Config")


def _class(node: ast.ClassDef, found: _Found) -> None:
    """A class of arguments: its own defaults are not transformers'."""
    if any(_name(base).endswith(_ARGUMENTS) for base in node.bases):
        for one in node.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                found.unknown.add(one.target.id)


def _call(node: ast.Call, found: _Found) -> None:
    """A call that constructs the arguments in the script."""
    if not _name(node.func).endswith(_ARGUMENTS):
        return
    given = {} if found.given is None else found.given
    for each in node.keywords:
        if each.arg is None:
            found.unknown.add("*")
            continue
        try:
            given[each.arg] = ast.literal_eval(each.value)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            found.unknown.add(each.arg)
    found.given = given


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@functools.cache
def is_deepspeed(path: Path) -> bool:
    """Whether a JSON file looks like a DeepSpeed configuration."""
    try:
        with path.open("rb") as file:
            text = file.read(1 << 16)
    except (OSError, ValueError):
        return False
    return any(key in text for key in (b"zero_optimization", b"train_micro_batch_size_per_gpu", b"train_batch_size"))
