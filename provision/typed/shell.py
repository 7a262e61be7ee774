"""Splits a shell's command line into simple commands, and expands the variables of a launch script.

Follows the POSIX shell's quoting (2.2 "Quoting", 2.6.2 "Parameter Expansion"). Nothing is run: a value that only a
running shell knows, such as ``$(hostname)``, is marked with ``UNKNOWN``, and a command that contains it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

UNKNOWN = "\U0010fffd"  # in a word: its value is not known here. A character for private use
_OPERATORS = ("&&", "||", ";;", ";", "|&", "|", "&")
_PREPARE = ("export", "set", "setenv", "source", ".", "conda", "module", "cd")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_REDIRECT = re.compile(r"(\d*)(>>|>&|>\||<<<|<<|<&|<>|>|<|&>>|&>)")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*#?$!])(?:(:?[-=+?])(.*))?", re.ASCII | re.DOTALL)
# Variables that are set when a job runs, not where it is typed.
_LATER = re.compile(
    r"(SLURM|OMPI|PMI|PMIX|PBS|LSB|SGE|TORCHELASTIC)_|"
    r"(HOSTNAME|RANDOM|SECONDS|EPOCHSECONDS|LINENO|RANK|LOCAL_RANK|NODE_RANK|WORLD_SIZE|NNODES|MASTER_ADDR|MASTER_PORT)$"
)
# What a script finds its own folder with.
_HERE = re.compile(r"""dirname\s+(?:--\s+)?["']?(?:\$0|\$\{?BASH_SOURCE(?:\[0\])?\}?)["']?""")
_CHANGED = re.compile(r"cd\s+(?P<where>.*?)\s*(?:&&|;)\s*pwd", re.DOTALL)


class NotUnderstoodError(Exception):
    """A construct that a command line may have, but that is not followed here. The text names it."""


@dataclass(frozen=True)
class Simple:
    """A simple command.

    Attributes:
        words: the expanded words.
        line: the line where it starts, from 1.
        after: the operator that follows it: ``;`` for the end of a line, ``&&``, ``|`` and so on; "" at the end.
        redirects: the redirections, as typed.
    """

    words: tuple[str, ...]
    line: int = 1
    after: str = ""
    redirects: tuple[str, ...] = ()


@dataclass
class Values:
    """Variables and positional parameters, as far as they are known.

    Attributes:
        variables: those that the text itself sets.
        arguments: ``$1`` and the following.
        zero: the script's path as typed; "" if there is no script.
        environ: variables of the user's shell.
    """

    variables: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    zero: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str) -> str | None:
        """The value of a parameter; None if it is not set."""
        if name.isdigit():
            number = int(name)
            if number == 0:
                return self.zero or UNKNOWN
            return self.arguments[number - 1] if number <= len(self.arguments) else None
        if name in ("@", "*"):
            return " ".join(self.arguments)
        if name == "#":
            return str(len(self.arguments))
        if name in "?$!" or (_LATER.match(name) and name not in self.variables):
            return UNKNOWN
        return self.variables.get(name, self.environ.get(name))


class Scanner:
    """Reads simple commands from a text one by one, because an assignment changes how the next ones expand."""

    def __init__(self, text: str, values: Values) -> None:
        self._text = text.replace("\r\n", "\n")
        self._values = values
        self._at = 0
        self._assigns = False  # NAME=VALUE at this place is an assignment: its value is not split
        self._line = 1

    @property
    def line(self) -> int:
        """The line that is being read, from 1."""
        return self._line

    def next(self) -> Simple | None:
        """The next simple command that is not empty; None at the end.

        Raises:
            NotUnderstoodError: an unclosed quote, or a here-document.
        """
        while True:
            found = self._simple()
            if found is None or found.words or found.redirects:
                return found

    def _simple(self) -> Simple | None:
        words: list[str] = []
        redirects: list[str] = []
        start = 0
        while True:
            self._skip_blanks()
            start = start or self._line
            rest = self._text[self._at :]
            if not rest:
                return Simple(tuple(words), start, "", tuple(redirects)) if words or redirects else None
            if rest[0] == "\n":
                self._advance(1)
                return Simple(tuple(words), start, ";", tuple(redirects))
            if redirect := _REDIRECT.match(rest):
                redirects.append(self._redirect(redirect))
                continue
            operator = next((each for each in _OPERATORS if rest.startswith(each)), None)
            if operator:
                self._advance(len(operator))
                return Simple(tuple(words), start, operator, tuple(redirects))
            if rest[0] in "()":
                if words[:1] == ["case"]:
                    raise NotUnderstoodError("`case`, a loop or a choice,")
                if words and rest.startswith("()"):
                    raise NotUnderstoodError(f"the function {words[-1]}")
                raise NotUnderstoodError("a group in parentheses")
            self._assigns = all(map(assignment, words)) or words[0] in ("export", "declare", "readonly", "local")
            words += self._word()

    def _redirect(self, match: re.Match[str]) -> str:
        if match[2] in ("<<", "<<<"):
            raise NotUnderstoodError("a here-document")
        self._advance(match.end())
        if match[2] in (">&", "<&") and (number := re.match(r"[0-9-]+", self._text[self._at :])):
            self._advance(number.end())
            return match[0] + number[0]
        self._skip_blanks()
        target = self._word()
        return match[0] + " ".join(target)

    def _advance(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _skip_blanks(self) -> None:
        """Skip blanks, continued lines and a comment."""
        while self._at < len(self._text):
            if self._text.startswith("\\\n", self._at):
                self._advance(2)
            elif self._text[self._at] in " \t\r":
                self._advance(1)
            elif self._text[self._at] == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            else:
                return

    def _word(self) -> list[str]:
        """A word, expanded. An unquoted ``$X`` may become several words or none."""
        parts: list[str] = [""]
        quoted = False
        while self._at < len(self._text) and (char := self._text[self._at]) not in " \t\r\n;|&<>)":
            if char == "(":
                if not re.fullmatch(r"[A-Za-z_]\w*\+?=", parts[-1], re.ASCII):
                    break
                self._command()  # an array
                parts[-1] += UNKNOWN
            elif char in "\\'\"":
                quoted = self._quoted(char, parts) or quoted
            elif char in "$`":
                self._split(parts)
            else:
                parts[-1] += char
                self._advance(1)
        return parts if quoted else [part for part in parts if part]

    def _quoted(self, char: str, parts: list[str]) -> bool:
        """A quoted part of a word. False for a continued line, which quotes nothing."""
        if char == '"':
            self._double(parts)
        elif char == "'":
            end = self._text.find("'", self._at + 1)
            if end < 0:
                raise NotUnderstoodError("a quote that is not closed")
            parts[-1] += self._text[self._at + 1 : end]
            self._advance(end + 1 - self._at)
        else:
            escaped = self._text[self._at + 1 : self._at + 2]
            parts[-1] += "" if escaped == "\n" else escaped
            self._advance(2)
            return escaped != "\n"
        return True

    def _split(self, parts: list[str]) -> None:
        """An unquoted expansion: its blanks separate words."""
        value = self._expansion()
        if self._assigns and assignment(parts[0]) is not None:
            parts[-1] += value
            return
        pieces = value.split()
        if pieces and value[:1].isspace() and parts[-1]:
            parts.append("")
        for number, piece in enumerate(pieces):
            parts[-1] += piece
            if number + 1 < len(pieces):
                parts.append("")

    def _double(self, parts: list[str]) -> None:
        self._advance(1)
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == '"':
                self._advance(1)
                return
            if char == "\\" and self._text[self._at + 1 : self._at + 2] in ("$", "`", '"', "\\", "\n"):
                kept = self._text[self._at + 1]
                parts[-1] += "" if kept == "\n" else kept
                self._advance(2)
            elif char in ("$", "`"):
                if self._text.startswith(("$@", "${@}"), self._at):
                    self._advance(2 if self._text[self._at + 1] == "@" else 4)
                    values = list(self._values.arguments)
                    if values:
                        parts[-1] += values[0]
                        parts += values[1:]
                    elif len(parts) == 1 and not parts[0] and self._text.startswith('"', self._at):
                        parts.clear()  # "$@" without arguments is no word
                        self._advance(1)
                        return
                else:
                    parts[-1] += self._expansion()
            else:
                parts[-1] += char
                self._advance(1)
        raise NotUnderstoodError("a quote that is not closed")

    def _expansion(self) -> str:
        """The value of the parameter or substitution at this place."""
        rest = self._text[self._at :]
        if rest.startswith("$(("):
            return self._until("))", 3, lambda _: UNKNOWN)
        if rest.startswith("$("):
            return self._command()
        if rest.startswith("`"):
            return self._until("`", 1, self._substituted)
        if rest.startswith("${"):
            return self._until("}", 2, self._parameter)
        name = re.match(r"\$([A-Za-z_]\w*|[0-9]|[@*#?$!])", rest, re.ASCII)
        if name is None:
            self._advance(1)
            return rest[0]
        self._advance(name.end())
        value = self._values.get(name[1])
        return value or ""

    def _until(self, closing: str, skip: int, meaning: Callable[[str], str]) -> str:
        depth, place = 0, self._at + skip
        while place < len(self._text):
            if self._text.startswith("${", place):
                depth += 1
            if self._text.startswith(closing, place) and (closing != "}" or depth == 0):
                inside = self._text[self._at + skip : place]
                self._advance(place + len(closing) - self._at)
                return meaning(inside)
            if closing == "}" and self._text[place] == "}":
                depth -= 1
            place += 1
        raise NotUnderstoodError(f"a {self._text[self._at : self._at + skip]} that is not closed")

    def _command(self) -> str:
        place = self._at + (self._text[self._at] == "$")
        depth = 0
        while place < len(self._text):
            depth += {"(": 1, ")": -1}.get(self._text[place], 0)
            if depth == 0:
                inside = self._text[self._at : place].lstrip("$(")
                self._advance(place + 1 - self._at)
                return self._substituted(inside)
            place += 1
        raise NotUnderstoodError("a parenthesis that is not closed")

    def _substituted(self, command: str) -> str:
        """The output of a command, if it is the script's or the current folder."""
        command = command.strip()
        if changed := _CHANGED.fullmatch(command):
            command = changed["where"].strip().strip("\"'").removeprefix("$(").strip()
        if command == "pwd":
            return "."
        if _HERE.match(command.removeprefix("$(")):
            above = command.partition(")")[2].strip("\"' ")
            folder = self._values.zero.replace("\\", "/").rpartition("/")[0] or "."
            return folder + above
        return UNKNOWN

    def _parameter(self, inside: str) -> str:
        """``${NAME}`` and ``${NAME:-WORD}``."""
        match = _PARAMETER.fullmatch(inside)
        if match is None:
            if inside.startswith("BASH_SOURCE"):
                return self._values.zero or UNKNOWN
            return UNKNOWN
        name, operator, word = match[1], match[2], match[3]
        value = self._values.get(name)
        if operator is None:
            return value or ""
        missing = value is None or (operator.startswith(":") and value == "")
        if operator.endswith("+"):
            return "" if missing else self._expanded(word)
        if not missing:
            return value or ""
        if operator.endswith("?"):
            return UNKNOWN
        default = self._expanded(word)
        if operator.endswith("=") and _NAME.fullmatch(name):
            self._values.variables[name] = default
        return default

    def _expanded(self, word: str) -> str:
        scanner = Scanner(word, self._values)
        found = scanner._word()
        rest = word[scanner._at :]
        return " ".join(found) + rest


def assignment(word: str) -> tuple[str, str] | None:
    """The name and the value of ``NAME=VALUE``; None if the word is no assignment."""
    name, has, value = word.partition("=")
    return (name, value) if has and _NAME.fullmatch(name) else None


def commands(text: str, values: Values) -> Iterator[Simple]:
    """The simple commands of a text one by one. The caller may set ``values`` between them.

    Raises:
        NotUnderstoodError: an unclosed quote, a group, a function or a here-document.
    """
    scanner = Scanner(text, values)
    while (simple := scanner.next()) is not None:
        yield simple


def of_words(words: Sequence[str]) -> list[Simple]:
    """The simple commands of words that a shell has split: quoted operators, and ``export A=1;`` with its semicolon."""
    found: list[Simple] = []
    current: list[str] = []

    def end(operator: str) -> None:
        if current:
            found.append(Simple(tuple(current), 1, operator))
            current.clear()

    for word in words:
        if word in _OPERATORS:
            end(word)
        elif word.endswith(";") and (assignment(word) or (current[:1] and current[0] in _PREPARE)):
            current.append(word[:-1])
            end(";")
        else:
            current.append(word)
    end("")
    return found
