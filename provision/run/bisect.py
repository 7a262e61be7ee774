"""Which settings of a bad run are its cause: the settings that differ, mixtures of them, and the search. Pure.

``tasks/bisect.py`` starts a job for each mixture that ``search`` asks for, and sends back its verdict.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple

from provision.inventory import fold
from provision.masking import HIDDEN
from provision.run.difference import arguments, value_of

Verdict = Literal["good", "bad", "unclear"]
CAUSES = 3  # settings that are only together the cause: of more, the search says what it knows
NEAR = 0.05  # part by which the values of the good and the bad run differ at least

# They say where a run writes, and how clusterctl follows it.
_OUTPUTS = {"output_dir", "output", "out", "save_dir", "logging_dir", "run_name"}
_NODE = "node "
_ORDER = "order of the nodes"
_FOLLOWING = {"--restarts", "--resume-arg", "--exclude-bad", "--output", "--dry-run", "--shell"}


class Setting(NamedTuple):
    """A setting of ``train`` that differs between the runs; None: the run does not have it."""

    kind: str  # argument, setting, option, variable, release, nodes
    name: str
    good: Any
    bad: Any

    @property
    def label(self) -> str:
        """Its name for messages."""
        if self.kind == "nodes" and self.name.startswith(_NODE):
            return f"{self.good[0]} replaced by {self.bad[0]}"
        return f"train {self.name}" if self.kind == "option" else self.name

    def text(self, *, bad: bool) -> str:
        """One of its values for messages."""
        value = self.bad if bad else self.good
        if value is None:
            return "not set"
        match self.kind:
            case "argument":
                return value_of(value)
            case "nodes":
                return ",".join(value) if self.name == _ORDER else fold(value)
            case "release":
                return str(PurePosixPath(value).name)
        return " ".join(value) or "set" if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Mixture:
    """What a round starts: ``train`` with these options, words, variables, release and nodes, in their order."""

    words: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Space:
    """The settings to search among, and what is the same in every round.

    Attributes:
        settings: the most likely cause first.
        job: the words of the job that the user typed, by name.
        good: the good run's record; ``bad`` the bad one's.
        untested: settings that differ and cannot be set, each with the reason.
    """

    settings: tuple[Setting, ...]
    job: Mapping[str, tuple[str, ...]]
    good: Mapping[str, Any]
    bad: Mapping[str, Any]
    untested: Mapping[str, str] = field(default_factory=dict)

    def mixture(self, chosen: Collection[int]) -> Mixture:
        """The good run with the bad run's values of the settings at these places."""
        values = {
            (each.kind, each.name): each.bad if at in chosen else each.good for at, each in enumerate(self.settings)
        }
        options, _ = _typed(self.good)
        options |= {name: value for (kind, name), value in values.items() if kind == "option"}
        variables = {**_mapping(self.good, "variables")}
        variables |= {name: value for (kind, name), value in values.items() if kind == "variable"}
        return Mixture(
            self._words(values),
            {name: value for name, value in options.items() if value is not None},
            {name: value for name, value in variables.items() if value is not None},
            values.get(("release", "release"), str(self.good.get("prefix") or "")),
            mixed_nodes(
                _tuple(self.good.get("nodes")),
                _tuple(self.bad.get("nodes")),
                {each.name for at, each in enumerate(self.settings) if at in chosen and each.kind == "nodes"},
            ),
        )

    def _words(self, values: Mapping[tuple[str, str], Any]) -> tuple[str, ...]:
        """The job's program, arguments without a name, the job's own options, and those of the runs."""
        before = arguments(_typed(self.good)[1])
        runs = {name: before.get(name) for name in _merged(before, arguments(_typed(self.bad)[1]))}
        runs |= {name: value for (kind, name), value in values.items() if kind == "argument"}
        if not self.job:
            words = runs
        else:
            bare = {name: value for name, value in runs.items() if name.startswith("argument")}
            first = {"program": self.job["program"]} if "program" in self.job else {}
            words = {
                **first,
                **bare,
                **self.job,
                **{name: value for name, value in runs.items() if name not in self.job},
            }
        set_here = [(name, value) for (kind, name), value in values.items() if kind == "setting" and value is not None]
        pairs = [f"{name}={json.dumps(value)}" for name, value in set_here]
        return (*(word for value in words.values() for word in value or ()), *pairs)


def space(good: Mapping[str, Any], bad: Mapping[str, Any], job: Sequence[str]) -> Space:
    """The settings that differ between two records and that ``train`` can set, without those that the job has."""
    fixed = arguments(job)
    (options, words), (bad_options, bad_words) = _typed(good), _typed(bad)
    settings, bad_settings = _mapping(good, "settings"), _mapping(bad, "settings")
    before, after = arguments(words), arguments(bad_words)
    keys = _merged(settings, bad_settings)
    sources: tuple[tuple[str, Iterable[str], Mapping[str, Any], Mapping[str, Any]], ...] = (
        ("argument", [name for name in _merged(before, after) if name not in {"program", *keys}], before, after),
        ("setting", keys if {"settings"} <= good.keys() & bad.keys() else (), settings, bad_settings),
        ("option", _merged(options, bad_options), options, bad_options),
        ("variable", *_both(good, bad, "variables")),
    )
    found = [
        Setting(kind, name, one.get(name), other.get(name)) for kind, names, one, other in sources for name in names
    ]
    if good.get("prefix") and bad.get("prefix"):
        found.append(Setting("release", "release", good["prefix"], bad["prefix"]))
    found += node_settings(_tuple(good.get("nodes")), _tuple(bad.get("nodes")))
    kept = [each for each in found if each.good != each.bad and not _is_fixed(each, fixed)]
    untested = {each.label: why for each in kept if (why := _why_untested(each))}
    return Space(tuple(each for each in kept if not _why_untested(each)), fixed, good, bad, untested)


def _why_untested(setting: Setting) -> str:
    """Why a setting cannot be set; "" if it can."""
    if HIDDEN in f"{setting.good} {setting.bad}":
        return "records have no secrets"
    if setting.kind == "setting" and setting.bad is None:
        return "train cannot remove a key of a configuration"
    if setting.kind == "setting" and "." in setting.name:
        return "it is a part of a value"
    return ""


def _is_fixed(setting: Setting, job: Mapping[str, object]) -> bool:
    """Whether a setting is the same in every round: the job has it, or it cannot be a cause."""
    bare = setting.name.lstrip("-").replace("-", "_")
    is_output = setting.kind in {"argument", "setting"} and bare in _OUTPUTS
    return is_output or setting.name in job or (setting.kind == "option" and setting.name in _FOLLOWING)


def outputs(mixture: Mixture) -> tuple[str, ...]:
    """The arguments by which every round writes into an absolute folder, which other runs may use."""
    found = arguments(mixture.words)
    return tuple(
        name
        for name, words in found.items()
        if name.lstrip("-").replace("-", "_") in _OUTPUTS and value_of(words).startswith("/")
    )


def node_settings(good: Sequence[str], bad: Sequence[str]) -> list[Setting]:
    """The settings of the nodes: of as many nodes, each one that is replaced by another; else all together."""
    if len(good) != len(bad):
        return [Setting("nodes", "nodes", tuple(good), tuple(bad))]
    pairs = _pairs(good, bad)
    found = [Setting("nodes", f"{_NODE}{one}", (one,), (other,)) for one, other in pairs.items()]
    if [pairs.get(name, name) for name in good] != list(bad):
        found.append(Setting("nodes", _ORDER, tuple(good), tuple(bad)))
    return found


def mixed_nodes(good: Sequence[str], bad: Sequence[str], chosen: Collection[str]) -> tuple[str, ...]:
    """The nodes of the good run with the chosen settings of the bad one."""
    if len(good) != len(bad):
        return tuple(bad if "nodes" in chosen else good)
    pairs = _pairs(good, bad)
    nodes = [pairs[name] if f"{_NODE}{name}" in chosen else name for name in good]
    if _ORDER in chosen:
        nodes.sort(key=lambda name: bad.index(pairs.get(name, name)))
    return tuple(nodes)


def _pairs(good: Sequence[str], bad: Sequence[str]) -> dict[str, str]:
    """By each node that is only in the good run, the one of the bad run in its place."""
    return dict(
        zip((name for name in good if name not in bad), (name for name in bad if name not in good), strict=True)
    )


def _typed(record: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The options and words of ``train``; ``-m MODULE`` is an option."""
    words = _tuple(record.get("argv"))
    options: dict[str, Any] = {name: _tuple(value) for name, value in _mapping(record, "options").items()}
    if words[:1] == ("-m",):
        options["-m"], words = words[1:2], words[2:]
    return options, words


def _both(
    good: Mapping[str, Any], bad: Mapping[str, Any], key: str
) -> tuple[list[str], Mapping[str, Any], Mapping[str, Any]]:
    one, other = _mapping(good, key), _mapping(bad, key)
    return _merged(one, other), one, other


def _merged(good: Mapping[str, Any], bad: Mapping[str, Any]) -> list[str]:
    """The names of both in the order of the good one; a name of the bad one alone follows the name before it there."""
    names = list(good)
    place = 0  # behind the name before
    for name in bad:
        if name not in good:
            names.insert(place, name)
        place = names.index(name) + 1
    return names


def _mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def _tuple(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def command(found: Space, chosen: Collection[int], inventory: Mapping[str, str], *, alone: bool) -> str:
    """The command that starts a mixture.

    Args:
        found: the settings.
        chosen: the places of those with the bad run's values.
        inventory: the inventory's variables.
        alone: there is no inventory, so the node and the release are this machine's.
    """
    mixture = found.mixture(chosen)
    parts = ["clusterctl", "train"]
    if mixture.nodes and not alone:
        parts += ["--limit", ",".join(mixture.nodes)]
    for name, values in mixture.options.items():
        parts += [word for value in values for word in (name, value)] if values else [name]
    for name, value in mixture.variables.items():
        if inventory.get(name) != value:
            parts += ["--env", name if value == HIDDEN else f"{name}={value}"]
    switched = any(each.kind == "release" for each in found.settings) and not alone
    before = f"clusterctl rollback --to {PurePosixPath(mixture.prefix).name} && " if switched else ""
    return before + shlex.join([*parts, "--", *mixture.words])


# --- the search -------------------------------------------------------------------------------------


class Ask(NamedTuple):
    """A round of the search: the places of the settings that have the bad run's values.

    ``again``: it repeats an earlier round, to see whether the result is the same.
    """

    chosen: frozenset[int]
    again: bool = False


@dataclass(frozen=True)
class Conclusion:
    """What the search found.

    Attributes:
        cause: the places of the settings that are the cause together; empty if there is none.
        sure: the result was the same when it was repeated.
        why: what the search found, in a sentence.
    """

    cause: tuple[int, ...]
    sure: bool
    why: str


Search = Generator[Ask, Verdict, Conclusion]


def search(count: int) -> Search:
    """Find the settings that are the cause. Yields rounds, and receives their verdicts.

    The first round has no setting of the bad run, the second one all of them. Then a binary search over the first N
    settings finds one whose value turns a good round into a bad one. If it is not bad alone, the search continues among
    those before it. The last rounds repeat the good and the bad result, and try everything but the cause.

    Args:
        count: the number of settings.
    """
    known: dict[frozenset[int], Verdict] = {}

    def ask(chosen: Iterable[int]) -> Generator[Ask, Verdict, Verdict]:
        key = frozenset(chosen)
        if key not in known:
            known[key] = yield Ask(key)
        return known[key]

    if (yield from ask(())) != "good":
        return Conclusion((), False, "the job is not good with the settings of the good run either")
    if not count or (yield from ask(range(count))) != "bad":
        why = "the job is not bad with all settings of the bad run that train can set"
        return Conclusion((), False, f"{why}; the cause is another difference, or needs a longer job")
    kept: list[int] = []
    left = list(range(count))
    while not kept or (yield from ask(kept)) != "bad":
        if len(kept) == CAUSES:
            return Conclusion(tuple(sorted(kept)), False, f"more than {CAUSES} settings are the cause together")
        if not left:
            return Conclusion((), False, "rounds with the same settings had different results")
        place = yield from _first_bad(kept, left, ask)
        kept.append(left[place])
        left = left[:place]
    for each in tuple(kept):
        fewer = [one for one in kept if one != each]
        if fewer and (yield from ask(fewer)) == "bad":
            kept = fewer
    return (yield from _confirmed(tuple(sorted(kept)), count, known))


def _first_bad(
    kept: Sequence[int], left: Sequence[int], ask: Callable[[Iterable[int]], Generator[Ask, Verdict, Verdict]]
) -> Generator[Ask, Verdict, int]:
    """The place in ``left`` of a setting that turns a good round into a bad one; all of ``left`` is bad."""
    low, high = 0, len(left)
    while high - low > 1:
        middle = (low + high) // 2
        if (yield from ask((*kept, *left[:middle]))) == "bad":
            high = middle
        else:
            low = middle
    return high - 1


def _confirmed(cause: tuple[int, ...], count: int, known: Mapping[frozenset[int], Verdict]) -> Search:
    """Repeat the good and the bad result, and try everything but the cause."""
    good = yield Ask(frozenset(), again=True)
    bad = yield Ask(frozenset(cause), again=True)
    if (good, bad) != ("good", "bad"):
        return Conclusion(cause, False, "a repeated round had another result: the job is not the same every time")
    unclear = sum(each == "unclear" for each in known.values())
    doubt = f"; {unclear} rounds could not be judged, and were taken as good" if unclear else ""
    alone = "one setting is the cause" if len(cause) == 1 else f"{len(cause)} settings are the cause together"
    others = frozenset(range(count)) - set(cause)
    if others and (known[others] if others in known else (yield Ask(others))) == "bad":
        alone += "; without it, the others are bad too: there is a second cause"
    return Conclusion(cause, not unclear, alone + doubt)


def usual_rounds(count: int) -> int:
    """The most rounds if one setting is the cause."""
    return 2 + _halvings(count) + (1 if count > 1 else 0) + 3 if count else 1


def most_rounds(count: int) -> int:
    """The most rounds of a search."""
    causes = min(CAUSES, count)
    return 2 + causes * (_halvings(count) + 2) + 3 if count else 1


def _halvings(count: int) -> int:
    return math.ceil(math.log2(count)) if count > 1 else 0


# --- the judge --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A finished round: whether the job failed, and the value of ``--metric``; None if its log does not have it."""

    failed: bool
    value: float | None = None


def judge(round_: Measured, good: Measured | None, bad: Measured | None, *, measures: bool) -> Verdict:
    """The verdict on a round.

    Args:
        round_: the round.
        good: the first round, with the settings of the good run; None: it is the first round.
        bad: the second round, with those of the bad run; None: there is none yet.
        measures: whether a value decides; else it is whether the job failed.
    """
    if round_.failed:
        return "bad"
    if not measures:
        return "good"
    if round_.value is None or not math.isfinite(round_.value):
        return "unclear"
    if good is None:
        return "good"
    other = bad or round_
    limit = threshold(good, other)
    if limit is None:  # the bad run fails, so there is no value between
        return "good"
    if abs((other.value or 0.0) - (good.value or 0.0)) < NEAR * max(abs(good.value or 0.0), abs(other.value or 0.0)):
        return "good"
    return "bad" if (round_.value > limit) == ((other.value or 0.0) > limit) else "good"


def threshold(good: Measured, bad: Measured) -> float | None:
    """Halfway between the values of the good and the bad settings; None if one of them has no value."""
    return None if good.value is None or bad.value is None or bad.failed else (good.value + bad.value) / 2
