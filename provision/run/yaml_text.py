"""YAML that a user gives for a run, as plain data: whatever the file holds, the answer is data or a ``UsageError``.

A run's configurations are written by other people as well, so nothing here trusts them: aliases cannot multiply, tags
run no code, and a mistake is named with its file, line and key.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from provision.errors import UsageError
from provision.inventory.document import shown
from trainer.untrusted import UntrustedError, parse_json

LIMIT = 256 << 10  # bytes; the largest of LLaMA-Factory's examples has 2 KiB
VALUES = 20_000  # of one file, those behind aliases counted each time
DEPTH = 32
_CORE = "tag:yaml.org,2002:"
_SCALARS = frozenset(f"{_CORE}{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp"))
_WRONG = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, yaml.YAMLError)  # of PyYAML's own


def read_text(path: Path, *, limit: int = LIMIT, hint: str = "") -> str:
    """A file's text, without a byte order mark, its lines ended by newlines alone.

    Raises:
        UsageError: it cannot be read, is no regular file, is larger than ``limit`` or is not UTF-8.
    """
    where = shown(str(path), limit=200)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{where} is not a file", hint=hint)
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise UsageError(f"there is no {where}", hint=hint) from None
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
        UsageError: it is not YAML, or holds what no configuration needs.
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
    """The data of a file that is YAML, or JSON where its name ends so.

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
    """What is wrong with a file of JSON, with its line where there is one."""
    cause = error.__context__
    if isinstance(cause, json.JSONDecodeError):
        return f"{shown(str(path), limit=200)}:{cause.lineno}: not JSON: {cause.msg}"
    return f"{shown(str(path), limit=200)} {error}"


def _code(error: yaml.reader.ReaderError) -> int:
    return error.character if isinstance(error.character, int) else ord(error.character)


def _check(where: str, root: yaml.Node) -> None:
    """Refuse what would not become plain data of bounded size."""
    counts: dict[int, int] = {}
    above: set[int] = set()

    def count(node: yaml.Node, key: str, depth: int) -> int:
        line = node.start_mark.line + 1
        at = f"{where}:{line}: {key}: " if key else f"{where}:{line}: "
        if id(node) in above:
            raise UsageError(f"{at}an alias refers to what it is in")
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
            raise UsageError(f"{at}more than {VALUES:,} values, counting those behind aliases each time")
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(node, at)
        counts[id(node)] = total
        return total

    count(root, "", 0)


def _children(node: yaml.Node, where: str, at: str, *, top: bool) -> Iterator[tuple[str, yaml.Node]]:
    """What a list or a mapping holds, each with the key it has there."""
    if isinstance(node, yaml.SequenceNode):
        if node.tag != f"{_CORE}seq":
            raise UsageError(f"{at}the tag {_tag(node)} is not for a configuration")
        yield from (("", child) for child in node.value)
    elif isinstance(node, yaml.MappingNode):
        if node.tag != f"{_CORE}map":
            raise UsageError(f"{at}the tag {_tag(node)} is not for a configuration")
        lines: dict[str, int] = {}
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode):
                line = name.start_mark.line + 1
                raise UsageError(f"{where}:{line}: a key must be text, not a list or a mapping")
            line = name.start_mark.line + 1
            key = f"{where}:{line}: {shown(name.value)}"
            if name.value in lines and name.tag != f"{_CORE}merge":
                raise UsageError(f"{key}: given before, in line {lines[name.value]}", hint="keep one of them")
            lines[name.value] = line
            if top and name.tag not in (f"{_CORE}str", f"{_CORE}merge"):
                raise UsageError(f"{key}: a key must be text", hint="put it in quotes")
            yield shown(name.value), value


def _check_scalar(node: yaml.ScalarNode, at: str) -> None:
    if node.tag not in _SCALARS:
        raise UsageError(f"{at}the tag {_tag(node)} is not for a configuration")
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
