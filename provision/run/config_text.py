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


def read(config: Path) -> Document:
    """Read a training config.

    Raises:
        UsageError: it cannot be read, or is no YAML mapping.
    """
    try:
        text = config.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"there is no {config}", hint="name a LLaMA-Factory YAML with --config FILE") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{config} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}") from error
    except OSError as error:
        raise UsageError(f"{config} cannot be read: {error.strerror}") from error
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
