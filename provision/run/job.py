"""What is to be run: a LLaMA-Factory config, a script or a module, and which launcher starts it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.masking import secret_option

Kind = Literal["config", "script", "module"]
LAUNCHERS = ("llamafactory", "torchrun", "deepspeed", "accelerate")
_CONFIG = (".yaml", ".yml")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Replaced:
    """Something that was typed and is clusterctl's to decide.

    Attributes:
        said: as it was typed.
        value: the typed value; None for a flag.
        by: what takes its place, a key of ``provision/launchers/_replaced.py``.
    """

    said: str
    value: str | None
    by: str


@dataclass(frozen=True)
class Job:
    """What the user gave.

    Attributes:
        kind: what ``target`` is.
        target: the config or script as the user wrote it, or the module's name.
        args: for the script or module; for a config, ``KEY=VALUE`` that replace what it says.
        launcher: its name, or ``auto``.
        launcher_args: options that the launcher itself is given.
        code: the folder that travels; None: the script's own.
        accelerate_config: the file that ``accelerate config`` has written.
        env: variables that were typed before the command.
        nodes: how many were typed; None: not said.
        per_node: processes to start on each node; None: one for each GPU.
        include: by node name the GPUs that were typed, all for an empty tuple; nothing: every node.
        exclude: by node name the GPUs that are not to be used; an empty tuple: the node itself is not.
        local_rank: the script wants ``--local-rank N``, as ``torch.distributed.launch`` gives it.
        resume_arg: what tells the script to go on from ``{checkpoint}``.
        output: the folder in which the script keeps its checkpoints, as the script is told it.
        total: processes of all nodes together, as accelerate counts them; None: not typed.
        notices: what the user should know about the command that was typed.
        replaced: what clusterctl decides in place of the command that was typed.
        typed: by field the option that gave it, for messages.
    """

    kind: Kind = "config"
    target: str = ""
    args: tuple[str, ...] = ()
    launcher: str = "auto"
    launcher_args: tuple[str, ...] = ()
    code: Path | None = None
    accelerate_config: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    nodes: int | None = None
    per_node: int | None = None
    include: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    exclude: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    local_rank: bool = False
    resume_arg: str | None = None
    output: str | None = None
    total: int | None = None
    notices: tuple[str, ...] = ()
    replaced: tuple[Replaced, ...] = ()
    typed: Mapping[str, str] = field(default_factory=dict)


def from_words(words: Sequence[str], *, module: str | None = None, **options: Any) -> Job:
    """The job that a command line means.

    Args:
        words: what came after the options: ``sft.yaml``, ``train.py --lr 1e-5``, or a launcher's own command as
            people type it, ``torchrun --nproc_per_node 8 train.py``. With ``module`` only its arguments.
        module: the name after ``-m``.
        options: fields of the ``Job``. Those that are None leave what was typed as it is.

    Raises:
        UsageError: it means nothing, or what cannot be done.
    """
    from provision.run import job_typed  # noqa: PLC0415 - it builds on this file

    given = {name: value for name, value in options.items() if value is not None}
    if module is not None:
        job = of_module(module, words)
    elif not words:
        raise UsageError(
            "nothing to run",
            hint="clusterctl train CONFIG.yaml; clusterctl train SCRIPT.py; clusterctl train -m MODULE",
        )
    else:
        job = job_typed.parse(words) or of_target(words[0], words[1:])
    if given.get("launcher") == "auto" and job.launcher != "auto":
        del given["launcher"]
    job = _overridden(job, given)
    choose(job)
    secret = secret_option(job.args) if job.kind != "config" else None  # a config's travel in its file
    if secret is not None:
        raise UsageError(
            f"{secret}: every user of a node can read a command's arguments in the list of processes (ps)",
            hint="read it from the environment in the script, such as HF_TOKEN: export it here and give --env HF_TOKEN",
        )
    if job.per_node is not None and job.per_node < 1:
        raise UsageError(f"{job.per_node} processes on a node: at least one is needed", hint="--gpus-per-node 1")
    return job


def _overridden(job: Job, options: Mapping[str, Any]) -> Job:
    """The job with clusterctl's own options, which win over those that were typed behind ``--``."""
    notices = list(job.notices)
    names = {"per_node": "--gpus-per-node", "launcher": "--launcher", "accelerate_config": "--accelerate-config"}
    for field_, option in names.items():
        typed, given = getattr(job, field_), options.get(field_)
        if given is None or typed in (None, "auto", given):
            continue
        said = job.typed.get(field_, str(typed))
        if field_ == "launcher" and job.launcher_args:
            raise UsageError(
                f"--launcher {given} and {typed} {' '.join(job.launcher_args)}: {given} may not have these options",
                hint=f"leave --launcher out, or the options of {typed}",
            )
        notices.append(f"{said}: replaced by {option} {given}")
    if job.total is not None and options.get("per_node") is not None:
        notices.append(f"{job.typed['total']}: replaced by --gpus-per-node {options['per_node']}")
        job = replace(job, total=None)
    return replace(job, **options, notices=tuple(notices))


def of_target(target: str, args: Sequence[str]) -> Job:
    """The job of a file.

    Raises:
        UsageError: a file that cannot be run.
    """
    suffix = Path(target).suffix.lower()
    if suffix in _CONFIG:
        return Job("config", target, tuple(args))
    if suffix == ".py" or (suffix == "" and is_file(Path(target))):
        return Job("script", target, tuple(args))
    if suffix == ".json":
        raise UsageError(
            f"{target}: LLaMA-Factory's own reader of JSON configs is broken (0.9.5)", hint="save it as YAML"
        )
    if suffix in (".sh", ".bash"):
        raise UsageError(
            f"{target} is a shell script",
            hint="give the command that is in it: clusterctl train -- torchrun … (its ranks are replaced)",
        )
    hint = "clusterctl train CONFIG.yaml, SCRIPT.py or -m MODULE"
    if _MODULE.fullmatch(target) and not is_file(Path(target)):
        hint = f"a module is given as -m {target}; otherwise: {hint}"
    raise UsageError(f"{shown(target)} is neither a YAML file nor a Python script", hint=hint)


def is_file(path: Path) -> bool:
    """Whether a file is there; a name that no file can have is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or with a NUL
        return False


def of_module(name: str, args: Sequence[str]) -> Job:
    """The job of a module.

    Raises:
        UsageError: no module can have that name.
    """
    if not _MODULE.fullmatch(name):
        raise UsageError(f"{shown(name)} is not the name of a module", hint="as in: clusterctl train -m package.train")
    return Job("module", name, tuple(args))


def choose(job: Job) -> str:
    """The launcher for a job: what was said, else what it looks like.

    Raises:
        UsageError: there is no such launcher, or it cannot start this.
    """
    if job.launcher == "auto":
        if job.kind == "config":
            return "llamafactory"
        if job.accelerate_config is not None:
            return "accelerate"
        return "deepspeed" if any(_is_deepspeeds(word) for word in job.args) else "torchrun"
    if job.launcher not in LAUNCHERS:
        raise UsageError(f"there is no launcher {job.launcher}", hint=f"--launcher {' | '.join(('auto', *LAUNCHERS))}")
    if (job.launcher == "llamafactory") != (job.kind == "config"):
        what = "a LLaMA-Factory config" if job.kind == "config" else f"a {job.kind}"
        can = "only llamafactory starts one" if job.kind == "config" else "llamafactory starts configs only"
        raise UsageError(f"--launcher {job.launcher}: {job.target} is {what}; {can}", hint="leave --launcher out")
    if job.accelerate_config is not None and job.launcher != "accelerate":
        raise UsageError(f"--accelerate-config: {job.launcher} does not read it", hint="--launcher accelerate")
    return job.launcher


def _is_deepspeeds(word: str) -> bool:
    return word.partition("=")[0] in ("--deepspeed", "--deepspeed_config")
