"""``report --redact``: the same runs without names, addresses and secrets, and how many of each were removed.

Every text of the data is read twice: first to learn names that only some texts explain (``host=gpu-a03``), then to
remove them from all. So the page needs no rule of its own, and new fields of the data need no change here.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from provision.errors import UsageError
from provision.masking import secrets_in
from provision.report.data import RunData, Sample
from provision.report.names import Names
from provision.report.sensitive import is_label, is_value, learn, redacted
from provision.run import config_text
from trainer.reader import Row

_DEEP = 40  # levels of the data
_WORD = re.compile(r"[a-z][a-z_]*")
_FIELDS = {  # of events, states and records; a node with such a name changes no key
    *("event", "time", "attempt", "state", "node", "nodes", "rank", "text", "why", "step", "env", "argv", "plans"),
    *("level", "kind", "phase", "checkpoint", "launcher", "master", "prefix", "who", "run", "error", "rc", "signal"),
}  # fmt: skip

Text = Callable[[str, str], str]


@dataclass(frozen=True)
class Known:
    """Names that the inventory has.

    Attributes:
        nodes: names of nodes.
        hosts: host names and addresses of nodes.
        users: users who log in there.
    """

    nodes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()


@dataclass(frozen=True)
class Redaction:
    """Runs without names, addresses and secrets.

    Attributes:
        runs: the runs.
        removed: by rule, how many different values were removed.
        nodes: by the word of each node in the report, its name; for the user, never for the report.
    """

    runs: tuple[RunData, ...]
    removed: Mapping[str, int]
    nodes: Mapping[str, str]


def redact(runs: Sequence[RunData], known: Known = Known()) -> Redaction:
    """Remove names, addresses and secrets from runs. The same value is the same word in all of them.

    Args:
        runs: the runs; nodes are numbered by their ranks in the first one.
        known: names that the inventory has.
    """
    runs = [replace(run, files=dict(_configurations(run.files))) for run in runs]
    first = _named(Names(), runs, known)
    seen: set[tuple[str, str]] = set()

    def remember(value: str, label: str) -> str:
        if (value, label) not in seen:
            seen.add((value, label))
            learn(value, first, label)
        return value

    _Walker(remember).runs(runs)
    names = _named(Names(), runs, known)
    names.take(first)
    names.settle()
    cache: dict[tuple[str, str], str] = {}

    def text(value: str, label: str) -> str:
        found = cache.get((value, label))
        if found is None:
            found = cache[value, label] = names.worded(redacted(value, names, label))
        return found

    walker = _Walker(text)
    shown = tuple(
        replace(run, id=names.worded(names.place("run", own.id.lower())), files=_texts(run.files))
        for own, run in zip(runs, walker.runs(runs), strict=True)
    )
    return Redaction(shown, names.removed(), names.of("node"))


def _named(names: Names, runs: Iterable[RunData], known: Known) -> Names:
    """The names that need no rule: of runs, and of nodes in the order of their ranks."""
    for run in runs:
        names.know("run", run.id, at_once=True)
        listed = run.record.get("nodes")
        order = [str(name) for name in listed] if isinstance(listed, list) else []
        for name in dict.fromkeys((*order, *(node.name for node in run.nodes), *run.missing)):
            names.know("node", name, at_once=True)
    for rule, values in (("node", known.nodes), ("host", known.hosts), ("user", known.users)):
        for value in values:
            names.know(rule, value, at_once=rule == "node")
    return names


def _configurations(files: Mapping[str, str]) -> Iterable[tuple[str, Any]]:
    """The files' contents as data: what a text escapes, and comments, would pass the rules."""
    for name, text in files.items():
        try:
            content = config_text.load(name, text)[1]
        except UsageError:  # the report shows no such file
            continue
        yield name, content


def _texts(files: Mapping[str, Any]) -> dict[str, str]:
    return {name: json.dumps(content, ensure_ascii=False, default=str) for name, content in files.items()}


class _Walker:
    """Applies a function to every text of the data."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._curves: dict[tuple[str, ...], bool] = {}

    def runs(self, runs: Iterable[RunData]) -> list[RunData]:
        """The runs with changed texts."""
        return [
            replace(
                self._walk(replace(run, files={}, missing={}), "", 0),
                missing={self._text(name, ""): self._text(str(why), "") for name, why in run.missing.items()},
                files={
                    self._text(f"/{name}", "")[1:]: self._config(content, "", 0) for name, content in run.files.items()
                },
            )
            for run in runs
        ]

    def _walk(self, value: Any, label: str, depth: int) -> Any:
        """A value of the data; keys that are the data's own fields stay."""
        if value is None or isinstance(value, bool | int | float | Row):
            return self._number(value, label) if isinstance(value, int) else value
        if isinstance(value, str) or depth >= _DEEP:
            return self._text(str(value), label)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            is_known = isinstance(value, Sample) and self._known_curves(tuple(value.values))
            return value if is_known else type(value)(*(self._walk(each, label, depth + 1) for each in value))
        if isinstance(value, list | tuple | set | frozenset):
            return type(value)(self._list(list(value), label, depth, self._walk))
        if isinstance(value, Mapping):
            return {self._key(key): self._walk(each, str(key), depth + 1) for key, each in value.items()}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {
                field.name: self._walk(getattr(value, field.name), "", depth + 1)
                for field in dataclasses.fields(value)
                if field.init
            }
            return replace(value, **fields)
        return self._text(str(value), label)

    def _config(self, value: Any, label: str, depth: int) -> Any:
        """A value of a configuration file, whose keys are the user's."""
        if isinstance(value, dict) and depth < _DEEP:
            return {self._text(str(key), ""): self._config(each, str(key), depth + 1) for key, each in value.items()}
        if isinstance(value, list) and depth < _DEEP:
            return self._list(value, label, depth, self._config)
        return self._walk(value, label, depth)

    def _list(self, values: list[Any], label: str, depth: int, walk: Callable[[Any, str, int], Any]) -> list[Any]:
        if values and isinstance(values[0], tuple) and all(isinstance(each, int | float | None) for each in values[0]):
            return values  # of a curve
        if len(values) > 1 and all(isinstance(each, str) for each in values):  # it may be a command
            found = {place: (start, name) for place, start, name in secrets_in(values)}
            return [
                each[: found[at][0]] + self._text(each[found[at][0] :], found[at][1]) if at in found
                else walk(each, label, depth + 1)
                for at, each in enumerate(values)
            ]  # fmt: skip
        return [walk(each, label, depth + 1) for each in values]

    def _number(self, value: int, label: str) -> Any:
        """A number, which may be a password."""
        return self._text(str(value), label) if label and is_label(label) and is_value(label, str(value)) else value

    def _key(self, key: Any) -> str:
        text = str(key)
        return text if text in _FIELDS else self._text(text, "")

    def _known_curves(self, names: tuple[str, ...]) -> bool:
        """Whether names of curves have nothing to remove."""
        if names not in self._curves:
            self._curves[names] = all(_WORD.fullmatch(name) for name in names)
        return self._curves[names]
