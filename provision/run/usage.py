"""Reads the options of a program in what it prints for ``--help``.

The texts of argparse, click, typer (in rich's boxes), tyro, fire, absl, jsonargparse and Hydra are understood. A line
defines an option if it starts with one: the help of an option is indented further.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile

from provision.run.script_source import Option

_LINES = 20_000
_LONG = 1_000  # characters of a line
_INDENT = 8  # columns in front of an option; its help starts further right
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_BOX = "│┃"
_START = re.compile(r"--?(\[no\])?[A-Za-z]")
_NAME = re.compile(r"(?<![\w.-])--?[A-Za-z][\w.-]*")
_ABSL = re.compile(r"(?:-\w,)?--(\[no\])?([\w.-]+): ?(?:<([\w|]+)>: )?")
# Columns between an option and its help: other names, and what stands for its value.
_PART = re.compile(r"--?[\w.-]+|<[^<>]*>|\[[^][]*\|[^][]*\]|[A-Z][A-Z0-9_]*(\.\.\.)?")
_CHOICES = re.compile(r"[{\[]([^][{}|,]+(?:[|,][^][{}|,]+)+)[}\]](?!\|)")
_INTEGER = re.compile(r"<?int(eger)?>?", re.IGNORECASE)
_BOOL = re.compile(r"[Dd]efault: '?([Tt]rue|[Ff]alse)\b")
_CONFIG = re.compile(r"^== Config ==\n(.*?)^Powered by Hydra", re.DOTALL | re.MULTILINE)
_KEY = re.compile(r"( *)([A-Za-z_][\w-]*):(?: (.*))?")
_OTHERS = {"wandb", "logger", "logging", "tracker", "mlflow", "comet"}  # groups whose "resume" is of something else


def options_of(text: str) -> dict[str, Option]:
    """The options by name; in groups (``--train.resume``) by the last part. Of two, the first counts."""
    found: dict[str, Option] = {}
    text = "\n".join(_ANSI.sub("", line[:_LONG]).rstrip() for line in text.splitlines()[:_LINES])
    for option in (*_defined(text), *_configured(text)):
        *groups, name = option.text.strip("-=").replace("-", "_").lower().split(".")
        if not _OTHERS & set(groups):
            found.setdefault(name, option)
    return found


def _defined(text: str) -> Iterator[Option]:
    """The options that lines define. The lines behind one may tell its type and default."""
    blocks: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        inner = line.strip().strip(_BOX)
        inner = inner.replace("*", " ", 1) if inner.lstrip().startswith("* ") else inner  # typer: required
        is_start = _START.match(inner.lstrip()) and len(inner) - len(inner.lstrip()) <= _INDENT
        if is_start and len(line) - len(line.lstrip()) <= _INDENT:
            blocks.append((inner.strip(), []))
        elif blocks:
            blocks[-1][1].append(inner.strip())
    for line, details in blocks:
        more = " ".join(details)
        yield _absl(found, more) if (found := _ABSL.match(line)) else _option(line, more)


def _absl(found: re.Match[str], more: str) -> Option:
    """absl: ``--name: help``, ``--[no]name: help``, ``--name: <a|b>: help``."""
    kind = "int" if "(an integer)" in more else ""
    choices = tuple(found[3].split("|")) if found[3] else ()
    return Option(f"--{found[2]}", flag=found[1] is not None, kind=kind, choices=choices)


def _option(line: str, more: str) -> Option:
    first, *cells = re.split(r"\s{2,}", line)
    head = " ".join([first, *takewhile(_PART.fullmatch, cells)])
    names = _NAME.findall(re.sub(r"[{\[<].*?[}\]>]", "", head))
    text = next((name for name in names if name.startswith("--")), names[0])
    value = _NAME.sub(" ", head).strip(" ,/=").partition(",")[0] if "{" not in head else head[head.index("{") :]
    is_pair = any(re.match(r"(.*\.)?no[-_]", name.lstrip("-")) for name in names) and len(names) > 1
    default = _BOOL.search(" ".join([*cells, more]))
    choices = _CHOICES.match(value)
    return Option(
        text,
        default=default[1].lower() == "true" if default else None,
        flag=is_pair or not value,
        kind="int" if _INTEGER.fullmatch(value) or "Type: int" in more else "",
        choices=tuple(re.split(r"[|,]", choices[1])) if choices else (),
    )


def _configured(text: str) -> Iterator[Option]:
    """The keys of the configuration that Hydra prints, typed as ``group.key=value``."""
    found = _CONFIG.search(text)
    above: list[tuple[int, str]] = []
    for line in found[1].splitlines() if found else ():
        key = _KEY.fullmatch(line)
        if key is None:
            continue
        indent, name, value = len(key[1]), key[2], key[3]
        above = [each for each in above if each[0] < indent]
        if value is None:
            above.append((indent, name))
            continue
        default = {"true": True, "false": False}.get(value.lower())
        kind = "int" if value.lstrip("-").isdecimal() else ""
        yield Option(".".join([*(each for _, each in above), name]) + "=", default, kind=kind)
