"""Reads a run's YAML files as plain data, and changes values without touching the rest of the text.

A config is sent as the user wrote it. Loading and dumping it would change what LLaMA-Factory reads: PyYAML and
OmegaConf disagree on numbers such as ``1e-4``. The files may come from other people, so they are not trusted: aliases
cannot multiply, tags run no code, and an error names the file, the line and the key.
"""

from __future__ import annotations

import json
import re
import stat
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.masking import mask_words
from trainer.agent.contract.untrusted import UntrustedError, parse_json

LIMIT = 256 << 10  # bytes; the largest of LLaMA-Factory's examples has 2 KiB
VALUES = 20_000  # values of one file; an alias's values count each time
DEPTH = 32
_CORE = "tag:yaml.org,2002:"
_SCALARS = frozenset(f"{_CORE}{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp"))
_WRONG = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, yaml.YAMLError)  # of PyYAML's own


def read_text(path: Path, *, limit: int = LIMIT, hint: str = "") -> str:
    """A file's text without a byte order mark, with newlines as the only line ends.

    Raises:
        UsageError: it cannot be read, is not a regular file, is larger than ``limit`` or is not UTF-8.
    """
    where = shown(str(path), limit=200)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{where} is not a file", hint=hint)
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise UsageError(f"{where} does not exist", hint=hint) from None
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror}", hint=hint) from error
    except ValueError as error:  # a NUL in its name
        raise UsageError(f"{where} cannot be read: {error}", hint=hint) from error
    if len(data) > limit:
        raise UsageError(f"{where} is larger than {limit >> 10} KiB: it is not a configuration", hint=hint)
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UsageError(f"{where} is UTF-16, not UTF-8", hint=f"iconv -f UTF-16 -t UTF-8 {where} >NEW")
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        byte = f"byte {error.start} is {data[error.start]:#04x}"
        raise UsageError(f"{where}:{line} is not UTF-8: {byte}", hint=hint) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def load(name: Path | str, text: str) -> tuple[yaml.Node | None, Any]:
    """The node graph of one YAML document, and its data.

    Raises:
        UsageError: it is not YAML, or has content that no configuration needs.
    """
    where = shown(str(name), limit=200)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            return None, None
        _check(where, root)
        return root, yaml.SafeLoader("").construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UsageError(f"{where}{line}: not YAML: {shown(str(error.problem or error.context), limit=200)}") from error
    except yaml.reader.ReaderError as error:
        number = text[: error.position].count("\n") + 1
        raise UsageError(f"{where}:{number}: not YAML: {shown(chr(_code(error)))} is a control character") from error
    except RecursionError:
        raise UsageError(f"{where}: lists or mappings are nested too deeply") from None
    except _WRONG as error:
        raise UsageError(f"{where}: not YAML: {shown(str(error), limit=200)}") from error


def load_either(path: Path, *, hint: str) -> Any:
    """The data of a YAML file, or of a JSON file if its name ends in ``.json``.

    Raises:
        UsageError: as ``read_text`` and ``load``.
    """
    text = read_text(path, hint=hint)
    if path.suffix.lower() != ".json":
        return load(path, text)[1]
    try:
        return parse_json(text, limit=LIMIT)
    except UntrustedError as error:
        raise UsageError(json_problem(path, error), hint=hint) from error


def json_problem(path: Path, error: UntrustedError) -> str:
    """The error of a JSON file, with its line if known."""
    cause = error.__context__
    if isinstance(cause, json.JSONDecodeError):
        return f"{shown(str(path), limit=200)}:{cause.lineno}: not JSON: {cause.msg}"
    return f"{shown(str(path), limit=200)} {error}"


def _code(error: yaml.reader.ReaderError) -> int:
    return error.character if isinstance(error.character, int) else ord(error.character)


def _check(where: str, root: yaml.Node) -> None:
    """Refuse a document that is not plain data of bounded size."""
    counts: dict[int, int] = {}
    above: set[int] = set()

    def count(node: yaml.Node, key: str, depth: int) -> int:
        line = node.start_mark.line + 1
        at = f"{where}:{line}: {key}: " if key else f"{where}:{line}: "
        if id(node) in above:
            raise UsageError(f"{at}an alias refers to the value that contains it")
        if id(node) in counts:
            return counts[id(node)]
        if depth > DEPTH:
            raise UsageError(f"{at}nested more than {DEPTH} levels deep")
        above.add(id(node))
        total = 1 + sum(
            count(child, key or inner, depth + 1) for inner, child in _children(node, where, at, top=depth == 0)
        )
        above.discard(id(node))
        if total > VALUES:
            raise UsageError(f"{at}more than {VALUES:,} values, with aliases expanded")
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(node, at)
        counts[id(node)] = total
        return total

    count(root, "", 0)


def _children(node: yaml.Node, where: str, at: str, *, top: bool) -> Iterator[tuple[str, yaml.Node]]:
    """The values of a list or a mapping, each with its key."""
    if isinstance(node, yaml.SequenceNode):
        if node.tag != f"{_CORE}seq":
            raise UsageError(f"{at}the tag {_tag(node)} is not allowed in a configuration")
        yield from (("", child) for child in node.value)
    elif isinstance(node, yaml.MappingNode):
        if node.tag != f"{_CORE}map":
            raise UsageError(f"{at}the tag {_tag(node)} is not allowed in a configuration")
        lines: dict[str, int] = {}
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode):
                line = name.start_mark.line + 1
                raise UsageError(f"{where}:{line}: a key must be text, not a list or a mapping")
            line = name.start_mark.line + 1
            key = f"{where}:{line}: {shown(name.value)}"
            if name.value in lines and name.tag != f"{_CORE}merge":
                raise UsageError(f"{key}: duplicate key, first given in line {lines[name.value]}", hint="keep one")
            lines[name.value] = line
            if top and name.tag not in (f"{_CORE}str", f"{_CORE}merge"):
                raise UsageError(f"{key}: a key must be text", hint="put it in quotes")
            yield shown(name.value), value


def _check_scalar(node: yaml.ScalarNode, at: str) -> None:
    if node.tag not in _SCALARS:
        raise UsageError(f"{at}the tag {_tag(node)} is not allowed in a configuration")
    try:
        node.value.encode()
        yaml.SafeLoader("").construct_object(node)
    except UnicodeEncodeError:
        raise UsageError(f"{at}half of a surrogate pair is not a character") from None
    except _WRONG as error:
        kind = node.tag.removeprefix(_CORE)
        raise UsageError(f"{at}{shown(node.value)} cannot be read as {kind}", hint="put it in quotes") from error


def _tag(node: yaml.Node) -> str:
    tag = str(node.tag)
    return shown("!!" + tag.removeprefix(_CORE) if tag.startswith(_CORE) else tag)


# --- a training config -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Document:
    """A YAML mapping with its text.

    Attributes:
        path: the user's file.
        text: the file's text with the overrides written into it; this is sent.
        data: the values.
        places: by key, its nodes in ``text``.
        lines: by key, its line in the user's file.
        typed: the keys that the user typed after ``--``.
    """

    path: Path
    text: str
    data: dict[str, Any]
    places: dict[str, tuple[yaml.ScalarNode, yaml.Node]]
    lines: Mapping[str, int]
    typed: frozenset[str] = frozenset()

    def where(self, key: str) -> str:
        """``FILE:LINE: key`` for messages, with the line in the user's file."""
        if key in self.typed:
            return f"{shown(key)}= (typed after --)"
        if key not in self.lines:
            return f"{self.path}: {shown(key)}"
        return f"{self.path}:{self.lines[key]}: {shown(key)}"

    def rewritten(self, changes: dict[str, str]) -> str:
        """The text with some values replaced. Missing keys are added at the end."""
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
    """Read a training config; ``overrides`` (``KEY=VALUE``, in YAML) replace its values.

    Raises:
        UsageError: it cannot be read, or is not a YAML mapping; an override cannot be written into it.
    """
    document = _parsed(config, read_text(config, hint="clusterctl train CONFIG.yaml"))
    return _overridden(document, overrides) if overrides else document


def _parsed(config: Path, text: str) -> Document:
    root, data = load(config, text)
    if not isinstance(root, yaml.MappingNode) or not isinstance(data, dict):
        raise UsageError(f"{config} is not a LLaMA-Factory config: it has no `key: value` lines")
    places = {key.value: (key, value) for key, value in root.value}
    lines = {key: node.start_mark.line + 1 for key, (node, _) in places.items()}
    return Document(config, text, data, places, lines)


def _overridden(document: Document, overrides: Sequence[str]) -> Document:
    """The document with the overrides written into its text unchanged, so that LLaMA-Factory parses their numbers."""
    values: dict[str, str] = {}
    wanted = dict(document.data)
    for word in overrides:
        key, has, value = word.partition("=")
        typed = shown(mask_words([word])[0])
        if not has or not re.fullmatch(r"\w+", key, re.ASCII):
            raise UsageError(
                f"{typed}: the arguments of a config are KEY=VALUE",
                hint="for example: clusterctl train CONFIG.yaml -- max_steps=10",
            )
        try:
            read_as = load(key, value or '""')[1]
        except UsageError as error:
            raise UsageError(f"{typed}: the value is not valid YAML", hint="put the value in quotes") from error
        if "\n" in value or isinstance(read_as, dict) or (isinstance(read_as, str) and read_as != value.strip("\"'")):
            raise _only_in_config(document, typed)
        wanted[key] = read_as
        values[key] = value or '""'
    text = _written(document, values)
    typed = " ".join(map(shown, mask_words(overrides)))
    try:
        written = _parsed(document.path, text)
    except UsageError as error:
        raise _only_in_config(document, typed) from error
    if repr(written.data | wanted) != repr(written.data) or written.data.keys() != wanted.keys():
        raise _only_in_config(document, typed)
    return replace(written, lines=document.lines, typed=frozenset(values))


def _written(document: Document, values: Mapping[str, str]) -> str:
    """The text with values replaced, or added at its end."""
    text = document.text
    end = "" if text.endswith("\n") else "\n"
    spans = []
    for key, value in values.items():
        if key not in document.places:
            spans.append((len(text), len(text), f"{end}{key}: {value}\n"))
            end = ""
            continue
        before, node = document.places[key]
        if node.start_mark.index < before.end_mark.index:  # an alias: the node's marks are those of its anchor
            raise UsageError(f"{document.where(key)} is an alias", hint=f"change {key} in {document.path}")
        newline = "\n" if text[: node.end_mark.index].endswith("\n") else ""  # a block ends with its line
        gap = "" if text[: node.start_mark.index].endswith((" ", "\n")) else " "  # "key:" alone
        spans.append((node.start_mark.index, node.end_mark.index, f"{gap}{value}{newline}"))
    spans.sort(key=lambda span: span[0])
    for start, stop, value in reversed(spans):
        text = text[:start] + value + text[stop:]
    return text


def commented(document: Document, changes: Mapping[str, tuple[Any, str]], by: str) -> str:
    """The text with values replaced, each below a comment that explains it. New keys follow at the end.

    Args:
        document: a configuration.
        changes: by key, its new value and the reason.
        by: who writes, for the comments.

    Raises:
        UsageError: the configuration's form does not allow a change, such as a mapping in braces.
    """
    text, end = document.text, []
    spans: list[tuple[int, int, str]] = []
    for key, (value, reason) in changes.items():
        written = json.dumps(value) if not isinstance(value, str) else _quoted(value)
        comment = _comment(f"{by}: {reason}")
        if key not in document.places:
            end.append(f"{comment}{key}: {written}\n")
            continue
        before, node = document.places[key]
        old = text[node.start_mark.index : node.end_mark.index].strip()
        was = f"; was {old}" if old and "\n" not in old else ""
        start = before.start_mark.index
        spans.append((start, start, _comment(f"{by}: {reason}{was}")))
        newline = "\n" if text[: node.end_mark.index].endswith("\n") else ""
        gap = "" if text[: node.start_mark.index].endswith((" ", "\n")) else " "
        spans.append((node.start_mark.index, node.end_mark.index, f"{gap}{written}{newline}"))
    for start, stop, value in sorted(spans, reverse=True):
        text = text[:start] + value + text[stop:]
    if end:
        text += ("" if text.endswith("\n") else "\n") + "\n" + "".join(end)
    wanted = document.data | {key: value for key, (value, _) in changes.items()}
    try:
        found = load(document.path, text)[1]
    except UsageError:
        found = None
    if found != wanted:
        hint = "write one key: value per line, without braces and aliases"
        raise UsageError(f"{document.path}: {', '.join(changes)} cannot be changed in this form", hint=hint)
    return text


def _comment(text: str) -> str:
    rows = textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False)
    return "".join(f"# {row}\n" for row in rows)


def _only_in_config(document: Document, typed: str) -> UsageError:
    return UsageError(f"{typed}: this value can only be set in the config", hint=f"write it into {document.path}")
