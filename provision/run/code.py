"""Collects the files that a job needs: the folder of a script or module, without ignored and generated files.

The folder becomes ``job/`` on the nodes, and the processes start in it. So a relative path in the arguments means the
same on the nodes as in that folder here.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import os
import posixpath
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from provision.env.source import editable
from provision.errors import UsageError
from provision.inventory.document import shown
from provision.run.config import TRAINER_LOG, config_files
from provision.run.config_text import load_either
from provision.run.files import LIMIT, WORK, Entry, FileCollector, RunFiles, sources
from provision.run.ignored import Unsent, choose_files, find_ignored, include_files, list_unsent
from provision.run.job import Job
from provision.run.named import named_paths
from provision.run.outputs import output_of
from provision.run.resume_args import derive
from provision.run.script_source import Source, script_files
from trainer.words import last, read

HOOKS = "hooks"  # in the run's folder: modules that Python loads automatically
_RECORD = "run.json"  # marks a folder of runs/, which has the logs of another run
_CONFIGURATIONS = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg")
# Options that name a file to read, such as --deepspeed and --config_file; and options that name a file to write.
_READS = re.compile(r"(^|_)(deepspeed|config|config_file|config_path|cfg|hparams)$")
_WRITES = re.compile(
    r"(^|_)(out|output|save|log|dump|result|results|report|write|metrics|export|dest|trace|stats)(_|$)"
)


def pack(
    job: Job, *, generated: Mapping[str, bytes] | None = None, limit: int = LIMIT, any_key: bool = False
) -> RunFiles:
    """All files that a job needs.

    Args:
        job: the job.
        generated: files that a config names and that clusterctl generates.
        limit: the most bytes to send.
        any_key: accept a config's keys that look misspelled.

    Raises:
        UsageError: a config that cannot be used, a file that is missing, more than ``limit`` bytes.
    """
    if job.kind == "config":
        config = Path(job.target)
        files = config_files(config, overrides=job.args, generated=generated, limit=limit, any_key=any_key)
    else:
        files = _code(job, limit)
    if job.send and (job.kind == "config" or is_own_trainer(job)):
        raise UsageError(
            "--include goes with a script or a module: of a config, the files that it names are sent",
            hint="name the file in the config, by a path relative to it",
        )
    hook = importlib.resources.files("trainer") / "hooks" / "sitecustomize.py"
    texts = {**files.texts, f"{HOOKS}/sitecustomize.py": hook.read_bytes()}
    return dataclasses.replace(files, texts=texts)


def _code(job: Job, limit: int) -> RunFiles:
    if is_own_trainer(job):
        return _own_trainer(job, limit)
    folder, name, notices = _script(job) if job.kind == "script" else _module(job)
    source = Source.read(script_files(job.kind, job.target, folder), folder)
    texts: dict[str, bytes] = {}
    entries: tuple[Entry, ...] = ()
    unsent: tuple[Unsent, ...] = ()
    if folder is None:
        if job.send:
            raise UsageError(
                f"--include {shown(job.send[0])}: this run sends no files, its program is on the nodes",
                hint="--code DIR names the folder to send",
            )
        texts[f"{WORK}/.clusterctl"] = b"This run sent no files: its program is on the node.\n"
    else:
        _refuse_misplaced(job, folder)
        collector, skipped = _folder_files(folder)
        more, unsent = _ignored_files(job, folder, name, source, collector, limit)
        notices += [*skipped, *more]
        entries = collector.pack(limit)
    there, unclear = files_named(job, folder)
    notices += unclear
    output = output_of(job, folder, source)
    if output:
        output = posixpath.normpath(posixpath.join(WORK, output))
    return RunFiles(
        config=Path(job.target),
        config_name=name,
        texts=texts,
        entries=entries,
        notices=tuple(notices),
        progress=posixpath.join(output, TRAINER_LOG) if output else None,  # a script may write one too
        output=output,
        there=there,
        source=source,
        resuming=derive(source),
        unsent=unsent,
    )


def _script(job: Job) -> tuple[Path | None, str, list[str]]:
    """The folder to send, the script's name in it, and notices."""
    script = Path(job.target)
    if not script.exists():
        if script.is_absolute():
            return job.code, job.target, [f"{script} is not on this machine: the run uses the file on the nodes"]
        raise UsageError(f"{script} does not exist", hint="for a script on the nodes, give its absolute path")
    if not script.is_file():
        raise UsageError(f"{script} is not a file", hint="clusterctl train SCRIPT.py")
    folder = (job.code or script.parent).resolve()
    path = script.parent.resolve() / script.name
    if not path.is_relative_to(folder):
        raise UsageError(f"{script} is not in the folder of --code, {job.code}", hint=f"--code {script.parent}")
    return folder, path.relative_to(folder).as_posix(), []


def _module(job: Job) -> tuple[Path | None, str, list[str]]:
    """As ``_script``. A module in this folder is sent with it, because ``python -m`` looks here first."""
    top = job.target.partition(".")[0]
    if job.code is None and not _is_here(top):
        return None, job.target, [f"{top} is not in this folder: the run uses the module of the packed environment"]
    return (job.code or Path.cwd()).resolve(), job.target, []


def _folder_files(folder: Path) -> tuple[FileCollector, list[str]]:
    """The files of a folder to send, and notices about skipped ones."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", hint="--code DIR")
    if folder == Path.home().resolve() or folder in Path.home().resolve().parents:
        raise UsageError(
            f"{folder} is a home folder or contains one, and every run would send all of it",
            hint="put the script into a project folder, or name the folder to send: --code DIR",
        )
    found = editable.list_checkout(folder, WORK, folder / ".no-environment")
    collector = FileCollector(folder, frozenset({f"{WORK}/.clusterctl"}))
    keys = []
    for one in found.tree.sources:
        if one.type == "dir":
            continue
        path = Path(one.file)
        if any((above / _RECORD).is_file() for above in _above(path, folder)):
            continue
        if _is_private_key(path):
            keys.append(path.name)
        elif _is_output(path):
            continue
        elif one.type != "link" or path.exists():
            collector.add(path, str(folder))
    notices = list(found.notices)
    if keys:
        notices.append(f"{folder}: private keys are not sent: {', '.join(keys[:3])}")
    return collector, notices


def _ignored_files(
    job: Job, folder: Path, name: str, source: Source, collector: FileCollector, limit: int
) -> tuple[list[str], tuple[Unsent, ...]]:
    """Add the git-ignored files that the job needs, or that ``--include`` names.

    Returns:
        Notices, and what stays behind.
    """
    ignored = find_ignored(folder)
    before = {arcname.removeprefix(f"{WORK}/") for arcname in collector.names}
    chosen = include_files(ignored, job.send, before)
    script = name if job.kind == "script" else _module_file(folder, name)
    found = choose_files(ignored, named_paths(job, folder, script, source), limit)
    notices = list(found.notices)
    for path, why in {**dict.fromkeys(chosen, "--include"), **found.files}.items():
        if _is_private_key(folder / path):
            notices.append(f"{path}: a private key is not sent")
        elif not _is_output(folder / path):
            collector.add(folder / path, f"{why}: {path.partition('/')[0]}")
    unsent = list_unsent(ignored, (arcname.removeprefix(f"{WORK}/") for arcname in collector.names))
    if ignored.cut:
        notices.append(f"{folder}: git ignores too many files to look at all of them; --include PATTERN may miss some")
    return notices, unsent


def _module_file(folder: Path, name: str) -> str | None:
    """The file of a module in a folder; None if it is not there."""
    path = name.replace(".", "/")
    return next((each for each in (f"{path}.py", f"{path}/__main__.py") if (folder / each).is_file()), None)


def _above(path: Path, folder: Path) -> Iterator[Path]:
    for above in path.parents:
        if above == folder:
            return
        yield above


def _is_output(path: Path) -> bool:
    """Whether this command writes the file, as in ``clusterctl train … >train.log``: it grows while it is read."""
    with suppress(OSError):
        found = path.stat()
        for number in (1, 2):
            with suppress(OSError):
                if os.path.samestat(found, os.fstat(number)):
                    return True
    return False


def _is_private_key(path: Path) -> bool:
    """Whether a file is an ssh key. ssh accepts only keys that no other user can read."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
            return False
        with path.open("rb") as file:
            return b"PRIVATE KEY" in file.readline(100)
    except OSError:
        return False


def _refuse_misplaced(job: Job, folder: Path) -> None:
    """Refuse an argument that names a file of the current folder which is not sent."""
    here = Path.cwd().resolve()
    for value in (value for option in job.options for value in option.values):
        if not value or value.startswith(("/", "~", "-")) or not ("/" in value or Path(value).suffix):
            continue
        if exists(here / value) and not exists(folder / value):
            where = "code" if job.code else "script"
            raise UsageError(
                f"{value} is in {here}, but not in the folder that is sent with the {where}, {folder}",
                hint="processes start in the folder that is sent: give --code . and the path relative to it",
            )


def files_named(job: Job, folder: Path | None) -> tuple[tuple[str, ...], list[str]]:
    """The absolute paths that configuration options name, and notices about missing files.

    Args:
        job: a script or module with its arguments.
        folder: the folder to send; None: nothing is sent.

    Raises:
        UsageError: an option names a file that will not be on the nodes.
    """
    there = []
    notices = []
    for option in job.options:
        value = option.values[0] if option.values else ""
        suffix = Path(value).suffix.lower()
        if not option.typed.startswith("-") or suffix not in _CONFIGURATIONS or "://" in value:
            continue
        if value.startswith("/"):
            there += [posixpath.normpath(value)] if _READS.search(option.name) else []
            continue
        if folder is not None and exists(folder / value):
            continue
        where = f"in {folder}, the folder that is sent" if folder else "on the nodes: this run sends no files"
        if _READS.search(option.name):
            raise UsageError(
                f"{option.typed} {shown(value)}: there is no such file {where}",
                hint="correct the name, or send the file's folder: --code DIR; an absolute path is on the nodes",
            )
        if not _WRITES.search(option.name):
            notices.append(f"{option.typed} {shown(value)}: there is no such file {where}")
    return tuple(dict.fromkeys(there)), notices


def exists(path: Path) -> bool:
    """Whether a path exists; False for a name that no file can have."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a path, or a NUL in it
        return False


# --- clusterctl's own trainer ----------------------------------------------------------------------
# The packed environment needs only torch, not clusterctl: the trainer's source is sent. The current folder may have
# bundles and models, so only the files that the trainer's arguments name are sent from it.

PACKAGE = "trainer"
_PARTS = ("lm", "vlm", "ds_config")  # the trainers, and the source of its DeepSpeed configuration
_FILES = ("__init__.py", "bounds.py", "words.py")  # imported by all
_OWN_READS = (
    "data",
    "eval_data",
    "init",
    "vision",
    "image_folder",
    "deepspeed_config",
)  # their options whose files must exist
_OUT_DEFAULT = "out"  # their default of --out


def is_own_trainer(job: Job) -> bool:
    """Whether a job is clusterctl's trainer. A package of that name in this folder has precedence."""
    top, _, rest = job.target.partition(".")
    ours = job.kind == "module" and top == PACKAGE and rest.partition(".")[0] in _PARTS
    return ours and job.code is None and not _is_here(top)


def _is_here(top: str) -> bool:
    """Whether ``python -m`` would find a module or package of this name in this folder."""
    here = Path.cwd()
    return (here / f"{top}.py").is_file() or (here / top).is_dir()


def _own_trainer(job: Job, limit: int) -> RunFiles:
    """The trainer's source, and the files and folders of this folder that its arguments or its ``--config`` name.

    Raises:
        UsageError: a configuration that cannot be read, a missing file, more than ``limit`` bytes.
    """
    here = Path.cwd().resolve()
    collector = FileCollector(here, frozenset({f"{WORK}/{PACKAGE}"}))
    configured = read_options(job.args)
    for word in _words(job, configured):
        for name in _paths(word):
            path = here / name
            if name and not Path(name).is_absolute() and ".." not in Path(name).parts and exists(path):
                collector.add(path, name)
    _refuse_missing(job, configured, here)
    program = {name: data for part in _PARTS for name, data in sources(part).items()}
    program |= {name: (importlib.resources.files(PACKAGE) / name).read_bytes() for name in _FILES}
    output = job.output or "".join(last(job.options, "out")[:1]) or str(configured.get("out") or _OUT_DEFAULT)
    out = posixpath.normpath(posixpath.join(WORK, output))
    return RunFiles(
        config=Path(job.target),
        config_name=job.target,
        texts={f"{WORK}/{PACKAGE}/{name}": data for name, data in program.items()},
        entries=collector.pack(limit),
        progress=posixpath.join(out, TRAINER_LOG),
        output=out,
    )


def _refuse_missing(job: Job, configured: Mapping[str, Any], here: Path) -> None:
    """Refuse an option of our trainers that names a missing folder or file."""
    if job.target not in (f"{PACKAGE}.lm", f"{PACKAGE}.vlm"):
        return
    for option in _OWN_READS:
        values = last(job.options, option) or configured.get(option, ())
        for value in values if isinstance(values, (list, tuple)) else (values,):
            if not isinstance(value, str) or not value or value == "scratch" or value.startswith("/"):
                continue
            if ".." in Path(value).parts or not any(name and exists(here / name) for name in _paths(value)):
                raise UsageError(
                    f"--{option.replace('_', '-')} {shown(value)}: there is no such file or folder in {here}",
                    hint="files at a relative path are sent with the run; an absolute path is on the nodes",
                )


def _words(job: Job, configured: Mapping[str, Any]) -> Iterator[str]:
    """Words that may be paths: of the arguments, and the values of the file that ``--config`` names."""
    for option in job.options:
        yield from option.values
    for value in configured.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str):
                yield each


def _paths(word: str) -> tuple[str, ...]:
    """A word as a path, and as a data folder with its weight, ``DIR:0.3``."""
    folder, has, weight = word.rpartition(":")
    return (word, folder) if has and weight.replace(".", "", 1).isdigit() else (word,)


def read_options(args: Sequence[str]) -> Mapping[str, Any]:
    """The options in the file that ``--config`` names."""
    named = last(read(args), "config")
    if not named or not named[0]:
        return {}
    options = load_either(Path(named[0]), hint="--config FILE of options")
    return options if isinstance(options, dict) else {}
