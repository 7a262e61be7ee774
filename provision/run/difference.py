"""What differs between runs, the most likely cause first. Pure: records in, differences out.

``compare``, its bisection and the report use the same function. docs/monitoring.md explains the order of ``KINDS``:
what a check has found, then what people change between two runs, then what changes without them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from provision.inventory import fold
from provision.masking import mask_env, mask_words
from provision.run.environment import LONG, shown


class Kind(NamedTuple):
    """A kind of difference: its title, and why it has its place in the order."""

    id: str
    title: str
    why: str


KINDS = (
    Kind("check", "checks", "the checks before the start found this in one run only"),
    Kind("mixed", "unequal nodes", "the nodes of the last run differ among themselves, and those of the first do not"),
    Kind("argument", "arguments", "arguments and options are what users change most often between two runs"),
    Kind("setting", "configuration", "values of the configuration are changed almost as often"),
    Kind("written", "configuration files", "values of the configuration, as the files of the run have them"),
    Kind("variable", "variables", "variables change NCCL, CUDA and libraries without a change of the program"),
    Kind("file", "files", "another program can behave in any other way"),
    Kind("data", "data", "other data change the loss, rarely the speed"),
    Kind("package", "packages", "another version of a library; those that compute and communicate are first"),
    Kind("release", "release", "another environment; the packages say more if their versions differ"),
    Kind("hardware", "machines", "drivers, kernels and firmware change rarely, and mostly for all nodes"),
    Kind("nodes", "nodes", "other nodes with equal hardware and software rarely behave differently"),
    Kind("follows", "consequences", "clusterctl derives these from the values above"),
)
_SILENT = {"mixed", "written"}  # kinds without a part of the record
RANKS = {kind.id: place for place, kind in enumerate(KINDS)}
# The packages that decide what is computed and communicated; the parts of a name end at an underscore.
_FIRST = (
    *("torch", "nvidia_nccl", "nvidia_cudnn", "nvidia_cublas", "nvidia_cuda", "triton", "deepspeed", "transformers"),
    *("accelerate", "flash_attn", "liger_kernel", "llamafactory", "peft", "trl", "bitsandbytes", "datasets"),
)
_PLANNED = ("argv", "processes", "nnodes", "attempts", "grace", "cwd", "pattern")  # of a node's plan
_OWN = {"MASTER_PORT"}
_VALUES = 5000  # values of a kind
_GROUPS = 6  # groups of nodes in a value
_ID = 8  # letters of a release's name that are no ordinary word
_SENTENCE = 200  # characters of a line
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
_OPTION = re.compile(r"--?[A-Za-z].*", re.DOTALL)
_PAIR = re.compile(r"([A-Za-z_][\w.]*)=.*", re.DOTALL)


@dataclass(frozen=True)
class Description:
    """What is known of a run.

    Attributes:
        run: its id.
        values: by kind and name; a kind that is missing is not known.
        mixed: names of packages and hardware whose values differ among the nodes.
    """

    run: str
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    mixed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Difference:
    """A value that is not the same in all runs; None: the run does not have it."""

    kind: str
    name: str
    values: tuple[str | None, ...]

    @property
    def about(self) -> Kind:
        """The kind with its title and reason."""
        return KINDS[RANKS[self.kind]]


@dataclass(frozen=True)
class Comparison:
    """All differences, the most likely cause first, and by kind the runs for which it is not known."""

    runs: tuple[str, ...]
    differences: tuple[Difference, ...]
    unknown: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def compare(runs: Sequence[Description]) -> Comparison:
    """Compare runs. The first one is the good one, if one is."""
    found: list[Difference] = []
    unknown = {}
    settings = set.intersection(*(set(each.values.get("setting", ())) for each in runs)) if runs else set()
    for kind in KINDS:
        known = [each.values.get(kind.id) for each in runs]
        if without := tuple(each.run for each, values in zip(runs, known, strict=True) if values is None):
            if kind.id not in _SILENT:
                unknown[kind.id] = without
            continue
        for name in dict.fromkeys(name for values in known for name in values or ()):
            if kind.id == "written" and name.partition(": ")[2] in settings:
                continue
            values = tuple((each or {}).get(name) for each in known)
            if len(set(values)) > 1:
                odd = name in runs[-1].mixed and name not in runs[0].mixed
                found.append(Difference("mixed" if odd else kind.id, name, values))
    return Comparison(tuple(each.run for each in runs), tuple(sorted(found, key=_rank)), unknown)


def _rank(each: Difference) -> tuple[int, int]:
    """The place of a difference; equal places keep their order."""
    first = len(_FIRST)
    if each.kind == "package":
        first = next((at for at, name in enumerate(_FIRST) if f"{each.name}_".startswith(f"{name}_")), first)
    return RANKS[each.kind], first


def describe(
    run: str,
    record: Mapping[str, Any],
    *,
    nodes: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
) -> Description:
    """What a run's record says about it. Skips what it does not know: records of older versions have less.

    Args:
        run: its id, which is not a difference where it is a part of a value.
        record: ``run.json``; empty if this machine has none.
        nodes: its nodes, if the record has none.
        files: the values of its configuration files, if they were read from its nodes.
    """
    found: dict[str, Mapping[str, str]] = {}
    for kind, read in _READERS.items():
        values = read(record)
        if values is not None:
            found[kind] = dict(islice(values.items(), _VALUES))
    if files:
        found["written"] = files
    if names := _texts(record.get("nodes")) or list(nodes):
        found["nodes"] = {"nodes": fold(names), "order of the nodes": _order(names)}
    mixed = {
        name for key in ("packages", "hardware") for name, values in _by_name(record.get(key)).items() if values[1:]
    }
    release = (_release(record) or {}).get("release")
    if len(release or "") >= _ID and "follows" in found:
        found["follows"] = {name: text.replace(str(release), "RELEASE") for name, text in found["follows"].items()}
    clean = {
        kind: {name: (text.replace(run, "RUN") if run else text)[:LONG] for name, text in each.items()}
        for kind, each in found.items()
    }
    return Description(run, clean, frozenset(mixed))


def arguments(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The words of a command by their names: ``--lr`` with its values, ``KEY=VALUE``, and words by their position.

    All words together, in their order, are the command again.
    """
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in words:
        key, has, _ = word.partition("=")
        if _OPTION.fullmatch(word):
            name = _free(key, found)
            found[name] = (word,)
            name = "" if has else name
        elif match := _PAIR.fullmatch(word):
            name = ""
            found[_free(match[1], found)] = (word,)
        elif name:
            found[name] += (word,)
        else:
            found[_free("argument" if found else "program", found)] = (word,)
    return found


def value_of(words: Sequence[str]) -> str:
    """An argument's value for messages: of ``--lr 1`` and ``--lr=1`` it is 1; of a flag, that it is set."""
    _, has, value = words[0].partition("=")
    if _OPTION.fullmatch(words[0]) or (has and _PAIR.fullmatch(words[0])):
        return " ".join([value, *words[1:]] if has else words[1:]) or "set"
    return " ".join(words)


def _free(name: str, found: Mapping[str, object]) -> str:
    number = 2
    free = name
    while free in found:
        free, number = f"{name} ({number})", number + 1
    return free


def _arguments(record: Mapping[str, Any]) -> dict[str, str] | None:
    words = record.get("argv")
    if not isinstance(words, list):
        return None
    settings = record.get("settings")
    known = set(settings) if isinstance(settings, dict) else set()
    found = {name: value_of(each) for name, each in arguments(mask_words(_texts(words))).items() if name not in known}
    options = record.get("options")
    if isinstance(options, dict):
        found |= {f"train {name}": " ".join(_texts(each)) or "set" for name, each in options.items() if name != "-m"}
    return found


def _checks(record: Mapping[str, Any]) -> dict[str, str] | None:
    """The failures and warnings of the checks before the start."""
    done = record.get("preflight")
    if not isinstance(done, dict) or not isinstance(done.get("problems"), list):
        return None
    found: dict[str, str] = {}
    for each in done["problems"][:_VALUES]:
        if isinstance(each, dict) and each.get("verdict") in {"FAIL", "WARN"}:
            name = str(each.get("check"))
            text = f"{each['verdict']} on {fold(_texts(each.get('nodes')))}: {each.get('observed')}"
            found[name] = f"{found[name]}; {text}" if name in found else text
    return found


def _values(key: str) -> Any:
    def read(record: Mapping[str, Any]) -> dict[str, str] | None:
        content = record.get(key)
        if not isinstance(content, dict):
            return None
        return {str(name): shown(value) for name, value in islice(content.items(), _VALUES)}

    return read


def _groups(key: str) -> Any:
    def read(record: Mapping[str, Any]) -> dict[str, str] | None:
        if not isinstance(record.get(key), list):
            return None
        return {name: _text(values) for name, values in _by_name(record[key]).items()}

    return read


def _by_name(groups: object) -> dict[str, list[tuple[str, list[str]]]]:
    """By name, each value with the nodes that have it."""
    found: dict[str, dict[str, list[str]]] = {}
    read = [each for each in groups if isinstance(each, dict)] if isinstance(groups, list) else []
    read = [each for each in read if isinstance(each.get("values"), dict)]
    for name in dict.fromkeys(str(name) for each in read for name in each["values"]):
        for each in read:
            text = shown(each["values"].get(name, "none"))
            found.setdefault(name, {}).setdefault(text, []).extend(_texts(each.get("nodes")))
    return {name: list(values.items()) for name, values in found.items()}


def _text(values: Sequence[tuple[str, Sequence[str]]]) -> str:
    """The values of the nodes, the rarest first."""
    if len(values) == 1:
        return values[0][0]
    more = len(values) - _GROUPS
    rarest = sorted(values, key=lambda each: len(each[1]))[:_GROUPS]
    texts = [f"{text} ({fold(nodes)})" for text, nodes in rarest]
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")


def _release(record: Mapping[str, Any]) -> dict[str, str] | None:
    prefix = record.get("prefix")
    return {"release": prefix.rstrip("/").rpartition("/")[2]} if isinstance(prefix, str) else None


def _follows(record: Mapping[str, Any]) -> dict[str, str] | None:
    """The plan of the first node without what the user has set."""
    plans = record.get("plans")
    plan = next(iter(plans.values()), None) if isinstance(plans, dict) else None
    if not isinstance(plan, dict):
        return None
    found = {f"plan.{key}": shown(plan[key]) for key in _PLANNED if plan.get(key) not in (None, "", [])}
    env, own = plan.get("env"), record.get("variables")
    skipped = {*_OWN, *(own if isinstance(own, dict) else ())}
    if isinstance(env, dict):
        found |= {f"env.{name}": shown(value) for name, value in mask_env(env).items() if name not in skipped}
    found |= {key: shown(record[key]) for key in ("launcher", "who") if record.get(key)}
    return found


def _order(names: Sequence[str]) -> str:
    """The ranks of the nodes whose order is not that of their names; "by name" for none."""
    ordered = _by_number(names)
    moved = [f"{name} is rank {rank}" for rank, name in enumerate(names) if ordered[rank] != name]
    more = f" and {len(moved) - _GROUPS} more" if len(moved) > _GROUPS else ""
    return ", ".join(moved[:_GROUPS]) + more if moved else "by name"


def _by_number(names: Sequence[str]) -> list[str]:
    """Sorted names, ``gpu9`` before ``gpu10``."""
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def _texts(values: object) -> list[str]:
    return [str(each) for each in values] if isinstance(values, list | tuple) else []


_READERS: Mapping[str, Any] = {
    "check": _checks,
    "argument": _arguments,
    "setting": _values("settings"),
    "variable": _values("variables"),
    "file": _values("files"),
    "data": _values("data"),
    "package": _groups("packages"),
    "release": _release,
    "hardware": _groups("hardware"),
    "follows": _follows,
}


def outcome(record: Mapping[str, Any]) -> Iterator[str]:
    """How a run ended, in a few words."""
    yield str(record.get("state") or "unknown state")
    if isinstance(steps := record.get("steps"), int):
        yield f"{steps:,} steps"
    losses = record.get("losses")
    if isinstance(losses, list) and losses and isinstance(losses[-1], int | float):
        yield f"last loss {losses[-1]:.6g}"
    if names := _texts(record.get("nodes")):
        yield fold(names)
    why = record.get("why")
    if isinstance(why, dict) and why:
        name, text = next(iter(why.items()))
        yield f"{name}: {error_line(shown(text))}"


def error_line(text: str) -> str:
    """The line of a failure that says most: its last error, else its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in reversed(lines) if _ERROR.match(line)]
    return (errors or lines or [""])[0][:_SENTENCE]
