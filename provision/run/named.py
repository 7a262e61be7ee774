"""Values that may be paths: of a command line, of the configurations that it names, and of the script's text.

A configuration is YAML, JSON or Python (nanoGPT's ``config/train_shakespeare_char.py``). Python is parsed, never run:
only string constants count, each with the name that it is assigned to. The command line's value of an option replaces
that of a configuration, which replaces that of the script. Options for results (``--out_dir``) are omitted.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from provision.errors import UsageError
from provision.run.config_text import load_either
from provision.run.job import Job
from provision.run.script_source import Source
from trainer.words import Option

_CONFIGURATIONS = (".yaml", ".yml", ".json")
_VALUES = 2000  # values of one file
LONGEST = 300  # characters of a path
_RESULTS = re.compile(
    r"(^|_)(out|output|outputs|save|saved|log|logs|logging|logger|dump|result|results|report|write|export|dest"
    r"|cache|work|workdir|project|wandb|tensorboard|ckpt_dir|checkpoint_dir|checkpoints_dir|run_name)(_|$)"
)


@dataclass(frozen=True)
class Named:
    """A value that may be a path.

    Attributes:
        key: the option or variable, lower-case with ``_``; "" for none.
        path: the value, normalised, relative to the code folder.
        source: what names it, for messages: ``the command line`` or a file.
        weak: it is only in the script's text.
        prefix: code joins it with a value that only the running program knows: it names no file itself.
    """

    key: str
    path: str
    source: str
    weak: bool = False
    prefix: bool = False


class _Value(NamedTuple):
    """A string with its key; ``prefix`` as in ``Named``."""

    key: str
    text: str
    prefix: bool = False


def named_paths(job: Job, folder: Path, script: str | None, source: Source) -> tuple[Named, ...]:
    """All values that may be paths.

    Args:
        job: the job.
        folder: the code folder.
        script: the script's path in it; None for a module outside.
        source: the script's.
    """
    typed = list(_of_options(job.options))
    groups = [("the command line", False, typed)]
    for _, value, _ in typed:
        path = _plain(value)
        suffix = Path(value).suffix.lower()
        if path and path != script and suffix in (*_CONFIGURATIONS, ".py") and (folder / path).is_file():
            groups.append((path, False, _of_file(folder / path)))
    if script is not None:
        groups.append((script, True, _of_source(source)))
    found: list[Named] = []
    known: set[str] = set()  # options that a stronger source sets
    for where, weak, values in groups:
        keys = set()
        for key, value, prefix in values:
            path = _plain(value)
            name = key.lower().replace("-", "_")
            if name and name in known:
                continue
            keys.add(name)
            if path and not _RESULTS.search(name.rpartition(".")[2]):
                found.append(Named(name, path, where, weak, prefix))
        known |= keys - {""}
    return tuple(found)


def _plain(value: str) -> str | None:
    """A value as a relative path; None if it cannot be one in the code folder."""
    if not value or len(value) > LONGEST or value.startswith(("/", "~", "-")) or "://" in value:
        return None
    if "\n" in value or "\0" in value:
        return None
    path = os.path.normpath(value)
    return None if path in (".", "..") or path.startswith("../") else path


def _of_options(options: Iterable[Option]) -> Iterator[_Value]:
    """The values of options and plain words, and the parts of a value that is a list with commas."""
    for option in options:
        for value in option.values:
            parts = value.split(",") if "," in value else ()
            yield from (_Value(option.name, each) for each in (value, *parts))


def _of_file(path: Path) -> list[_Value]:
    """The strings of a configuration or a Python file, with their keys; none if it cannot be read.

    A faulty configuration is not reported here: whether it is one is known to the program only.
    """
    try:
        if path.suffix.lower() == ".py":
            return _of_source(Source.read([path]))
        return list(islice(_strings(load_either(path, hint=""), ""), _VALUES))
    except (UsageError, RecursionError):
        return []


def _of_source(source: Source) -> list[_Value]:
    """The strings of a program's own module, with the names that they are assigned to."""
    try:
        return list(islice((each for tree in source.own.trees for each in _constants(tree, "")), _VALUES))
    except RecursionError:
        return []


def _strings(data: Any, key: str) -> Iterator[_Value]:
    """The strings in nested data, each with the innermost key."""
    match data:
        case str():
            yield _Value(key, data)
        case dict():
            for name, value in data.items():
                yield from _strings(value, str(name))
        case list():
            for value in data:
                yield from _strings(value, key)


def _constants(node: ast.AST, key: str) -> Iterator[_Value]:
    """The string constants of Python code, each with the name that it is assigned to."""
    match node:
        case ast.Constant(value=str() as text):
            yield _Value(key, text)
        case ast.Expr(value=ast.Constant()):  # a docstring
            return
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value):
            yield from _constants(value, name)
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield from _constants(value, name)
        case ast.keyword(arg=str() as name, value=value):
            yield from _constants(value, name)
        case ast.Call(func=ast.Attribute(attr="add_argument")):
            yield from _default(node)
        case ast.Call() | ast.BinOp(op=ast.Div()) | ast.JoinedStr() if joined := _joined(node):
            yield from _of_join(joined, key)
        case _:
            yield from _of_children(node, key)


def _of_children(node: ast.AST, key: str) -> Iterator[_Value]:
    if isinstance(node, ast.Dict):
        for each, value in zip(node.keys, node.values, strict=True):
            yield from _constants(value, _text(each) or key)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _constants(child, key)


def _of_join(parts: list[ast.expr], key: str) -> Iterator[_Value]:
    """The parts of a path. Its first one is only a prefix if another is not known."""
    first, *rest = parts
    yield _Value(key, _text(first), prefix=any(not isinstance(each, ast.Constant) for each in rest))
    for each in rest:
        yield from _constants(each, key)


def _joined(node: ast.expr) -> list[ast.expr]:
    """The parts of a path that starts with a constant: ``os.path.join("data", x)``, ``"data" / x``, ``f"data/{x}"``."""
    match node:
        case ast.Call(func=ast.Attribute(attr="join" | "joinpath"), args=[ast.Constant(), _, *_] as parts):
            found = parts
        case ast.BinOp(left=ast.Call(args=[ast.Constant() as first]) | (ast.Constant() as first), right=right):
            found = [first, right]
        case ast.JoinedStr(values=[ast.Constant(), *_] as parts):
            found = parts
        case _:
            return []
    return found if _text(found[0]) else []


def _default(call: ast.Call) -> Iterator[_Value]:
    """The default of an option of argparse."""
    option = max(map(_text, call.args), key=len, default="").lstrip("-")
    for each in call.keywords:
        if each.arg == "default":
            yield from _constants(each.value, option)


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
