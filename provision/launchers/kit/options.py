"""A launcher's options, and the job that a typed command with these options means.

The run uses some options (``used``), clusterctl replaces others (``replaced``) and refuses a few (``refused``). Every
other option goes to the launcher unchanged. Names are written with ``_``; ``-`` means the same.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.run.job import Job, Replaced, of_module, of_target

RESTARTS = "--restarts N restarts from the newest checkpoint"
USE_ENV = "--use-env"
_UNCOUNTED = {"nodes": "nodes", "per_node": "processes", "total": "processes"}  # for `gpu`, `auto` and -1

# Variables that say which process is which, as people type them before a command.
VARIABLES = {
    "NNODES": "nodes",
    "NPROC_PER_NODE": "per_node",
    "NODE_RANK": "rank",
    "RANK": "rank",
    "LOCAL_RANK": "rank",
    "WORLD_SIZE": "processes",
    "LOCAL_WORLD_SIZE": "processes",
    "MASTER_ADDR": "address",
    "MASTER_PORT": "port",
}


@dataclass(frozen=True)
class Options:
    """A launcher's options.

    Attributes:
        flags: options without a value.
        values: options with one.
        short: short names.
        used: options that the run uses, with the field of the job that each sets, or ``module``, ``use_env``,
            ``gpu_ids`` or ``config_file``.
        replaced: options that clusterctl replaces, with the key of the value that it uses (``kit/replaced.py``).
        refused: options that cannot work, with what to do instead.
        files: options that name a file, which must be in the folder that is sent.
        prefix: the prefix of the variables from which the launcher reads its options too; "" for none.
    """

    flags: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()
    short: Mapping[str, str] = field(default_factory=dict)
    used: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    files: frozenset[str] = frozenset()
    prefix: str = ""

    def use(self, name: str) -> Literal["used", "replaced", "refused", "kept"]:
        """How an option is handled."""
        if name in self.refused:
            return "refused"
        return "replaced" if name in self.replaced else "used" if name in self.used else "kept"

    def meaning(self, variable: str) -> str:
        """The field of the job or key of ``kit/replaced.py`` that a variable sets; "" for none."""
        if not self.prefix or not variable.startswith(self.prefix):
            return ""
        option = variable.removeprefix(self.prefix).lower()
        found = self.replaced.get(option) or self.used.get(option) or ""
        return "" if found in ("module", "use_env") else found


def names(words: str) -> frozenset[str]:
    """The names in a text."""
    return frozenset(words.split())


def by_name(values: Mapping[str, str]) -> dict[str, str]:
    """A value for each name in the keys, which have several names each."""
    return {name: value for keys, value in values.items() for name in keys.split()}


def parse_options(launcher: str, options: Options, words: Sequence[str]) -> Job:
    """The job of ``LAUNCHER [OPTIONS] SCRIPT [ARGS]``.

    Raises:
        UsageError: an unknown option, an option that cannot work, or no script.
    """
    typed = _Typed(launcher)
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word, name, value = _take_option(launcher, options, rest)
        text = f"{launcher} {word}" if value is None else f"{launcher} {word} {value}"
        match options.use(name):
            case "refused":
                raise UsageError(f"{shown(text)}: not supported", hint=options.refused[name])
            case "replaced":
                typed.replaced.append(Replaced(shown(text), value, options.replaced[name]))
            case "used":
                typed.use(options.used[name], text, value)
            case "kept":
                typed.kept += [word] if value is None else [word, value]
    if rest[:1] == ["--"]:
        rest = rest[1:]
    if not rest:
        raise UsageError(f"{launcher}: no script", hint=f"{launcher} … SCRIPT.py")
    return typed.job(rest)


@dataclass
class _Typed:
    """The options of one typed command."""

    launcher: str
    kept: list[str] = field(default_factory=list)
    replaced: list[Replaced] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    module: bool = False

    def use(self, key: str, text: str, value: str | None) -> None:
        """Use an option that decides which nodes, how many processes, or what starts."""
        self.texts[key] = shown(text)
        match key:
            case "nodes" | "per_node" | "total":
                self.fields.pop(key, None)  # of an option that is given twice, the last value counts
                number = parse_number(text, value)
                if number is None:
                    self.replaced.append(Replaced(shown(text), None, _UNCOUNTED[key]))
                else:
                    self.fields[key] = number
            case "include" | "exclude":
                self.fields[key] = slots(text, value or "")
            case "gpu_ids" if value != "all":
                self.fields["env"] = {"CUDA_VISIBLE_DEVICES": value or ""}
            case "config_file":
                self.fields["launcher_config"] = Path(value or "")
            case "use_env":
                self.kept.append(USE_ENV)
            case "module":
                self.module = True

    def job(self, rest: list[str]) -> Job:
        """The job of the script or module, with its arguments."""
        if "total" in self.fields and "nodes" in self.fields:
            self._share(self.fields.pop("total"), self.fields["nodes"])
        job = of_module(rest[0], rest[1:]) if self.module else _script(rest, self.kept)
        job = replace(job, launcher=self.launcher, launcher_args=tuple(self.kept), replaced=tuple(self.replaced))
        return replace(job, typed={**self.texts, "launcher": self.launcher}, **self.fields)

    def _share(self, total: int, nodes: int) -> None:
        """Divide the processes of all nodes."""
        text = self.texts["total"]
        if total % nodes:
            raise UsageError(
                f"{text} cannot be divided equally among {nodes} machines", hint="give --gpus-per-node N instead"
            )
        self.fields["per_node"] = total // nodes
        self.texts["per_node"] = text


def _script(rest: list[str], kept: Iterable[str]) -> Job:
    if {"--no-python", "--no_python"} & set(kept):  # any program
        return Job("script", rest[0], tuple(rest[1:]))
    job = of_target(rest[0], rest[1:])
    if job.kind == "config":
        raise UsageError(f"{shown(rest[0])} is a YAML file, not a script", hint=f"clusterctl train {rest[0]}")
    return job


def _take_option(launcher: str, options: Options, rest: list[str]) -> tuple[str, str, str | None]:
    """Takes an option off ``rest``: the word as typed, its name, its value."""
    word, has, value = rest.pop(0).partition("=")
    name = word[2:].replace("-", "_") if word.startswith("--") else options.short.get(word[1:], "")
    if name in options.flags:
        return word, name, None
    if name not in options.values:
        close = difflib.get_close_matches(name, options.flags | options.values, n=1)
        meant = f"; did you mean --{close[0]}?" if close else ""
        raise UsageError(
            f"{launcher} has no option {shown(word)}{meant}",
            hint="options of the script come after the script's name",
        )
    if has:
        return word, name, value
    if not rest:
        raise UsageError(f"{launcher} {word}: a value is missing", hint=f"{launcher} {word} VALUE … SCRIPT.py")
    return word, name, rest.pop(0)


def with_variables(job: Job, env: Mapping[str, str], meanings: Mapping[str, str]) -> Job:
    """The job with the variables that were typed before the command.

    Args:
        job: the job of the command.
        env: the variables.
        meanings: the field of the job or key of ``kit/replaced.py`` that some of them set.

    Raises:
        UsageError: a variable and an option contradict each other.
    """
    fields: dict[str, Any] = {}
    typed, replaced = dict(job.typed), list(job.replaced)
    for name, key in meanings.items():
        text, value = f"{name}={shown(env[name])}", env[name]
        if key not in ("nodes", "per_node"):
            replaced.append(Replaced(text, value, key))
        elif (number := parse_number(text, value)) is None:
            replaced.append(Replaced(text, value, _UNCOUNTED[key]))
        elif getattr(job, key) not in (None, number):
            raise UsageError(f"{text} and {job.typed[key]} contradict each other", hint="give one of them")
        else:
            fields[key] = number
            typed.setdefault(key, text)
    kept = {name: value for name, value in env.items() if name not in meanings}
    return replace(job, env={**kept, **job.env}, typed=typed, replaced=tuple(replaced), **fields)


def with_counts(job: Job, counts: Mapping[str, tuple[int, str]]) -> Job:
    """The job with the numbers of nodes and processes that a wrapper such as ``srun`` gives, each with its text.

    Raises:
        UsageError: such a number and an option contradict each other.
    """
    fields: dict[str, Any] = {}
    typed = dict(job.typed)
    for key, (number, text) in counts.items():
        if getattr(job, key) not in (None, number):
            raise UsageError(f"{text} and {typed.get(key, key)} contradict each other", hint="give one of them")
        fields[key] = number
        typed.setdefault(key, text)
    if "per_node" in fields:
        fields.pop("total", None)
    elif fields.get("total") and (nodes := fields.get("nodes") or job.nodes):
        if fields["total"] % nodes:
            text = typed["total"]
            raise UsageError(f"{text} cannot be divided equally among {nodes} nodes", hint="--gpus-per-node N")
        fields["per_node"] = fields.pop("total") // nodes
        typed["per_node"] = typed["total"]
    return replace(job, typed=typed, **fields)


def parse_number(text: str, value: str | None) -> int | None:
    """A number of nodes or processes; None for what torchrun finds out (``gpu``, ``auto``), and for -1.

    Raises:
        UsageError: it is not a number.
    """
    if value in ("gpu", "auto", "cpu", "-1"):
        return None
    if value is not None and re.fullmatch(r"0*[1-9][0-9]{0,8}", value):
        return int(value)
    if value is not None and re.fullmatch(r"[0-9]+:[0-9]+", value):
        raise UsageError(f"{shown(text)}: a run has a fixed number of nodes", hint="clusterctl train --nodes N")
    raise UsageError(
        f"{shown(text)}: not a number of nodes or processes", hint="give a whole number of at least 1, such as 8"
    )


def slots(text: str, value: str) -> dict[str, tuple[str, ...]]:
    """DeepSpeed's ``NAME[:SLOT[,SLOT …]][@NAME …]``: the GPUs by node name, none for all of them.

    Raises:
        UsageError: the value has another form.
    """
    found: dict[str, tuple[str, ...]] = {}
    for part in value.split("@"):
        match = re.fullmatch(r"([^:\s]+)(?::(\d+(?:,\d+)*))?", part)
        if match is None or match[1] in found:
            raise UsageError(
                f"{shown(text)}: {part!r} is not NODE or NODE:GPU,GPU", hint="for example: gpu01@gpu02:0,1"
            )
        found[match[1]] = tuple(dict.fromkeys((match[2] or "").split(","))) if match[2] else ()
    return found
