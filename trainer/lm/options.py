"""Reads the options of a training: from ``--key value``, then a file (``--config``, YAML or JSON), then the defaults.

Bounds and the rules between options hold for the command line, for files, and for the options that a resumed training
inherits from its checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

from trainer.lm import families
from trainer.lm.config import CHOICES, PATHS, SIZES, Config
from trainer.lm.errors import RefusedError
from trainer.lm.parser import Parser, check_bound
from trainer.lm.rules import RELATIONS


@dataclass(frozen=True)
class UserOptions:
    """The options given on a command line and in its file, without defaults."""

    values: Mapping[str, Any]
    path: Optional[Path] = None
    in_file: Sequence[str] = ()  # options whose value comes from the file

    def where(self, name: str) -> str:
        """Where an option was given: ``--max-iters``, or ``options.yaml: max_iters``."""
        return "%s: %s" % (self.path, name) if name in self.in_file else option(name)


def option(name: str) -> str:
    """The command-line option of a value: ``--max-iters``."""
    return "--" + name.replace("_", "-")


def read(argv: Optional[List[str]] = None, program: str = "trainer.lm") -> UserOptions:
    """Read a command line and its file. ``program``: one of ``WHAT``, for ``--help``.

    Raises:
        RefusedError: an unknown option or key, an invalid value, or a number outside its bound.
    """
    parser = _parser(program)
    options = parser.read(argv)
    path = options.pop("config", None)
    values = dict(_from_file(path)) if path else {}
    in_file = [name for name in values if name not in options]
    values.update(options)
    return UserOptions(values, path, in_file)


def from_arguments(argv: Optional[List[str]] = None) -> Config:
    """Return the options of a training that is not resumed.

    Raises:
        RefusedError: see ``read`` and ``merge``.
    """
    return merge(read(argv))


WHAT = {
    "trainer.lm": "Train a language model: GPT-2, Llama, Qwen2, Qwen2.5 or Qwen3.",
    "trainer.vlm": "Train a vision-language model: Qwen2.5-VL, LLaVA-OneVision, or a tower and a decoder.",
}


def _parser(program: str) -> Parser:
    parser = Parser(program, WHAT[program])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "Rules between options:\n" + "\n".join("  " + each.rule for each in RELATIONS)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="options as YAML or JSON; the command line takes precedence"
    )
    for each in dataclasses.fields(Config):
        name, what, bound = option(each.name), each.metadata["help"], each.metadata.get("bound")
        shown = "%s (%s)" % (
            what,
            "required" if each.name == "data" else "none" if each.default in ("", ()) else each.default,
        )
        common: Dict[str, Any] = {"dest": each.name, "default": argparse.SUPPRESS}
        if bound:
            number: Any = each.default
            parser.number(name, number, bound, what, **common)
            continue
        common["help"] = shown.replace("%", "%%")
        if each.name in PATHS:
            parser.add_argument(name, nargs="+", metavar="PATH", **common)
        elif isinstance(each.default, bool):
            parser.add_argument(name, type=_flag, nargs="?", const=True, metavar="true|false", **common)
        else:
            kind = type(each.default)
            choices = _choices(each)
            parser.add_argument(name, type=kind, choices=choices, metavar=None if choices else kind.__name__, **common)
    return parser


def _choices(each: Any) -> Any:
    return each.metadata.get("choices") or CHOICES.get(each.name)


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError("true or false, not %r" % text)
    return text.lower() == "true"


def _from_file(path: Path) -> Dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RefusedError("%s: %s" % (path, error.strerror), "--config FILE, a file with options") from error
    try:
        if path.suffix == ".json":
            options_read = json.loads(text)
        else:
            import yaml  # noqa: PLC0415 - JSON needs no library

            options_read = yaml.safe_load(text)
    except ImportError as error:
        raise RefusedError("%s: PyYAML is not installed" % path, "write it as JSON, in a file *.json") from error
    except Exception as error:
        raise RefusedError("%s cannot be read: %s" % (path, str(error).replace("\n", " "))) from error
    if not isinstance(options_read, dict):
        raise RefusedError("%s contains no options" % path, "lines such as max_iters: 1000")
    return {key: _value(path, key, value) for key, value in options_read.items()}


def _value(path: Path, key: str, value: Any) -> Any:
    fields = {each.name: each for each in dataclasses.fields(Config)}
    if key not in fields:
        near = difflib.get_close_matches(str(key), fields, 1)
        raise RefusedError("%s: unknown option %s" % (path, key), "did you mean %s?" % near[0] if near else "")
    default = fields[key].default
    if key in PATHS:
        named = [value] if isinstance(value, str) else value
        if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
            raise RefusedError("%s: %s: %r is not a list of paths" % (path, key, value))
        return named
    if isinstance(default, float) and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            value = float(value)  # YAML reads 3e-4 as a string
        except ValueError:
            value = str(value)
        except OverflowError:
            value = math.inf
    if type(value) is not type(default):
        raise RefusedError("%s: %s: %r is not of type %s" % (path, key, value, type(default).__name__))
    choices = _choices(fields[key])
    if choices and value not in choices:
        raise RefusedError("%s: %s: %r is not one of %s" % (path, key, value, ", ".join(choices)))
    bound = fields[key].metadata.get("bound")
    if bound:
        number: Any = value
        check_bound("%s: %s" % (path, key), number, bound)
    return value


def merge(options: UserOptions, stored: Optional[Mapping[str, Any]] = None, source: str = "") -> Config:
    """Return all options: those given, then those ``stored`` in a checkpoint or model ``source``, then the defaults.

    Raises:
        RefusedError: options contradict each other, or a stored one is outside its bound.
    """
    fields = {each.name: each for each in dataclasses.fields(Config)}
    stored = dict(stored or {})
    if isinstance(stored.get("checkpointing"), bool):  # of checkpoints until format 2
        stored["checkpointing"] = "full" if stored["checkpointing"] else "off"
    inherited = {name: stored[name] for name in stored if name in fields and name not in options.values}
    for name, value in inherited.items():
        bound = fields[name].metadata.get("bound")
        if bound:
            check_bound("%s: %s" % (source, name), value, bound)
    config = _with_sizes(Config(**{**inherited, **options.values}), options)
    if not config.data:
        raise RefusedError("--data is missing", "python -m trainer.lm.prepare TEXT --out DIR, then --data DIR")

    def shown(name: str) -> str:
        text = "%s %s" % (options.where(name), getattr(config, name))
        if name in options.values:
            return text
        return "%s (%s)" % (text, source if name in inherited else "default")

    for relation in RELATIONS:
        if not relation.holds(config):
            raise RefusedError(relation.error.format_map({name: shown(name) for name in fields}), relation.fix)
    return config


def _with_sizes(config: Config, options: UserOptions) -> Config:
    """Set the sizes of a published model, unless others are given."""
    shape = families.named(config.model)
    if shape is None:
        return config
    sizes: Dict[str, Any] = {name: getattr(shape, name) for name in SIZES}
    for name, size in sizes.items():
        if options.values.get(name, size) != size:
            what = "%s %s: %s has %d" % (options.where(name), options.values[name], config.model, size)
            raise RefusedError(what, "--model custom, or remove %s" % option(name))
    return dataclasses.replace(config, **sizes)
