"""Launch scripts: the one command that a ``.sh``, ``.bat`` or ``.ps1`` file would start.

A script is read, never run. Assignments, arguments, ``echo``, ``cd`` to the script's own folder, checks that only print
and exit, and ``if`` with a condition that is known are followed. Loops, functions, ``goto`` and conditions that only a
running script knows are refused with their line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.typed.shell import UNKNOWN, NotUnderstoodError, Scanner, Simple, Values, assignment

LIMIT = 256 << 10  # bytes of a launch script
_ENCODINGS = (("utf-16", b"\xff\xfe"), ("utf-16", b"\xfe\xff"), ("utf-8-sig", b"\xef\xbb\xbf"))
_LOOPS = ("for", "while", "until", "select", "case", "function")
_NUMBERS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}

Follow = Callable[[Simple], tuple[str, ...] | None]
Harmless = Callable[[Sequence[str]], bool]


@dataclass(frozen=True)
class Program:
    """A launch script.

    Attributes:
        name: its path as typed.
        kind: ``sh``, ``bat`` or ``ps1``.
        text: its content.
        slurm: the words of each ``#SBATCH`` line.
    """

    name: str
    kind: str
    text: str
    slurm: tuple[tuple[str, ...], ...] = ()


def read(name: str) -> Program:
    """Read a launch script: UTF-8, UTF-16 with a byte-order mark, or the code page of Chinese Windows (GBK).

    Raises:
        UsageError: it does not exist, is too large, or is no text.
    """
    path = Path(name.replace("\\", "/")) if "\\" in name else Path(name)
    try:
        with path.open("rb") as file:
            data = file.read(LIMIT + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{shown(name)} cannot be read: {why}", hint=_meant(name)) from error
    if len(data) > LIMIT:
        raise UsageError(f"{shown(name)} is larger than {LIMIT >> 10} KiB: not a launch script", hint=_HINT)
    text = _decode(name, data)
    suffix = path.suffix.lower()
    kind = "bat" if suffix in (".bat", ".cmd") else "ps1" if suffix == ".ps1" else "sh"
    slurm = [tuple(line.split("#SBATCH", 1)[1].split()) for line in text.splitlines() if line.startswith("#SBATCH ")]
    return Program(name, kind, text, tuple(tuple(_before_comment(words)) for words in slurm))


_HINT = "type the command that it starts: clusterctl train -- torchrun SCRIPT.py"


def _before_comment(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if word.startswith("#"):
            return
        yield word


def _decode(name: str, data: bytes) -> str:
    encoding = next((encoding for encoding, mark in _ENCODINGS if data.startswith(mark)), None)
    for each in (encoding,) if encoding else ("utf-8", "gbk"):
        try:
            text = data.decode(each)
        except UnicodeDecodeError:
            continue
        if "\0" not in text:
            return text.removeprefix("\ufeff")
    raise UsageError(f"{shown(name)} is not a text file", hint=_HINT)


def _meant(name: str) -> str:
    """A hint for a path whose backslashes the shell has removed."""
    for path in sorted(Path().glob("*/*"))[:2000]:
        if path.as_posix().replace("/", "") == name:
            return f"the shell removed the backslash: clusterctl train -- {path.as_posix()}"
    return "clusterctl train -- ./SCRIPT.sh"


def interpret(program: Program, values: Values, follow: Follow, harmless: Harmless) -> tuple[str, ...]:
    """The command that a script starts.

    Args:
        program: the script.
        values: its variables and arguments; the script's assignments are added.
        follow: the training that a simple command starts; None if it only prepares.
        harmless: whether a command only prints, checks or prepares.

    Raises:
        UsageError: it starts no training, or several.
        NotUnderstoodError: a construct that cannot be followed.
    """
    reader = {"sh": _shell, "bat": _batch, "ps1": _power}[program.kind]
    machine = _Machine(program, values, follow, harmless)
    reader(program, machine)
    if machine.found is None:
        where = (
            f"line {machine.ended}: it exits before it starts a training" if machine.ended else "it starts no training"
        )
        raise UsageError(f"{shown(program.name)}: {where}", hint=machine.said or _HINT)
    return machine.found


@dataclass
class _Branch:
    """An ``if`` that is being read. ``state``: whether its current part is run; None: unknown."""

    state: bool | None
    done: bool | None  # whether an earlier part was run; None: unknown
    outer: bool | None


@dataclass
class _Machine:
    """Follows the commands of a script one by one."""

    program: Program
    values: Values
    follow: Follow
    harmless: Harmless
    branches: list[_Branch] = field(default_factory=list)
    found: tuple[str, ...] | None = None
    found_line: int = 0
    assigned: dict[str, str] = field(default_factory=dict)
    ended: int = 0
    said: str = ""  # the last text of echo, for a script that exits

    def running(self) -> bool | None:
        """Whether commands at this place are run; None: unknown."""
        return self.branches[-1].state if self.branches else True

    def open(self, condition: bool | None) -> None:
        """An ``if``."""
        outer = self.running()
        state = _both(outer, condition)
        self.branches.append(_Branch(state, condition, outer))

    def other(self, condition: bool | None, line: int) -> None:
        """An ``elif`` or ``else``."""
        if not self.branches:
            raise NotUnderstoodError(f"line {line}: an else without an if")
        branch = self.branches[-1]
        branch.state = _both(branch.outer, _both(_negated(branch.done), condition))
        branch.done = _either(branch.done, condition)

    def close(self, line: int) -> None:
        """A ``fi``."""
        if not self.branches:
            raise NotUnderstoodError(f"line {line}: a block that was not opened")
        self.branches.pop()

    def assign(self, name: str, value: str, line: int) -> None:
        """An assignment."""
        if self.running() is None:
            raise NotUnderstoodError(f"line {line}: {name} depends on a condition that only the running script knows")
        if self.running():
            self.values.variables[name] = self.assigned[name] = value

    def run(self, simple: Simple, *, certain: bool | None = True) -> None:
        """A simple command. ``certain``: whether it is run, as far as its own line says."""
        running = _both(self.running(), certain)
        if running is False or self.ended or not simple.words:
            return
        words = simple.words
        if words[0] in ("exit", "return"):
            self.ended = simple.line if running and self.found is None else 0
        elif words[0].lower() in ("echo", "printf", "print", "write-host"):
            self.said = " ".join(words[1:]).replace(UNKNOWN, "?")[:200]
        elif running:
            self._start(simple)
        elif not self.harmless(words):
            raise NotUnderstoodError(
                f"line {simple.line}: `{_text(words)}` depends on a condition that only the running script knows"
            )

    def _start(self, simple: Simple) -> None:
        """A command that is run."""
        try:
            found = self.follow(simple)
        except NotUnderstoodError as error:
            raise NotUnderstoodError(f"line {simple.line}: {error}") from None
        except UsageError as error:
            raise UsageError(f"{shown(self.program.name)}, line {simple.line}: {error}", hint=error.hint) from None
        if found is None:
            return
        if self.found is not None:
            raise UsageError(
                f"{shown(self.program.name)} starts two programs, in lines {self.found_line} and {simple.line}; "
                "a run starts one",
                hint=f"clusterctl train -- {_text(found)}",
            )
        self.found, self.found_line = found, simple.line


def _text(words: Sequence[str]) -> str:
    return shown(" ".join(words).replace(UNKNOWN, "?"))[:200]


def _both(one: bool | None, two: bool | None) -> bool | None:
    if one is False or two is False:
        return False
    return None if one is None or two is None else True


def _negated(one: bool | None) -> bool | None:
    return None if one is None else not one


def _either(one: bool | None, two: bool | None) -> bool | None:
    return _negated(_both(_negated(one), _negated(two)))


# --- POSIX shells ----------------------------------------------------------------------------------


def _shell(program: Program, machine: _Machine) -> None:
    """A script of a POSIX shell or bash."""
    scanner = Scanner(program.text, machine.values)
    operator = ";"  # in front of the command
    succeeded: bool | None = True  # whether the command before it succeeded; None: unknown
    while True:
        try:
            simple = scanner.next()
        except NotUnderstoodError as error:
            raise NotUnderstoodError(f"line {scanner.line}: {error}") from None
        if simple is None:
            return
        certain = True if operator not in ("&&", "||") else succeeded if operator == "&&" else _negated(succeeded)
        words = _control(simple, machine, certain)
        if words and certain is not False:
            rest = Simple(tuple(words), simple.line, simple.after, simple.redirects)
            succeeded = _command(rest, machine, certain, piped=operator in ("|", "|&"))
        operator = simple.after


def _control(simple: Simple, machine: _Machine, certain: bool | None) -> list[str]:
    """Follow ``if``, ``then``, ``else``, ``fi`` and braces. Returns the command that is left.

    ``certain``: whether the command is run, as far as its own line says.
    """
    words = list(simple.words)
    while words and words[0] in ("then", "else", "{", "}", "fi", "if", "elif"):
        word = words.pop(0)
        if word == "else":
            machine.other(True, simple.line)
        elif word == "{":
            machine.open(certain)
        elif word in ("fi", "}"):
            machine.close(simple.line)
        elif word == "if":
            machine.open(_condition(words))
            return []
        elif word == "elif":
            machine.other(_condition(words), simple.line)
            return []
    if words and words[0] in _LOOPS:
        raise NotUnderstoodError(f"line {simple.line}: `{words[0]}`, a loop or a choice,")
    return words


def _command(simple: Simple, machine: _Machine, certain: bool | None, *, piped: bool) -> bool | None:
    """Follow a simple command. Returns whether it succeeds; None if only the running script knows."""
    words = simple.words
    pairs = [pair for pair in map(assignment, words) if pair is not None]
    if len(pairs) == len(words):
        if certain is None:
            raise NotUnderstoodError(f"line {simple.line}: `{_text(words)}` depends on a condition")
        for name, value in pairs:
            machine.assign(name, value, simple.line)
        return True
    if words[0] in ("[", "[[", "test", "!"):
        return _both(certain, _condition(words))
    if words[0] in ("export", "declare", "readonly", "local") and machine.running() and certain:
        _export(words, machine, simple.line, simple)
    elif not piped:
        machine.run(simple, certain=certain)
    checks = ("command", "which", "type", "grep", "python", "python3", "nvidia-smi", "hash", "ls")
    return None if words[0] in checks and machine.found is None else True


def _export(words: Sequence[str], machine: _Machine, line: int, simple: Simple) -> None:
    """``export A=b C``: variables of the training."""
    pairs = []
    for word in words[1:]:
        pair = assignment(word)
        if pair is not None:
            machine.assign(*pair, line)
            pairs.append(word)
        elif (value := machine.values.get(word)) is not None:
            pairs.append(f"{word}={value}")
    if words[0] == "export" and pairs:
        machine.run(Simple(("export", *pairs), line, simple.after))


def _condition(words: Sequence[str]) -> bool | None:
    """Whether a condition holds; None if only the running script knows."""
    rest = list(words)
    negated = False
    while rest[:1] == ["!"]:
        negated = not negated
        rest = rest[1:]
    if rest[:1] in (["["], ["[["]) and rest[-1:] in (["]"], ["]]"]):
        rest = rest[1:-1]
    elif rest[:1] == ["test"]:
        rest = rest[1:]
    else:
        return True if rest == ["true"] else False if rest == ["false"] else None
    while rest[:1] == ["!"]:
        negated = not negated
        rest = rest[1:]
    result = _test(rest)
    return _negated(result) if negated else result


def _test(words: Sequence[str]) -> bool | None:
    if any(UNKNOWN in word for word in words):
        return None
    match list(words):
        case ["-z"]:
            return True
        case ["-n"]:
            return False
        case ["-z", text]:
            return not text
        case ["-n", text] | [text] if text not in ("-z", "-n"):
            return bool(text)
        case [one, "=" | "==", two]:
            return one == two
        case [one, "!=", two]:
            return one != two
        case [one, operator, two] if operator in _NUMBERS and one.isdecimal() and two.isdecimal():
            a, b = int(one[:18]), int(two[:18])
            return {"-eq": a == b, "-ne": a != b, "-lt": a < b, "-le": a <= b, "-gt": a > b, "-ge": a >= b}[operator]
    return None


# --- cmd -------------------------------------------------------------------------------------------

_PERCENT = re.compile(r"%(?:(\*)|~?(?:[dpnxfs]*)([0-9])|([A-Za-z_]\w*)%)", re.ASCII)
_IF = re.compile(
    r"""(?ix) if \s+ (?:/i\s+)? (not\s+)?
    (?: (exist|defined|errorlevel) \s+ ("[^"]*"|\S+) | ("[^"]*"|\S+?) \s* == \s* ("[^"]*"|\S+) ) \s* (.*)"""
)


def _batch(program: Program, machine: _Machine) -> None:
    """A batch file (``cmd /?``, ``set /?``, ``if /?``). Its variables are the environment of what it starts."""
    for line, text in _joined(program.text, "^"):
        _batch_line(machine, line, text)
    if machine.assigned and machine.found is not None:
        machine.follow(Simple(("export", *(f"{name}={value}" for name, value in machine.assigned.items())), 0, ";"))


def _joined(text: str, continuation: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, those with ``continuation`` at their end joined with the next."""
    start, parts = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        start = start or number
        stripped = line.rstrip()
        if stripped.endswith(continuation):
            parts += stripped[: -len(continuation)] + " "
            continue
        yield start, (parts + stripped).strip()
        start, parts = 0, ""
    if parts:
        yield start, parts.strip()


def _batch_line(machine: _Machine, line: int, text: str) -> None:
    text = text.removeprefix("@").strip()
    lower = text.lower()
    if not text or lower.startswith(("rem ", "::")) or lower == "rem":
        return
    if lower.startswith(("goto", "for ")) or re.match(r"call\s+:", lower):
        raise NotUnderstoodError(f"line {line}: `{shown(text[:60])}`, a loop or a jump,")
    if lower.startswith(":"):  # a label that nothing jumps to
        return
    if text.startswith(")"):
        rest = text[1:].strip()
        if not rest.lower().startswith("else"):
            machine.close(line)
            return
        machine.other(True, line)
        rest = rest[4:].strip()
        if rest != "(":
            _batch_line(machine, line, rest.strip("()").strip())
            machine.close(line)
        return
    if found := _IF.fullmatch(text):
        _batch_if(machine, line, found)
        return
    for part in re.split(r"\s*&&?\s*", text):
        _batch_command(machine, line, part)


def _batch_command(machine: _Machine, line: int, text: str) -> None:
    if found := re.fullmatch(r"(?i)set\s+(?:/[ap]\s+)?\"?([^=\"]+)=(.*?)\"?", text):
        value = UNKNOWN if re.match(r"(?i)set\s+/[ap]", text) else _percent(found[2], machine.values)
        machine.assign(found[1].strip(), value, line)
        return
    words = _words(_percent(text, machine.values))
    if words[:1] == ["call"] and not " ".join(words[1:2]).lower().endswith(("activate", "activate.bat", "conda")):
        words = words[1:]
    machine.run(Simple(tuple(words), line, ";"))


def _batch_if(machine: _Machine, line: int, found: re.Match[str]) -> None:
    negated, what, operand, one, two, rest = found.groups()
    condition: bool | None = None
    if one is not None:
        left, right = (_percent(each, machine.values).strip('"') for each in (one, two))
        condition = None if UNKNOWN in left + right else left == right
    elif what.lower() == "defined":
        condition = machine.values.get(operand) is not None
    machine.open(_negated(condition) if negated else condition)
    if rest == "(":
        return
    block = re.fullmatch(r"\((.*?)\)(?:\s*else\s*\(?(.*?)\)?)?", rest)
    first, second = (block[1], block[2]) if block else (rest, None)
    _batch_line(machine, line, first.strip())
    if second:
        machine.other(True, line)
        _batch_line(machine, line, second.strip())
    machine.close(line)


def _percent(text: str, values: Values) -> str:
    """``%NAME%``, ``%1``, ``%~1``, ``%*`` and ``%~dp0`` with their values. An unset variable is empty."""

    def value(found: re.Match[str]) -> str:
        if found[1]:
            return " ".join(values.arguments)
        if found[2] == "0":
            return values.zero.replace("\\", "/").rpartition("/")[0] or "."
        return values.get(found[2] or found[3]) or ""

    return _PERCENT.sub(value, text).replace("%%", "%")


def _words(text: str) -> list[str]:
    """The words of a command, without the double quotes around them."""
    found = re.findall(r'(?:[^\s"]|"[^"]*")+', text)
    return [word.replace('"', "") for word in found if word not in (">nul", "2>&1", ">NUL")]


# --- PowerShell ------------------------------------------------------------------------------------

_ASSIGNED = re.compile(r"\$(?P<env>env:)?(?P<name>\w+)\s*=\s*(?P<value>.+?)\s*;?", re.ASCII | re.IGNORECASE)
_PARAMETER = re.compile(r"(?:\[\w.]+\]\s*)?\$(\w+)(?:\s*=\s*(.+))?", re.ASCII)


def _power(program: Program, machine: _Machine) -> None:
    """A PowerShell script of assignments, ``param(…)`` and commands (about_Variables, about_Parameters)."""
    text = program.text
    if found := re.search(r"(?is)^\s*(?:\[CmdletBinding\(\)\]\s*)?param\s*\((.*?)\)\s*$", text, re.MULTILINE):
        for number, each in enumerate(re.split(r",\s*", found[1].strip())):
            if parameter := _PARAMETER.search(each):
                given = machine.values.arguments[number : number + 1]
                default = _plain(parameter[2] or "", machine.values)
                machine.values.variables[parameter[1]] = given[0] if given else default
        text = text[: found.start()] + "\n" * found[0].count("\n") + text[found.end() :]
    for line, joined in _joined(text, "`"):
        for row in filter(None, re.split(r"\s*;\s*", joined)):
            _power_row(machine, line, row)


def _power_row(machine: _Machine, line: int, row: str) -> None:
    if row.startswith("#"):
        return
    if re.match(r"(?i)(foreach|for|while|do|if|switch|function|try)\b", row):
        raise NotUnderstoodError(f"line {line}: `{shown(row[:60])}`, a loop or a choice,")
    if found := _ASSIGNED.fullmatch(row):
        value = _plain(found["value"], machine.values)
        machine.assign(found["name"], value, line)
        if found["env"]:
            machine.run(Simple(("export", f"{found['name']}={value}"), line, ";"))
        return
    words = [_plain(word, machine.values) for word in re.findall(r"(?:[^\s\"']|\"[^\"]*\"|'[^']*')+", row)]
    machine.run(Simple(tuple(words[1:] if words[:1] == ["&"] else words), line, ";"))


def _plain(text: str, values: Values) -> str:
    """A word without quotes, with its variables."""
    if text.startswith("'"):
        return text.strip("'")

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name.lower() == "psscriptroot":
            return values.zero.replace("\\", "/").rpartition("/")[0] or "."
        return values.get(name) or ""

    return re.sub(r"\$\{?(?:env:)?(\w+)\}?", value, text, flags=re.ASCII | re.IGNORECASE).replace('"', "")
