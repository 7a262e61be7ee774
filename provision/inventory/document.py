"""YAML text -> plain data that knows its lines, and the list of everything that is wrong with it.

Only what an inventory needs is built: mappings, lists, text, truth values and nothing (``null``). Tags run no code.
A plain number stays the text that was written, since YAML 1.1 would read ``022`` as 18, ``22:30`` as 1350 and ``1.10``
as 1.1; only below the sections in ``typed`` do decimal numbers become numbers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml
from yaml.constructor import SafeConstructor
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

if TYPE_CHECKING:
    from collections.abc import Callable

Place = tuple[str, ...]  # where in the document: ("nodes", "gpu03", "port")

MAX_BYTES = 1 << 20  # of a file: 4,096 nodes with every key of theirs take 0.6 MB
MAX_VALUES = 50_000  # aliases of aliases can make gigabytes out of ten lines; no cluster needs as many values
MAX_SHOWN = 100  # mistakes that are listed

_LONGEST_KEY = 1024  # characters; YAML's own limit
_CORE = "tag:yaml.org,2002:"
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_REAL = re.compile(r"[-+]?(0|[1-9][0-9]*)?\.[0-9]+([eE][-+]?[0-9]{1,3})?")
_ADVICE = {
    "mapping values are not allowed here": "text that holds `: ` needs quotes",
    "'\\t' that cannot start any token": "a tab; YAML indents with spaces",
    "'@' that cannot start any token": "text that begins with @ needs quotes",
    "'`' that cannot start any token": "text that begins with ` needs quotes",
    "'%' that cannot start any token": "text that begins with % needs quotes",
    "could not find expected ':'": "a key is followed by a colon and a space",
    "expected a single document": "an inventory is one document; take out the second `---`",
    "found undefined alias": "an alias *NAME needs an anchor &NAME before it; text that begins with * needs quotes",
    "expected <block end>": "is the indentation the same as in the lines above?",
}


class NotYamlError(ValueError):
    """The text is not YAML; the message says where and why."""


@dataclass
class Document:
    """What was read, the line of every key, and the mistakes found so far."""

    data: Any = None
    lines: dict[Place, int] = field(default_factory=dict)
    mistakes: list[tuple[int, str]] = field(default_factory=list)
    origin: Callable[[Place], str] | None = (
        None  # for generated text: who wrote the value at a place, in place of a line
    )
    _noted: set[tuple[int, str]] = field(default_factory=set)

    def mistake(self, place: Place, text: str, *, line: int | None = None) -> None:
        """Note what is wrong at ``place``. The line is that of the key, or of the nearest mapping around it."""
        known = place
        while known and known not in self.lines:
            known = known[:-1]
        number = line or self.lines.get(known)
        where = ".".join(shown(part) or "''" for part in place)
        if self.origin:
            where = printable(self.origin(place)) or where
        elif number:
            where = f"{where} (line {number})" if where else f"line {number}"
        text = printable(text)
        entry = (number or 0, f"{where}: {text}" if where else text)
        if entry not in self._noted:
            self._noted.add(entry)
            self.mistakes.append(entry)

    def problems(self) -> tuple[str, ...]:
        """The mistakes with their places, in the order of the file; of very many the first, and how many more."""
        ordered = [text for _, text in sorted(self.mistakes, key=lambda mistake: mistake[0])]
        more = len(ordered) - MAX_SHOWN
        return (*ordered[:MAX_SHOWN], f"and {more:,} more") if more > 0 else tuple(ordered)


def shown(text: str, *, limit: int = 60) -> str:
    """``text`` as it may stand in a message: short, and with nothing that a terminal would act upon."""
    if not text.isprintable():
        text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= limit else text[: limit - 1] + "…"


def printable(text: str) -> str:
    """``text`` with escapes in place of what a terminal would act upon."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def read(text: str, *, typed: frozenset[str]) -> Document:
    """Read one YAML document.

    Args:
        text: the file's content.
        typed: the top-level keys below which plain numbers become numbers.

    Raises:
        NotYamlError: the text is not YAML.
    """
    if len(text) > MAX_BYTES:
        raise NotYamlError(f"it is larger than {MAX_BYTES >> 20} MiB")
    builder = _Builder(typed)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            builder.document.data = builder.build(root, ())
    except yaml.YAMLError as error:
        raise NotYamlError(_explain(error, text)) from error
    except RecursionError as error:
        raise NotYamlError("the lists or mappings are nested too deeply") from error
    except (ValueError, OverflowError) as error:  # an escape such as "\UFFFFFFFF"
        raise NotYamlError(f"an escape in a quoted text is not a character: {error}") from error
    return builder.document


def _explain(error: yaml.YAMLError, text: str) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        problem, context = error.problem or "not YAML", error.context or ""
        mark = error.problem_mark or error.context_mark
        if error.context_mark is not None and "could not find expected ':'" in problem:
            mark = error.context_mark  # the line that lacks the colon, not the one after it
        advice = next((advice for part, advice in _ADVICE.items() if part in f"{context} {problem}"), "")
        if mark and mark.column > _LONGEST_KEY and "mapping values" in problem:
            advice = f"a key has at most {_LONGEST_KEY:,} characters: write several entries"
        if "flow" in context and error.context_mark is not None:
            advice = f"the bracket opened in line {error.context_mark.line + 1} is not closed"
            if problem.endswith("got '['"):
                advice = 'inside { } or [ ] a range needs quotes: "10.0.0.[1-4]"'
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        return where + shown(problem, limit=200) + (f" ({advice})" if advice else "")
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        column = error.position - (before.rfind("\n") + 1) + 1
        return f"line {before.count(chr(10)) + 1}, column {column}: a control character ({shown(text[error.position])})"
    return shown(str(error), limit=200)


class _Builder:
    """Walks the node graph once, with a bound on its size and an eye on graphs that hold themselves."""

    def __init__(self, typed: frozenset[str]) -> None:
        self.document = Document()
        self._typed = typed
        self._count = 0
        self._open: list[Node] = []

    def build(self, node: Node, place: Place) -> Any:
        self._count += 1
        line = node.start_mark.line + 1
        if self._count > MAX_VALUES:
            if self._count == MAX_VALUES + 1:
                self.document.mistake(place, f"more than {MAX_VALUES:,} values: aliases of aliases?", line=line)
            return None
        if any(node is outer for outer in self._open):
            self.document.mistake(place, "an alias that contains itself", line=line)
            return None
        if isinstance(node, ScalarNode):
            return self._scalar(node, place)
        wanted = "map" if isinstance(node, MappingNode) else "seq"
        if node.tag != _CORE + wanted:
            self._refuse_tag(node, place)
            return None
        self._open.append(node)
        try:
            if isinstance(node, MappingNode):
                return self._mapping(node, place)
            assert isinstance(node, SequenceNode)
            return [self.build(item, (*place, str(index))) for index, item in enumerate(node.value)]
        finally:
            self._open.pop()

    def _mapping(self, node: MappingNode, place: Place) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: list[Node] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, ScalarNode):
                self.document.mistake(place, "a key must be text, not a list or a mapping", line=line)
                continue
            if key_node.tag == _CORE + "merge":
                merged += value_node.value if isinstance(value_node, SequenceNode) else [value_node]
                continue
            key = self._text(key_node, place)
            inner = (*place, key)
            if key in own:
                first = self.document.lines[inner]
                self.document.mistake(inner, f"is there twice, first on line {first}", line=line)
                continue
            self.document.lines[inner] = line
            own[key] = self.build(value_node, inner)
        for source in merged:
            values = self.build(source, place)
            if isinstance(values, dict):
                own = {**values, **own}
            else:
                line = source.start_mark.line + 1
                self.document.mistake(place, "`<<` takes the alias of a mapping", line=line)
        return own

    def _scalar(self, node: ScalarNode, place: Place) -> Any:
        kind = node.tag.removeprefix(_CORE)
        if kind == "null":
            return None
        if kind == "bool" and node.value.lower() in SafeConstructor.bool_values:
            return SafeConstructor.bool_values[node.value.lower()]
        if kind not in {"str", "int", "float", "timestamp", "value", "merge"}:
            return self._refuse_tag(node, place)
        if kind in {"int", "float"} and place and place[0] in self._typed:
            if _DECIMAL.fullmatch(node.value):
                return int(node.value)
            if _REAL.fullmatch(node.value):
                number = float(node.value)
                return number if math.isfinite(number) else self._text(node, place)
        return self._text(node, place)

    def _text(self, node: ScalarNode, place: Place) -> str:
        text = str(node.value)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.document.mistake(place, "half of a surrogate pair is not a character", line=node.start_mark.line + 1)
            return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)
        return text

    def _refuse_tag(self, node: Node, place: Place) -> None:
        tag = "!!" + node.tag.removeprefix(_CORE) if node.tag.startswith(_CORE) else node.tag
        self.document.mistake(
            place, f"the tag {shown(tag)} is not allowed in an inventory", line=node.start_mark.line + 1
        )
