"""A training config's text: YAML whose values can be replaced without touching the rest.

The config travels as the user wrote it. Loading and dumping it would change what LLaMA-Factory reads: PyYAML and
OmegaConf disagree on numbers such as ``1e-4``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from provision.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Document:
    """A YAML mapping that knows its text."""

    path: Path
    text: str
    data: dict[str, Any]
    places: dict[str, tuple[yaml.ScalarNode, yaml.Node]]

    def where(self, key: str) -> str:
        """``FILE:LINE: key`` for messages."""
        if key not in self.places:
            return f"{self.path}: {key}"
        return f"{self.path}:{self.places[key][0].start_mark.line + 1}: {key}"

    def rewritten(self, changes: dict[str, str]) -> str:
        """The text with some values replaced; a key that is not there is added at the end."""
        text = self.text
        spans = []
        for key, value in changes.items():
            if key not in self.places:
                spans.append(
                    (len(text), len(text), f"{'' if text.endswith(chr(10)) else chr(10)}{key}: {_quoted(value)}\n")
                )
                continue
            before, node = self.places[key]
            simple = isinstance(node, yaml.ScalarNode) and node.style in (None, "'", '"')
            if not simple or node.start_mark.index < before.end_mark.index:  # a block, a list, an alias
                return yaml.safe_dump(self.data | changes, sort_keys=False, allow_unicode=True)
            spans.append((node.start_mark.index, node.end_mark.index, _quoted(value)))
        for start, end, value in sorted(spans, reverse=True):
            text = text[:start] + value + text[end:]
        return text


def _quoted(value: str) -> str:
    return value if re.fullmatch(r"[A-Za-z./][\w./-]*", value, re.ASCII) else json.dumps(value)


def read(config: Path, overrides: Sequence[str] = ()) -> Document:
    """Read a training config; ``overrides`` (``KEY=VALUE``, in YAML) take the place of what it says.

    Raises:
        UsageError: it cannot be read, or is no YAML mapping; an override that cannot be written into it.
    """
    try:
        text = config.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"there is no {config}", hint="clusterctl train CONFIG.yaml") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{config} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from error
    except OSError as error:
        raise UsageError(f"{config} cannot be read: {error.strerror}") from error
    document = _parsed(config, text)
    if not overrides:
        return document
    return _parsed(config, _overridden(document, overrides))


def _parsed(config: Path, text: str) -> Document:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{config}{line}: not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{config} is not YAML: {error}") from error
    if not isinstance(root, yaml.MappingNode) or not isinstance(data, dict):
        raise UsageError(f"{config} is not a LLaMA-Factory config: it holds no `key: value` lines")
    places: dict[str, tuple[yaml.ScalarNode, yaml.Node]] = {}
    for key, value in root.value:
        if key.value in places:
            first = places[key.value][0].start_mark.line + 1
            raise UsageError(f"{config}:{key.start_mark.line + 1}: {key.value}: given before, in line {first}")
        places[key.value] = (key, value)
    return Document(config, text, data, places)


def _overridden(document: Document, overrides: Sequence[str]) -> str:
    """The text with the overrides written into it as they are, so that LLaMA-Factory reads their numbers itself."""
    values: dict[str, str] = {}
    for word in overrides:
        key, has, value = word.partition("=")
        if not has or not re.fullmatch(r"\w+", key):
            raise UsageError(
                f"{word}: a config's arguments are KEY=VALUE",
                hint="as in: clusterctl train CONFIG.yaml -- max_steps=10",
            )
        try:
            read_as = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"{word}: {value} is not a value in YAML") from error
        if "\n" in value or isinstance(read_as, dict) or (isinstance(read_as, str) and read_as != value.strip("\"'")):
            raise UsageError(f"{word}: this value stands in the config only", hint=f"write it into {document.path}")
        values[key] = value or '""'
    text = document.text
    end = "" if text.endswith("\n") else "\n"
    spans = []
    for key, value in values.items():
        if key not in document.places:
            spans.append((len(text), len(text), f"{end}{key}: {value}\n"))
            end = ""
            continue
        before, node = document.places[key]
        if node.start_mark.index < before.end_mark.index:  # an alias: the node stands where its anchor is
            raise UsageError(f"{document.where(key)} is an alias", hint=f"change {key} in {document.path}")
        newline = "\n" if text[: node.end_mark.index].endswith("\n") else ""  # a block ends with its line
        gap = "" if text[: node.start_mark.index].endswith((" ", "\n")) else " "  # "key:" alone
        spans.append((node.start_mark.index, node.end_mark.index, f"{gap}{value}{newline}"))
    spans.sort(key=lambda span: span[0])
    for start, stop, value in reversed(spans):
        text = text[:start] + value + text[stop:]
    return text
