"""Commands as people type them (``torchrun …``, ``python -m torch.distributed.launch …``), as jobs.

What clusterctl decides itself is replaced, which a notice says with the value used; what cannot be kept is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.masking import mask_words
from provision.run.job import Job, Replaced, of_module, of_target
from provision.run.job_options import ACCELERATE, DEEPSPEED, TORCHRUN, VARIABLES, Options

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.ASCII)
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_PYTHON_FLAGS = ("-u", "-B", "-O", "-s")
_USE_ENV = "--use-env"
_UNCOUNTED = {"nodes": "nodes", "per_node": "processes", "total": "processes"}  # for `gpu`, `auto` and -1
_MODULES = {  # python -m
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
    "accelerate.commands.launch": "accelerate launch",
    "accelerate.commands.accelerate_cli": "accelerate",
    "llamafactory.cli": "llamafactory-cli",
}


def parse(words: Sequence[str]) -> Job | None:
    """The job that a typed command means; None when the first word is no command that is known.

    Raises:
        UsageError: a command that clusterctl cannot keep.
    """
    env: dict[str, str] = {}
    rest = list(words)
    if rest and rest[0] == "env":
        rest = rest[1:]
    while rest and _ASSIGNMENT.match(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        env[name] = value
    if not rest:
        raise UsageError(
            f"{shown(' '.join(mask_words(words)))}: variables and no command", hint="… -- NAME=VALUE torchrun SCRIPT.py"
        )
    job = _command(rest[0].rpartition("/")[2], rest[1:])
    if job is None and env:
        job = of_target(rest[0], rest[1:])
    return _with_variables(job, env) if job else None


def _with_variables(job: Job, env: Mapping[str, str]) -> Job:
    """The job with what was typed before the command; ``NNODES=2`` and its like mean what they mean to a launcher."""
    fields: dict[str, Any] = {}
    typed, replaced = dict(job.typed), list(job.replaced)
    meanings = {name: by for name in env if (by := _meaning(name))}
    for name, by in meanings.items():
        said, value = f"{name}={shown(env[name])}", env[name]
        if by not in ("nodes", "per_node"):
            replaced.append(Replaced(said, value, by))
        elif (number := _number(said, value)) is None:
            replaced.append(Replaced(said, value, _UNCOUNTED[by]))
        elif getattr(job, by) not in (None, number):
            raise UsageError(f"{said} and {job.typed[by]} contradict each other", hint="give one of them")
        else:
            fields[by] = number
            typed.setdefault(by, said)
    kept = {name: value for name, value in env.items() if name not in meanings}
    return replace(job, env={**kept, **job.env}, typed=typed, replaced=tuple(replaced), **fields)


def _meaning(variable: str) -> str:
    """What a variable decides, a field of the job or a key of what replaces it; "" for any other variable.

    torchrun reads each of its options from ``PET_NAME`` as well.
    """
    option = variable.removeprefix("PET_").lower() if variable.startswith("PET_") else ""
    by = VARIABLES.get(variable) or TORCHRUN.ours.get(option) or TORCHRUN.taken.get(option) or ""
    return "" if by in ("module", "use_env") else by


def _command(name: str, rest: list[str]) -> Job | None:
    parsers: Mapping[str, Callable[[list[str]], Job]] = {
        "torchrun": lambda words: _launched("torchrun", TORCHRUN, words),
        "torch.distributed.launch": _legacy,
        "deepspeed": lambda words: _launched("deepspeed", DEEPSPEED, words),
        "ds": lambda words: _launched("deepspeed", DEEPSPEED, words),
        "accelerate": _accelerate,
        "accelerate launch": lambda words: _launched("accelerate", ACCELERATE, words),
        "accelerate-launch": lambda words: _launched("accelerate", ACCELERATE, words),
        "llamafactory-cli": _llamafactory,
        "lmf": _llamafactory,
    }
    if name in parsers:
        return parsers[name](rest)
    if _PYTHON.fullmatch(name):
        return _python(rest)
    if name in ("mpirun", "mpiexec", "srun", "pdsh", "ssh", "bash", "sh", "sudo", "nohup"):
        raise UsageError(f"{name} cannot be run on the nodes", hint="give the command that it is to start")
    return None


def _python(rest: list[str]) -> Job:
    while rest and rest[0] in _PYTHON_FLAGS:
        rest = rest[1:]
    if len(rest) >= 2 and rest[0] == "-m":
        if rest[1] in _MODULES:
            job = _command(_MODULES[rest[1]], rest[2:])
            assert job is not None
            return job
        return of_module(rest[1], rest[2:])
    if not rest or rest[0].startswith("-"):
        what = f"python {rest[0]}" if rest else "python alone"
        raise UsageError(f"{what} cannot be run on the nodes", hint="put the code into a SCRIPT.py")
    return of_target(rest[0], rest[1:])


def _llamafactory(rest: list[str]) -> Job:
    if len(rest) < 2 or rest[0] != "train" or rest[1].startswith("-"):
        raise UsageError(
            f"llamafactory-cli {' '.join(rest[:1])}: only `train CONFIG.yaml` runs on several nodes",
            hint="clusterctl train CONFIG.yaml",
        )
    return replace(of_target(rest[1], rest[2:]), launcher="llamafactory")


def _accelerate(rest: list[str]) -> Job:
    if rest[:1] != ["launch"]:
        raise UsageError(
            f"accelerate {' '.join(rest[:1])}: only `launch` runs on several nodes", hint="accelerate launch SCRIPT.py"
        )
    return _launched("accelerate", ACCELERATE, rest[1:])


def _legacy(rest: list[str]) -> Job:
    """``torch.distributed.launch``: as torchrun, but without ``--use-env`` the script gets ``--local-rank N``."""
    job = _launched("torchrun", TORCHRUN, rest)
    kept = tuple(word for word in job.launcher_args if word != _USE_ENV)
    return replace(job, launcher_args=kept, local_rank=_USE_ENV not in job.launcher_args)


def _launched(launcher: str, options: Options, words: list[str]) -> Job:
    """The job of ``LAUNCHER [OPTIONS] SCRIPT [ARGS]``."""
    given = _Given(launcher)
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        typed, name, value = _option(launcher, options, rest)
        said = f"{launcher} {typed}" if value is None else f"{launcher} {typed} {value}"
        if name in options.refused:
            raise UsageError(f"{shown(said)}: cannot be kept", hint=options.refused[name])
        if name in options.ours:
            given.replaced.append(Replaced(shown(said), value, options.ours[name]))
        elif name in options.taken:
            given.take(options.taken[name], said, value)
        else:
            given.kept += [typed] if value is None else [typed, value]
    if rest[:1] == ["--"]:
        rest = rest[1:]
    if not rest:
        raise UsageError(f"{launcher}: no script was given", hint=f"{launcher} … SCRIPT.py")
    return given.job(rest)


@dataclass
class _Given:
    """What a launcher's options say."""

    launcher: str
    kept: list[str] = field(default_factory=list)
    replaced: list[Replaced] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    typed: dict[str, str] = field(default_factory=dict)
    module: bool = False

    def take(self, key: str, said: str, value: str | None) -> None:
        """Read an option that says which nodes, how many processes, or what is started."""
        self.typed[key] = shown(said)
        match key:
            case "nodes" | "per_node" | "total":
                self.fields.pop(key, None)  # an option that is given twice means what it says last
                number = _number(said, value)
                if number is None:
                    self.replaced.append(Replaced(shown(said), None, _UNCOUNTED[key]))
                else:
                    self.fields[key] = number
            case "include" | "exclude":
                self.fields[key] = slots(said, value or "")
            case "gpu_ids" if value != "all":
                self.fields["env"] = {"CUDA_VISIBLE_DEVICES": value or ""}
            case "config_file":
                self.fields["accelerate_config"] = Path(value or "")
            case "use_env":
                self.kept.append(_USE_ENV)
            case "module":
                self.module = True

    def job(self, rest: list[str]) -> Job:
        """The job of the script or module, with its arguments."""
        if "total" in self.fields and "nodes" in self.fields:
            self._share(self.fields.pop("total"), self.fields["nodes"])
        job = of_module(rest[0], rest[1:]) if self.module else _script(rest, self.kept)
        made = replace(job, launcher=self.launcher, launcher_args=tuple(self.kept), replaced=tuple(self.replaced))
        return replace(made, typed={**self.typed, "launcher": self.launcher}, **self.fields)

    def _share(self, total: int, nodes: int) -> None:
        """Of accelerate, which counts the processes of all machines together."""
        said = self.typed["total"]
        if total % nodes:
            raise UsageError(
                f"{said} cannot be shared by {nodes} machines equally", hint="give --gpus-per-node N instead"
            )
        self.fields["per_node"] = total // nodes
        self.typed["per_node"] = said


def _script(rest: list[str], kept: Iterable[str]) -> Job:
    if {"--no-python", "--no_python"} & set(kept):  # anything that can be executed
        return Job("script", rest[0], tuple(rest[1:]))
    job = of_target(rest[0], rest[1:])
    if job.kind == "config":
        raise UsageError(f"{shown(rest[0])} is a YAML file, not a script", hint=f"clusterctl train {rest[0]}")
    return job


def _option(launcher: str, options: Options, rest: list[str]) -> tuple[str, str, str | None]:
    """Takes an option off ``rest``: as it was typed, its name, its value."""
    word, has, value = rest.pop(0).partition("=")
    name = word[2:].replace("-", "_") if word.startswith("--") else options.short.get(word[1:], "")
    if name in options.flags:
        return word, name, None
    if name not in options.values:
        close = difflib.get_close_matches(name, options.flags | options.values, n=1)
        meant = f"; did you mean --{close[0]}?" if close else ""
        raise UsageError(
            f"{launcher} has no option {shown(word)}{meant}",
            hint="options of the script stand behind the script's name",
        )
    if has:
        return word, name, value
    if not rest:
        raise UsageError(f"{launcher} {word}: a value is missing", hint=f"{launcher} {word} VALUE … SCRIPT.py")
    return word, name, rest.pop(0)


def _number(said: str, value: str | None) -> int | None:
    """A number that was typed; None for what torchrun finds out by itself (``gpu``, ``auto``), and for -1."""
    if value in ("gpu", "auto", "cpu", "-1"):
        return None
    if value is not None and re.fullmatch(r"0*[1-9][0-9]{0,8}", value):
        return int(value)
    if value is not None and re.fullmatch(r"[0-9]+:[0-9]+", value):
        raise UsageError(f"{shown(said)}: a run has a fixed number of nodes", hint="clusterctl train --nodes N")
    raise UsageError(f"{shown(said)}: not a number of nodes or processes", hint="a whole number from 1 on, such as 8")


def slots(said: str, text: str) -> dict[str, tuple[str, ...]]:
    """DeepSpeed's ``NAME[:SLOT[,SLOT …]][@NAME …]``: by node name its GPUs, none for all of them.

    Raises:
        UsageError: it is written otherwise.
    """
    found: dict[str, tuple[str, ...]] = {}
    for part in text.split("@"):
        match = re.fullmatch(r"([^:\s]+)(?::(\d+(?:,\d+)*))?", part)
        if match is None or match[1] in found:
            raise UsageError(f"{shown(said)}: {part!r} is not NODE or NODE:GPU,GPU", hint="as in gpu01@gpu02:0,1")
        found[match[1]] = tuple(dict.fromkeys((match[2] or "").split(","))) if match[2] else ()
    return found
