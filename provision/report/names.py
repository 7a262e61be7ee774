"""The values that a report no longer has, and the word of each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple


class Rule(NamedTuple):
    """What is removed: the word that replaces it, and its name in the report."""

    word: str
    title: str


RULES = {
    "run": Rule("run", "Ids of runs"),
    "node": Rule("node", "Names of nodes"),
    "host": Rule("host", "Other host names and domains"),
    "address": Rule("address", "IP addresses"),
    "hardware": Rule("mac", "MAC addresses and GUIDs"),
    "user": Rule("user", "User names"),
    "email": Rule("email", "E-mail addresses"),
    "folder": Rule("folder", "Folders"),
    "url": Rule("url", "URLs"),
    "labelled": Rule("secret", "Secrets by their label, such as password="),
    "token": Rule("secret", "Tokens of a known shape"),
    "pem": Rule("secret", "Keys and certificates (PEM)"),
    "random": Rule("secret", "Random letters and digits"),
    "identifier": Rule("id", "UUIDs and fingerprints"),
}

MOST = 60_000  # different values; all further ones share a word
_NAMED = 300  # characters of a known name or secret

_FIRST = 0xF0000  # the first private character
PRIVATE = re.compile("[\U000f0000-\U0010fffd]")
FILE = re.compile(
    r".+\.(?:py|pyc|sh|ya?ml|json|jsonl|toml|ini|cfg|conf|txt|log|md|so(?:\.\d+)*|c|cc|cpp|h|hpp|cu|cuh|csv|parquet|arrow|bin"
    r"|pt|pth|safetensors|model|gz|zst|tar|zip|whl|conda|ccb|lock|pid|sock|html|ipynb|gguf)"
)
_NOT_NAMES = {  # words after "user:" or "host:" and names of every machine
    *("root", "user", "users", "admin", "nobody", "localhost", "none", "null", "true", "false", "name", "host", "node"),
    *("error", "failed", "test", "data", "dev", "home", "train", "run", "default", "unknown", "system", "name", "id"),
    *("is", "was", "not", "the", "and", "for", "to", "in", "at", "on", "a", "an", "of", "or", "time", "cpu", "gpu"),
    *("rank", "step", "loss", "cuda", "worker", "server", "torch", "python", "agent", "process", "memory", "local"),
    *("dr", "public", "shared", "tmp", "env", "static", "c10d", "etcd", "file", "tcp", "http", "https", "ip", "port"),
}
_NO_HOST = re.compile(
    r"(?i)(?:rank|step|layer|cuda|gpu|npu|epoch|line|attempt|local_?rank|worker|dataloader|level|iter)[-_]?\d*"
)


class Names:
    """The values that a report no longer has, each with its word."""

    def __init__(self) -> None:
        """Start without any."""
        self.words: list[str] = []
        self.values: list[tuple[str, str]] = []  # of each word, its rule and value
        self._places: dict[tuple[str, str], int] = {}
        self._counts: Counter[str] = Counter()
        self._known: dict[str, str] = {}  # by value in small letters, its rule
        self._secrets: dict[str, str] = {}
        self._shown: set[int] = set()
        self._patterns: list[tuple[re.Pattern[str], dict[str, str]]] = []

    def place(self, rule: str, value: str) -> str:
        """The private character of a value."""
        word = RULES[rule].word
        at = self._places.get((word, value))
        if at is None:
            self._counts[word] += 1
            full = len(self.words) >= MOST
            at = MOST if full and len(self.words) > MOST else len(self.words)
            if at == len(self.words):
                self.words.append(f"{word}-{self._counts[word]}" if not full else "removed")
                self.values.append((rule, value))
            if not full:
                self._places[word, value] = at
        return chr(_FIRST + at)

    def know(self, rule: str, value: str, *, at_once: bool = False) -> None:
        """Remember a name, which is then removed wherever it is; ``at_once`` gives it the next number of its word."""
        value = value.strip().rstrip(".").strip()
        lowered = value.lower()
        if not 2 <= len(value) <= _NAMED or lowered.isdigit() or PRIVATE.search(value) or len(self._known) >= MOST:
            return
        if rule in {"labelled", "token", "random"}:
            if len(value) >= 8 and re.search(r"[^A-Za-z]", value):
                self._secrets.setdefault(lowered, rule)
        elif at_once or (lowered not in _NOT_NAMES and not _is_common(rule, lowered)):
            self._known.setdefault(lowered, rule)
            if at_once:
                self.place(rule, lowered)

    def settle(self) -> None:
        """Prepare the removal of the names that are known now."""
        self._patterns = [(_any_of(known), known) for known in (self._secrets, self._known) if known]

    def take(self, other: Names) -> None:
        """Know what other names know."""
        self._known = {**other._known, **self._known}
        self._secrets = {**other._secrets, **self._secrets}

    def worded(self, text: str) -> str:
        """A text with words in place of private characters."""
        if text.isascii():
            return text

        def word(found: re.Match[str]) -> str:
            at = ord(found[0]) - _FIRST
            self._shown.add(at)
            return self.words[at]

        return PRIVATE.sub(word, text)

    def removed(self) -> dict[str, int]:
        """By rule, how many different values the texts have lost."""
        counts = Counter(self.values[at][0] for at in self._shown)
        return {rule: counts[rule] for rule in RULES if counts[rule]}

    def of(self, rule: str) -> dict[str, str]:
        """By word, the values of one rule."""
        return {word: value for word, (own, value) in zip(self.words, self.values, strict=True) if own == rule}

    def known(self, text: str, *, secrets: bool) -> str:
        """A text without known secrets, or without known names."""
        for pattern, known in self._patterns:
            if (known is self._secrets) is secrets:
                text = pattern.sub(self._placer(known), text)
        return text

    def _placer(self, known: Mapping[str, str]) -> Callable[[re.Match[str]], str]:
        return lambda found: self.place(known.get(found[0].lower(), "host"), found[0].lower())


def _is_common(rule: str, name: str) -> bool:
    """Whether a word beside a label is none of a host or user: a rank, a file, an address, a number."""
    if rule == "host":
        if len(name) < 3:
            return True
        return bool(_NO_HOST.fullmatch(name) or FILE.fullmatch(name) or re.fullmatch(r"[\d.:]+", name))
    return False


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """One pattern for many words, as a tree of their letters: its time does not grow with their number."""
    tree: dict[str, object] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})  # type: ignore[assignment]
        node[""] = {}
    return re.compile(rf"(?i)(?<![A-Za-z0-9]){_branch(tree)}(?![A-Za-z0-9])")


def _branch(tree: dict[str, object]) -> str:
    """The pattern of a tree; loops down single branches, so that long words need no deep recursion."""
    text = ""
    while len(tree) == 1 and "" not in tree:
        ((letter, below),) = tree.items()
        text, tree = text + re.escape(letter), below  # type: ignore[assignment]
    branches = [re.escape(letter) + _branch(below) for letter, below in tree.items() if letter]  # type: ignore[arg-type]
    if not branches:
        return text
    return f"{text}(?:{'|'.join(branches)}){'?' if '' in tree else ''}"
