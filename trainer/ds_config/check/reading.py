"""Reads a JSON file with the mistakes that people make, and names each of them with its line and column.

transformers and accelerate read the file with ``json.load``. DeepSpeed itself reads it with hjson (0.19,
``runtime/config.py``), which accepts comments, missing quotes and commas that are too many. So each mistake has a mark
whether hjson accepts it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Dict, List, Tuple

from trainer.ds_config.check.finding import ERROR, WARNING, Finding

LIMIT = 256 << 10  # characters
DEPTH = 32
MOST = 100  # findings of one file

Path = Tuple[str, ...]
Place = Tuple[int, int]

_SPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORD = re.compile(r"""[^\s,:{}\[\]"'，：]+""")  # noqa: RUF001 - what people paste
_LITERALS = {"true": True, "false": False, "null": None}
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_QUOTES = {'"': '"', "'": "'", "“": "”", "”": "”", "‘": "’", "’": "’"}  # noqa: RUF001 - what people paste
_COMMAS, _COLONS = ",，", ":："  # noqa: RUF001 - what people paste
_HEX = re.compile(r"[0-9a-fA-F]{4}")


class _StopError(Exception):
    """The rest of the text cannot be read."""


@dataclass
class Document:
    """A file that was read.

    Attributes:
        data: its content; None if it could not be read to its end.
        places: by path, line and column of a key.
        findings: its mistakes.
    """

    data: Any = None
    places: Dict[Path, Place] = field(default_factory=dict)
    findings: List[Finding] = field(default_factory=list)

    def place(self, path: Path) -> Place:
        """The place of a key, or of the section that lacks it; (0, 0) for the whole file."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, (0, 0))


def read(text: str, *, hjson: bool = False) -> Document:
    """Read a file.

    Args:
        text: its content.
        hjson: it is read by DeepSpeed itself, so that mistakes which hjson accepts are warnings.
    """
    reader = _Reader(text, hjson=hjson)
    document = reader.document
    try:
        document.data = reader.read()
    except _StopError:
        document.data = None
    return document


class _Reader:
    def __init__(self, text: str, *, hjson: bool) -> None:
        self.text = text
        self.hjson = hjson
        self.at = 0
        self.depth = 0
        self.document = Document()
        self._line, self._start, self._seen = 1, 0, 0  # of the last place that was asked for

    def read(self) -> Any:
        if len(self.text) > LIMIT:
            self.stop("the file is larger than %d KiB" % (LIMIT >> 10), "name a DeepSpeed configuration")
        if self.text.startswith("\ufeff"):
            self.note(
                "the file starts with a byte order mark",
                "save it as UTF-8 without BOM: sed -i '1s/^\\xEF\\xBB\\xBF//' FILE",
            )
            self.at = self._start = 1
        self.space()
        if self.at == len(self.text):
            self.stop("the file is empty", "write one: clusterctl ds-config -o FILE")
        value = self.value(())
        self.space()
        if self.at < len(self.text):
            self.stop("text after the end of the JSON value: %s" % self.shown(), "remove it, or the bracket before it")
        if not isinstance(value, dict):
            self.at = 0
            self.stop("the file is not a JSON object", "put the keys into { }")
        return value

    # --- positions and findings

    def place(self, at: int) -> Place:
        """Line and column, from 1. Places are asked for in about the order of the text."""
        if at < self._seen:
            self._line, self._start, self._seen = 1, 0, 0
        start = self.text.rfind("\n", self._seen, at)
        self._line += self.text.count("\n", self._seen, at)
        self._start = start + 1 if start >= 0 else self._start
        self._seen = at
        return self._line, at - self._start + 1

    def note(self, what: str, fix: str, *, at: int = -1, accepted: bool = True, key: str = "") -> None:
        """Add a finding; ``accepted``: hjson reads it as it is meant."""
        line, column = self.place(self.at if at < 0 else at)
        lenient = accepted and self.hjson
        why = "DeepSpeed itself accepts it, but json.load and transformers do not" if lenient else "it is not JSON"
        if len(self.document.findings) < MOST:
            level = WARNING if lenient else ERROR
            self.document.findings.append(Finding(level, what, why, fix, line, column, key))

    def stop(self, what: str, fix: str, *, at: int = -1) -> None:
        self.note(what, fix, at=at, accepted=False)
        raise _StopError

    def shown(self) -> str:
        rest = self.text[self.at : self.at + 40].split("\n")[0].strip()
        return repr(rest) if rest else "the end of the line"

    def ahead(self) -> str:
        return self.text[self.at : self.at + 1]

    # --- the grammar

    def space(self) -> None:
        """Skip white space and comments."""
        text = self.text
        while self.at < len(text):
            if text[self.at] in _SPACE or text[self.at] in "\u00a0\u3000":
                if text[self.at] not in _SPACE:
                    self.note(
                        "a space that is no space of JSON (U+%04X)" % ord(text[self.at]),
                        "type it again",
                        accepted=False,
                    )
                self.at += 1
            elif text.startswith("/*", self.at):
                end = text.find("*/", self.at + 2)
                if end < 0:
                    self.stop("a comment /* without its end */", "remove it")
                self.note("a comment (/* */)", "remove it")
                self.at = end + 2
            elif text[self.at] == "#" or text.startswith("//", self.at):
                self.note("a comment (%s)" % ("#" if text[self.at] == "#" else "//"), "remove it")
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            else:
                return

    def value(self, path: Path) -> Any:
        found = self.ahead()
        if found == "{":
            return self.nested(self.object, path)
        if found == "[":
            return self.nested(self.array, path)
        if found in _QUOTES and found:
            return self.string()
        match = _WORD.match(self.text, self.at)
        if match is None:
            what = (
                "a value is missing"
                if not found or found in "}]" + _COMMAS
                else "no value can start here: " + self.shown()
            )
            self.stop(what, "write the value%s" % (" of %s" % path[-1] if path else ""))
            raise _StopError
        return self.word(match.group(), path)

    def nested(self, read: Any, path: Path) -> Any:
        self.depth += 1
        if self.depth > DEPTH:
            self.stop("objects and lists are nested more than %d deep" % DEPTH, "a DeepSpeed configuration needs 5")
        value = read(path)
        self.depth -= 1
        return value

    def word(self, word: str, path: Path) -> Any:
        """A literal or a number, or a word that is neither."""
        at, self.at = self.at, self.at + len(word)
        if word in _LITERALS:
            return _LITERALS[word]
        if _NUMBER.fullmatch(word) and len(word) < 200:
            number = float(word) if set(word) & set(".eE") else int(word)
            if isinstance(number, float) and not math.isfinite(number):
                self.note("%s is too large for a number" % word, "write a smaller one", at=at, accepted=False)
                return None
            return number
        key = ".".join(path)
        if word in _PYTHON:
            self.note("%s is Python" % word, "write %s" % _PYTHON[word], at=at, accepted=False, key=key)
            return _LITERALS[_PYTHON[word]]
        if word.lstrip("+-").lower() in {"nan", "inf", "infinity"}:
            self.note("%s is no number of JSON" % word, "write a number", at=at, accepted=False, key=key)
            return None
        number = _loose(word)
        if number is not None:
            self.note(
                "%s is not written as a number of JSON" % _cut(word),
                "write %s" % plain(number),
                at=at,
                accepted=False,
                key=key,
            )
            return number
        self.note(
            "%s is neither a string in quotes nor a number" % _cut(word),
            'write "%s"' % _cut(word),
            at=at,
            accepted=False,
            key=key,
        )
        return word

    def object(self, path: Path) -> Dict[str, Any]:
        found: Dict[str, Any] = {}
        self.at += 1
        comma = -1
        while True:
            self.space()
            if self.at == len(self.text):
                self.stop("a { has no }", "add the }")
            if self.ahead() == "}":
                self.at += 1
                if comma >= 0:
                    self.trailing(comma, "}")
                return found
            if found and comma < 0:
                self.missing_comma()
            at = self.at
            name = self.key()
            here = (*path, name)
            if name in found:
                line = self.document.places[here][0]
                self.duplicate(name, line, at, ".".join(here))
            self.document.places[here] = self.place(at)
            self.space()
            if not self.ahead() or self.ahead() not in _COLONS:
                self.stop("a colon is missing after %s" % _cut(name), 'write "%s": VALUE' % _cut(name))
            self.punctuation(_COLONS)
            self.space()
            found[name] = self.value(here)
            comma = self.comma()

    def array(self, path: Path) -> List[Any]:
        found: List[Any] = []
        self.at += 1
        comma = -1
        while True:
            self.space()
            if self.at == len(self.text):
                self.stop("a [ has no ]", "add the ]")
            if self.ahead() == "]":
                self.at += 1
                if comma >= 0:
                    self.trailing(comma, "]")
                return found
            if found and comma < 0:
                self.missing_comma()
            found.append(self.value(path))
            comma = self.comma()

    def comma(self) -> int:
        """The place of the comma here, which is skipped; -1 if there is none."""
        self.space()
        if not self.ahead() or self.ahead() not in _COMMAS:
            return -1
        at = self.at
        self.punctuation(_COMMAS)
        self.space()
        while self.ahead() and self.ahead() in _COMMAS:
            self.note("two commas", "remove one", accepted=False)
            self.at += 1
            self.space()
        return at

    def punctuation(self, either: str) -> None:
        if self.ahead() != either[0]:
            self.note("a full-width %s" % self.ahead(), "write %s" % either[0], accepted=False)
        self.at += 1

    def trailing(self, comma: int, bracket: str) -> None:
        line = self.place(comma)[0]
        self.note("a comma before %s" % bracket, "remove the comma in line %d" % line, at=comma)

    def missing_comma(self) -> None:
        line, column = self.place(self.at)
        own = line > 1 and not self.text[self.at - column + 1 : self.at].strip()  # the first thing in its line
        what = "a comma is missing before %s" % self.shown()
        self.note(
            what, "add a comma at the end of the line before" if own else "add a comma in line %d" % line, accepted=own
        )

    def duplicate(self, name: str, line: int, at: int, key: str) -> None:
        new, column = self.place(at)
        why = "DeepSpeed refuses the file" if self.hjson else "the value in line %d is lost" % line
        if len(self.document.findings) < MOST:
            level = ERROR if self.hjson else WARNING
            what = "%s is there twice, first in line %d" % (_cut(name), line)
            self.document.findings.append(
                Finding(level, what, why, "remove one of lines %d and %d" % (line, new), new, column, key)
            )

    def key(self) -> str:
        if self.ahead() in _QUOTES:
            return str(self.string())
        match = _WORD.match(self.text, self.at)
        if match is None:
            self.stop("a key is expected here, not %s" % self.shown(), "remove it, or write a key in quotes")
            raise _StopError
        word = match.group()
        self.note("the key %s has no quotes" % _cut(word), 'write "%s"' % _cut(word))
        self.at = match.end()
        return word

    def string(self) -> str:
        at, opening = self.at, self.ahead()
        closing = _QUOTES[opening]
        found: List[str] = []
        self.at += 1
        while True:
            letter = self.ahead()
            if not letter or letter == "\n":
                self.stop("a string has no closing quote", "add the quote", at=at)
            self.at += 1
            if letter == closing:
                break
            if letter == "\\":
                found.append(self.escape())
            elif letter < " ":
                self.note(
                    "a string contains a control character (U+%04X)" % ord(letter),
                    "remove it",
                    at=self.at - 1,
                    accepted=False,
                )
            else:
                found.append(letter)
        if opening != '"':
            kind = "single quotes" if opening == "'" else "typographic quotes"
            text = "".join(found)
            self.note(kind, 'write "%s"' % _cut(text), at=at, accepted=opening == "'")
        return "".join(found)

    def escape(self) -> str:
        letter = self.ahead()
        self.at += 1
        if letter == "u" and (match := _HEX.match(self.text, self.at)):
            self.at = match.end()
            return chr(int(match.group(), 16))
        if letter not in _ESCAPES or not letter:
            self.note(
                "\\%s is no escape of JSON" % letter, "write / instead of \\ in paths", at=self.at - 2, accepted=False
            )
        return _ESCAPES.get(letter, letter)


def _loose(word: str) -> Any:
    """The number that a word means in Python or JavaScript: ``.5``, ``1_000``, ``+1``, ``0x10``, ``1.``; else None."""
    if len(word) > 50:
        return None
    for kind in (lambda text: int(text, 0), int, float):
        try:
            number = kind(word)
        except ValueError:
            continue
        return number if math.isfinite(number) else None
    return None


def _cut(text: str) -> str:
    """The start of a text from the file, printable."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[:40])
    return shown + ("…" if len(text) > 40 else "")


def plain(number: Any) -> str:
    """A number as JSON and command lines have it."""
    if isinstance(number, float):
        text = "%g" % number if float("%g" % number) == number else repr(number)
        return re.sub(r"e([-+])0(?=\d)", r"e\1", text).replace("e+", "e")
    return str(number)
