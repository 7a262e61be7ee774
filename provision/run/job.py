"""A job: the LLaMA-Factory config, script or module to run, and how the user wants it started."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from provision.errors import UsageError
from provision.inventory.document import shown
from trainer.words import Option, read

Kind = Literal["config", "script", "module"]
_CONFIG = (".yaml", ".yml")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Replaced:
    """A typed option or variable that clusterctl replaces.

    Attributes:
        typed: the text as typed.
        value: the typed value; None for a flag.
        by: the key of the value that replaces it, see ``provision/launchers/kit/replaced.py``.
    """

    typed: str
    value: str | None
    by: str


@dataclass(frozen=True)
class Job:
    """The user's job.

    Attributes:
        kind: the kind of ``target``.
        target: the config or script as the user wrote it, or the module's name.
        args: arguments of the script or module; for a config, ``KEY=VALUE`` that replace its values.
        launcher: its name, or ``auto``.
        launcher_args: options for the launcher itself.
        code: the folder to send; None: the script's folder.
        launcher_config: the launcher's configuration, such as the file that ``accelerate config`` writes.
        env: variables that the user typed before the command.
        nodes: the typed number of nodes; None: not typed.
        per_node: processes to start on each node; None: one for each GPU.
        include: by node name, the typed GPUs, all for an empty tuple; empty: every node.
        exclude: by node name, the GPUs to skip; an empty tuple skips the node.
        local_rank: the script needs ``--local-rank N``, which ``torch.distributed.launch`` passes.
        resume_arg: the script's option to resume from ``{checkpoint}``.
        output: the folder of the script's checkpoints, as the script names it.
        send: patterns of git-ignored files to send too, as in a .gitignore.
        total: processes of all nodes together; None: not typed.
        notices: notices about the typed command.
        replaced: options and variables of the typed command that clusterctl replaces.
        typed: by field, the option that set it, for messages.
    """

    kind: Kind = "config"
    target: str = ""
    args: tuple[str, ...] = ()
    launcher: str = "auto"
    launcher_args: tuple[str, ...] = ()
    code: Path | None = None
    launcher_config: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    nodes: int | None = None
    per_node: int | None = None
    include: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    exclude: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    local_rank: bool = False
    resume_arg: str | None = None
    output: str | None = None
    send: tuple[str, ...] = ()
    total: int | None = None
    notices: tuple[str, ...] = ()
    replaced: tuple[Replaced, ...] = ()
    typed: Mapping[str, str] = field(default_factory=dict)

    @property
    def options(self) -> tuple[Option, ...]:
        """The options of the launcher, then those of the script, with their values."""
        return (*read(self.launcher_args), *read(self.args))


def override(job: Job, options: Mapping[str, Any]) -> Job:
    """The job with clusterctl's options, which have precedence over options typed after ``--``.

    Raises:
        UsageError: another launcher, which may lack the typed options.
    """
    notices = list(job.notices)
    names = {"per_node": "--gpus-per-node", "launcher": "--launcher", "launcher_config": f"--{job.launcher}-config"}
    for field_, option in names.items():
        typed, given = getattr(job, field_), options.get(field_)
        if given is None or typed in (None, "auto", given):
            continue
        text = job.typed.get(field_, str(typed))
        if field_ == "launcher" and job.launcher_args:
            raise UsageError(
                f"--launcher {given} and {typed} {' '.join(job.launcher_args)}: {given} may not have these options",
                hint=f"omit --launcher, or the options of {typed}",
            )
        notices.append(f"{text}: replaced by {option} {given}")
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
        raise UsageError(f"{target}: LLaMA-Factory 0.9.5 cannot read JSON configs", hint="save it as YAML")
    hint = "clusterctl train CONFIG.yaml, SCRIPT.py or -m MODULE"
    if _MODULE.fullmatch(target) and not is_file(Path(target)):
        hint = f"for a module: -m {target}; otherwise: {hint}"
    raise UsageError(f"{shown(target)} is neither a YAML file nor a Python script", hint=hint)


def is_file(path: Path) -> bool:
    """Whether a file exists; False for a name that no file can have."""
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
        raise UsageError(f"{shown(name)} is not a module name", hint="for example: clusterctl train -m package.train")
    return Job("module", name, tuple(args))
