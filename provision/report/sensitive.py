"""Removes names, addresses and secrets from texts, by rules: the part of ``redaction`` that reads a text.

A value becomes a private character of Unicode, and at the end a word such as ``node-1``: so no rule reads the words of
another. Rules use ASCII's word boundaries, because text in front of a value may be Chinese. The rules prefer to remove
too much: a name that stays is worse than a word that is missing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

from provision.masking import HIDDEN, is_harmless, names_secret, replace_tokens
from provision.output_text import clean
from provision.report import patterns
from provision.report.names import FILE, PRIVATE, Names

LONGEST = 100_000  # characters of a text that are read; the rest is dropped


def redacted(text: str, names: Names, label: str = "") -> str:
    """A text without names, addresses and secrets; each has a private character in its place.

    Args:
        text: the text.
        names: receives the values.
        label: the key whose value the text is.
    """
    text = _bounded(text)
    for step in _STEPS:
        text = step(text, names, label)
    return text


def _bounded(text: str) -> str:
    """A text as the page shows it, of bounded length."""
    return PRIVATE.sub("", clean(text if len(text) <= LONGEST else f"{text[:LONGEST]}\N{HORIZONTAL ELLIPSIS}"))


def learn(text: str, names: Names, label: str = "") -> None:
    """Remember the hosts, users and secrets that a text shows by what is around them."""
    text = _bounded(text)
    _labelled(text, names, label)
    line = f"{label}={text}" if label else text
    for pattern in patterns.HOSTS:
        for found in pattern.finditer(line):
            names.know("host", found["host"])
    for pattern in patterns.USERS:
        for found in pattern.finditer(line):
            names.know("user", found["user"])
    for found in patterns.LOGIN.finditer(line):
        names.know("user", found["user"])
        names.know("host", found["host"])


@lru_cache(10_000)
def is_label(name: str) -> bool:
    """Whether a key or label is that of a secret: an option's, a variable's, or one in a file or log."""
    bare = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-")) if not name.isupper() else name.lstrip("-")
    last = bare.replace("-", "_").rpartition(".")[2]
    return names_secret(last) or names_secret(last.lower()) or patterns.OWN.search(last.lower()) is not None


def is_value(label: str, value: str) -> bool:
    """Whether a value of a secret's label is one: no reference, no masked one, and of a token no number."""
    value = value.strip("\"'\\ ")
    if not value or is_harmless(value) or patterns.REFERENCE.fullmatch(value) or PRIVATE.fullmatch(value):
        return False
    if patterns.PASSWORD.search(label):
        return value != HIDDEN
    return not re.fullmatch(r"[-+\d.,eE%]{1,11}", value)


def _labelled(text: str, names: Names, label: str) -> str:
    if label and is_label(label):
        return names.place("labelled", _learnt(names, text)) if is_value(label, text) else text
    for pattern in patterns.SPOKEN[:2]:
        text = pattern.sub(lambda found: _of_value(found, names), text)
    for pattern in (patterns.LABEL, patterns.OPTION):
        text = _values(pattern, text, names)
    for pattern in patterns.SPOKEN[2:]:
        text = pattern.sub(lambda found: _of_value(found, names), text)
    return text


def _values(pattern: re.Pattern[str], text: str, names: Names) -> str:
    """Replace the values of labels. A value that is none may have labels itself, so the search continues in it."""
    parts, at = [], 0
    while found := pattern.search(text, at):
        parts.append(text[at : found.end()])
        at = found.end()
        inner = pattern.match(text, at)
        if not is_label(found["name"]) or (inner and is_label(inner["name"])):  # or a label in front of another
            continue
        value = patterns.VALUE.match(text, at)
        if value is None or not is_value(found["name"], value["value"]):
            continue
        parts.append(names.place("labelled", _learnt(names, value["value"].strip("\"'\\"))))
        at = value.end()
    return "".join(parts) + text[at:]


def _of_value(found: re.Match[str], names: Names) -> str:
    value = found["value"]
    if not is_value("password", value):
        return found[0]
    start, end = found.start("value") - found.start(), found.end("value") - found.start()
    return found[0][:start] + names.place("labelled", _learnt(names, value.strip("\"'"))) + found[0][end:]


def _learnt(names: Names, value: str) -> str:
    names.know("labelled", value)
    return value


def _pem(text: str, names: Names, label: str) -> str:  # noqa: ARG001 - a step
    return patterns.PEM.sub(lambda found: names.place("pem", found[0]), text)


def _known_secrets(text: str, names: Names, label: str) -> str:  # noqa: ARG001 - a step
    return names.known(text, secrets=True)


def _tokens(text: str, names: Names, label: str) -> str:  # noqa: ARG001 - a step
    return replace_tokens(text, lambda token: names.place("token", token))


def _urls(text: str, names: Names, label: str) -> str:  # noqa: ARG001 - a step
    def url(found: re.Match[str]) -> str:
        if found["scheme"].lower() in patterns.PLAIN_SCHEMES and "@" not in found[0]:
            return found[0]
        whole = found[0].rstrip(".,;:)]\\")
        return names.place("url", whole) + found[0][len(whole) :]

    text = patterns.URL.sub(url, text)
    text = patterns.COPY.sub(lambda found: names.place("url", found[0]), text)
    return patterns.EMAIL.sub(lambda found: names.place("email", found[0].lower()), text)


def _logins(text: str, names: Names, label: str) -> str:  # noqa: ARG001 - a step
    def login(found: re.Match[str]) -> str:
        for rule in ("user", "host"):
            names.know(rule, found[rule])
        host = names.known(found["host"], secrets=False)
        host = host if host != found["host"] else names.place("host", host.lower())
        return f"{names.place('user', found['user'].lower())}@{host}"

    return patterns.LOGIN.sub(login, text)


def _random(text: str, names: Names, label: str) -> str:
    text = patterns.UUID.sub(lambda found: names.place("identifier", found[0].lower()), text)
    text = patterns.FINGERPRINT.sub(lambda found: names.place("identifier", found[0]), text)

    def digits(found: re.Match[str]) -> str:
        before = f"{label}: {text[: found.start()]}"[-40:]
        return found[0] if patterns.DIGEST.search(before) or len(set(found[0])) < 6 else names.place("random", found[0])

    text = patterns.HEX.sub(digits, text)
    return patterns.RANDOM.sub(
        lambda found: names.place("random", found[0]) if _is_random(found[0]) else found[0], text
    )


def _is_random(word: str) -> bool:
    """Whether a word of at least 19 characters looks random: its kinds of characters alternate often."""
    kinds = _kinds("".join(letter for letter in word if letter.isalnum()))
    if len(set(kinds)) < 3 and not ("+" in word or word.endswith("=")):
        return False
    parts = map(_kinds, re.split(r"[-_+/=]", word))
    changes = sum(first != second for part in parts for first, second in pairwise(part))
    return changes >= (0.3 if kinds.count("d") > 1 else 0.5) * len(kinds)  # names of classes have few digits


def _kinds(word: str) -> str:
    return "".join("d" if letter.isdigit() else "u" if letter.isupper() else "l" for letter in word)


def _addresses(text: str, names: Names, label: str) -> str:
    text = patterns.MAC.sub(lambda found: names.place("hardware", found[0].lower()), text)

    def six(found: re.Match[str]) -> str:
        value = found[0].partition("%")[0]
        try:
            number = int(ipaddress.IPv6Address(value))
        except ValueError:
            return found[0]
        small = number < 1 << 16 or value.lower().startswith("c10::")
        return found[0] if small else names.place("address", value.lower())

    def four(found: re.Match[str]) -> str:
        value = found[0].replace("-", ".")
        before = f"{label}={text[: found.start()]}"[-60:]
        is_address = all(int(part) < 256 for part in value.split(".")) and value not in patterns.COMMON
        return names.place("address", value) if is_address and not patterns.VERSION.search(before) else found[0]

    text = patterns.IPV6.sub(six, text)
    return patterns.IPV4.sub(four, text)


def _known_names(text: str, names: Names, label: str) -> str:  # noqa: ARG001 - a step
    text = names.known(text, secrets=False)
    return patterns.RUN.sub(lambda found: names.place("run", found[0].lower()), text)


def _paths(text: str, names: Names, label: str) -> str:  # noqa: ARG001 - a step
    return patterns.PATH.sub(lambda found: "".join(_path(found[0], names)), text)


def _path(path: str, names: Names) -> Iterator[str]:
    """A path's parts; folders get words, other than those of every machine and of packages."""
    parts = re.split(r"([/\\]+)", path.rstrip("."))
    named = [part for part in parts[::2] if part]
    if not path.startswith("~") and named and named[0] in patterns.SYSTEM:
        yield path
        return
    below = after_home = False
    for place, part in enumerate(parts):
        is_last = place == len(parts) - 1
        is_start = place == 0 and re.fullmatch(r"~|\$HOME|\$\{HOME\}|[A-Za-z]:", part)
        is_plain = patterns.ORDINARY.fullmatch(part) or (is_last and FILE.fullmatch(part))
        is_own = place % 2 or not part or below or PRIVATE.fullmatch(part) or patterns.PACKAGES.fullmatch(part)
        if is_own or is_start or (is_plain and not after_home):
            yield part
        else:
            yield names.place("user" if after_home else "folder", part.lower() if after_home else part)
        if part:
            below = below or patterns.PACKAGES.fullmatch(part) is not None
            after_home = part in {"home", "Users"} or (after_home and bool(place % 2))
    yield path[len(path.rstrip(".")) :]


def _domains(text: str, names: Names, label: str) -> str:  # noqa: ARG001 - a step
    def domain(found: re.Match[str]) -> str:
        name = found[0]
        first, labels = name.partition(".")[0].lower(), name.count(".") + 1
        is_sure = patterns.SURE.search(name) is not None or labels > 2 or re.search(r"[\d-]", name) is not None
        is_code = first in patterns.CODE and (labels == 2 or patterns.SURE.search(name) is None)
        is_host = not is_code and name not in patterns.IDS and (is_sure or name.endswith((".io", ".ai")))
        return names.place("host", name.lower()) if is_host else name

    return patterns.DOMAIN.sub(domain, text)


_STEPS: Sequence[Callable[[str, Names, str], str]] = (
    _known_secrets, _pem, _labelled, _tokens, _urls, _logins, _random, _known_names, _addresses, _paths, _domains,
)  # fmt: skip
