"""The DeepSpeed configurations that a job names, checked against its program and arguments before the start.

``trainer.ds_config.check`` judges a file; this module knows where a job has its files and its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from provision.errors import ListedError
from provision.model import Node
from provision.run import WORK, Job, RunFiles, needs
from provision.run.config_text import read
from provision.run.fewer_nodes import Obstacle, Zero, obstacles, zero_of, zero_of_accelerate
from provision.run.program import Program, is_deepspeed, read_program
from provision.run.script_source import Source, script_files
from trainer.ds_config.check import ACCELERATE, ERROR, LIMIT, TRAINER, UNKNOWN, Context, Finding, check, parse
from trainer.ds_config.check.arguments import DEFAULTS, typed
from trainer.ds_config.check.reading import read as read_json

_OPTIONS = re.compile(r"(^|_)(deepspeed|deepspeed_config|deepspeed_config_file|ds_config|ds_config_file|ds_cfg)$")
_ANY_RANKS = ("trainer.lm", "trainer.vlm")  # resume on any number of ranks, with DeepSpeed too
_LISTED = 40


@dataclass(frozen=True)
class Checked:
    """A DeepSpeed configuration and its findings.

    Attributes:
        file: the file, as messages name it.
        findings: in the order of its lines.
        data: its content; empty if it cannot be read.
    """

    file: str
    findings: tuple[Finding, ...]
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lines(self) -> tuple[str, ...]:
        """Each finding as a line."""
        return tuple(each.text(self.file) for each in self.findings)


def check_job(
    job: Job, files: RunFiles, *, world: int | None, env: Mapping[str, str]
) -> tuple[list[Checked], RunFiles]:
    """Check every DeepSpeed configuration that a job names and that is on this machine.

    Args:
        job: the job.
        files: its files, with a script's source, and the settings of a LLaMA-Factory or accelerate configuration.
        world: the number of processes, if known.
        env: the run's environment variables.

    Returns:
        The findings; and the files with what the job needs in the release and on the nodes.
    """
    folder, program = _folder(job), read_program(files.source)
    context = replace(_context(job, files.settings, program), world=world)
    checked = []
    for name in _files(job, files, folder, program):
        made = files.texts.get(f"{WORK}/{name}")
        checked.append(check_file(folder / name, name, context) if made is None else _checked(name, made, context))
    values = {**(context.arguments or {}), **(parse(job.args) if job.kind != "config" else {})}
    configs = {each.file: each.data for each in checked}
    found = needs.needed(values, configs, factory=job.kind == "config", env=env)
    return checked, replace(files, needs=found)


def fewer_nodes(job: Job, files: RunFiles, checked: Sequence[Checked]) -> list[Obstacle]:
    """Why a job cannot continue on fewer nodes than it starts on.

    Args:
        job: the job.
        files: its files.
        checked: its DeepSpeed configurations that are on this machine.
    """
    if job.kind == "module" and job.target in _ANY_RANKS:
        return []
    folder, program = _folder(job), read_program(files.source)
    context = _context(job, files.settings, program)
    found = {each.file: zero_of(each.file, each.data) for each in checked}
    for value in _named(job, files, folder, program):
        if isinstance(value, str) and value and value not in found:
            found[value] = Zero(value)
        elif isinstance(value, Mapping):
            found[job.target] = zero_of(f"{job.target}: deepspeed", value)
    if job.launcher == "accelerate" and not found:
        zero = zero_of_accelerate(str(job.launcher_config or "accelerate"), files.settings, parse(job.launcher_args))
        found |= {} if zero is None else {zero.where: zero}
    arguments = context.arguments or {}
    return list(obstacles(found, trainer=context.program == TRAINER, arguments=arguments))


def check_file(path: Path, name: str, context: Context) -> Checked:
    """Check one file.

    Args:
        path: the file.
        name: its name in messages.
        context: the training.
    """
    try:
        with path.open("rb") as file:
            data = file.read(4 * LIMIT + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return Checked(name, (Finding(ERROR, "the file cannot be read", why, "correct its name"),))
    return _checked(name, data, context)


def _checked(name: str, data: bytes, context: Context) -> Checked:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return Checked(name, (Finding(ERROR, "the file is UTF-16", "", f"iconv -f UTF-16 -t UTF-8 {name} >NEW"),))
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        fix = f"iconv -f GBK -t UTF-8 {name} >NEW, with its real encoding"
        return Checked(name, (Finding(ERROR, "the file is not UTF-8", "json.load fails", fix, line, 1),))
    content = read_json(text).data
    return Checked(name, tuple(check(text, context)), content if isinstance(content, dict) else {})


def context_of(job: Job, settings: Mapping[str, Any]) -> Context:
    """What a job tells about the training."""
    folder = _folder(job)
    found = script_files(job.kind, job.target, folder) if job.target and job.kind != "config" else []
    return _context(job, settings, read_program(Source.read(found, folder)))


def settings_of(job: Job) -> Mapping[str, Any]:
    """The values of a LLaMA-Factory config, with those typed after ``--``.

    Raises:
        UsageError: it cannot be read.
    """
    return read(Path(job.target), job.args).data if job.kind == "config" else {}


def world_of(job: Job, nodes: Sequence[Node]) -> int | None:
    """The number of processes of a job, if the command line or the inventory has it; None without."""
    if job.total is not None:
        return job.total
    if job.include or job.exclude:
        return None
    counts = [job.per_node or node.gpus for node in nodes]
    return sum(each for each in counts if each) if counts and all(counts) else None


def refuse(checked: Sequence[Checked], *, forced: bool, again: str) -> list[str]:
    """The findings that are only warnings, all of them with ``forced``.

    Raises:
        ListedError: a finding prevents the run.
    """
    bad = [each for each in checked if any(one.level == ERROR for one in each.findings)]
    if bad and not forced:
        problems = [line for each in bad for line in each.lines][:_LISTED]
        names = ", ".join(each.file for each in bad)
        raise ListedError(f"{names}: the DeepSpeed configuration prevents the run; nothing was started",
                          problems=problems, hint=f"correct it; to start anyway: {again}")  # fmt: skip
    shown = (one.text(each.file, shows_level=one.level == ERROR) for each in checked for one in each.findings)
    return list(shown)[:_LISTED]  # the caller warns, so a warning does not need its level


def _folder(job: Job) -> Path:
    """The folder in which a job's paths start."""
    return job.code or (Path() if job.kind == "module" else Path(job.target).parent)


def _context(job: Job, settings: Mapping[str, Any], program: Program | None) -> Context:
    if job.kind == "config":
        given = {name: typed(name, value) for name, value in settings.items()}
        return Context(TRAINER, named=job.target, arguments=given, yaml=True)
    arguments = parse(job.args)
    looks = _looks_like_trainer(job, arguments)
    if program is None:  # on the nodes, or a module of the environment: its arguments tell
        return Context(TRAINER if looks else UNKNOWN, named=job.target, arguments=arguments)
    kind = program.kind
    if kind == UNKNOWN:
        kind = TRAINER if looks else ACCELERATE if job.launcher == "accelerate" else UNKNOWN
    unknown = set(program.unknown)
    if kind == TRAINER and program.given is not None:
        arguments = {**arguments, **program.given}
    elif not program.parses and program.has_trainer:
        unknown.add("*")
    names = set(DEFAULTS) if "*" in unknown else unknown
    hidden = names - arguments.keys() if program.given is None else names - set(program.given)
    return Context(kind, program.reads_json, job.target, arguments, frozenset(hidden))


def _looks_like_trainer(job: Job, arguments: Mapping[str, Any]) -> bool:
    """Whether arguments are those of transformers' Trainer: its names, and ``--deepspeed FILE``."""
    known = {"per_device_train_batch_size", "per_device_eval_batch_size", "output_dir", "num_train_epochs"}
    names_file = isinstance(arguments.get("deepspeed"), str) or job.launcher_config is not None
    return names_file and len(known & arguments.keys()) > 0


def _files(job: Job, files: RunFiles, folder: Path, program: Program | None) -> Iterator[str]:
    """The configurations that are sent from this machine, relative to the folder."""
    named = _named(job, files, folder, program)
    for name in dict.fromkeys(each for each in named if isinstance(each, str)):
        if not name.startswith("/") and (f"{WORK}/{name}" in files.texts or _is_file(folder / name)):
            yield name


def _named(job: Job, files: RunFiles, folder: Path, program: Program | None) -> list[Any]:
    """The configurations that a job names: paths, or a configuration itself; None and others where there is none."""
    if job.kind == "config":
        return [files.settings.get("deepspeed")]
    arguments = {**parse(job.launcher_args), **parse(job.args), **((program and program.given) or {})}
    named = [value for name, value in arguments.items() if _OPTIONS.search(name)]
    inner = files.settings.get("deepspeed_config")
    named += [inner.get("deepspeed_config_file")] if isinstance(inner, dict) else []
    written = program.files if program else ()
    return named + [name for name in written if _is_file(folder / name) and is_deepspeed(folder / name)]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
