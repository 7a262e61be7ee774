"""A training config's text: YAML whose values can be replaced without touching the rest.

The config travels as the user wrote it. Loading and dumping it would change what LLaMA-Factory reads: PyYAML and
OmegaConf disagree on numbers such as ``1e-4``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import yaml

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.masking import mask_words
from provision.run.yaml_text import load, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Document:
    """A YAML mapping that knows its text.

    Attributes:
        path: the user's file.
        text: what travels: the file's text, with the overrides written into it.
        data: what it says.
        places: by key its nodes in ``text``.
        lines: by key its line in the user's file.
        typed: the keys that were typed behind ``--``.
    """

    path: Path
    text: str
    data: dict[str, Any]
    places: dict[str, tuple[yaml.ScalarNode, yaml.Node]]
    lines: Mapping[str, int]
    typed: frozenset[str] = frozenset()

    def where(self, key: str) -> str:
        """``FILE:LINE: key`` for messages: the line in the user's file, whatever was written into what travels."""
        if key in self.typed:
            return f"{shown(key)}= (typed behind --)"
        if key not in self.lines:
            return f"{self.path}: {shown(key)}"
        return f"{self.path}:{self.lines[key]}: {shown(key)}"

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
    plain = re.fullmatch(r"[A-Za-z./][\w./-]*", value, re.ASCII) and yaml.safe_load(value) == value  # not `null`, `.5`
    return value if plain else json.dumps(value)


def read(config: Path, overrides: Sequence[str] = ()) -> Document:
    """Read a training config; ``overrides`` (``KEY=VALUE``, in YAML) take the place of what it says.

    Raises:
        UsageError: it cannot be read, or is no YAML mapping; an override that cannot be written into it.
    """
    document = _parsed(config, read_text(config, hint="clusterctl train CONFIG.yaml"))
    return _overridden(document, overrides) if overrides else document


def _parsed(config: Path, text: str) -> Document:
    root, data = load(config, text)
    if not isinstance(root, yaml.MappingNode) or not isinstance(data, dict):
        raise UsageError(f"{config} is not a LLaMA-Factory config: it holds no `key: value` lines")
    places = {key.value: (key, value) for key, value in root.value}
    lines = {key: node.start_mark.line + 1 for key, (node, _) in places.items()}
    return Document(config, text, data, places, lines)


def _overridden(document: Document, overrides: Sequence[str]) -> Document:
    """The overrides written into the text as they are, so that LLaMA-Factory reads their numbers itself."""
    values: dict[str, str] = {}
    wanted = dict(document.data)
    for word in overrides:
        key, has, value = word.partition("=")
        said = shown(mask_words([word])[0])
        if not has or not re.fullmatch(r"\w+", key, re.ASCII):
            raise UsageError(
                f"{said}: a config's arguments are KEY=VALUE",
                hint="as in: clusterctl train CONFIG.yaml -- max_steps=10",
            )
        try:
            read_as = load(key, value or '""')[1]
        except UsageError as error:
            raise UsageError(f"{said}: this is not a value in YAML", hint="put the value in quotes") from error
        if "\n" in value or isinstance(read_as, dict) or (isinstance(read_as, str) and read_as != value.strip("\"'")):
            raise _only_in_config(document, said)
        wanted[key] = read_as
        values[key] = value or '""'
    text = _written(document, values)
    said = " ".join(map(shown, mask_words(overrides)))
    try:
        written = _parsed(document.path, text)
    except UsageError as error:
        raise _only_in_config(document, said) from error
    if repr(written.data | wanted) != repr(written.data) or written.data.keys() != wanted.keys():
        raise _only_in_config(document, said)
    return replace(written, lines=document.lines, typed=frozenset(values))


def _written(document: Document, values: Mapping[str, str]) -> str:
    """The text with values in place of others, or at its end."""
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


def _only_in_config(document: Document, said: str) -> UsageError:
    return UsageError(f"{said}: this value stands in the config only", hint=f"write it into {document.path}")
