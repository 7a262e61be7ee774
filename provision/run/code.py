"""What travels with a job: a script's or module's folder, without what git ignores and what is no code.

The folder becomes ``job/``, in which the processes start. So a relative path among the arguments means the same on the
nodes as in that folder here.
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
from provision.run.config import TRAINER_LOG, travel
from provision.run.config_text import load_either
from provision.run.files import LIMIT, WORK, Entry, Luggage, Travel, sources
from provision.run.job import Job

HOOKS = "hooks"  # folder in the run's folder, with what Python loads by itself
_RECORD = "run.json"  # in a folder of runs/: logs and environments of other runs
_CONFIGURATIONS = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg")
# Options that name a file to read, such as --deepspeed and --config_file; and those that name one to write.
_READS = re.compile(r"(^|_)(deepspeed|config|config_file|config_path|cfg|hparams)$")
_WRITES = re.compile(
    r"(^|_)(out|output|save|log|dump|result|results|report|write|metrics|export|dest|trace|stats)(_|$)"
)
_OUTPUT = ("--output_dir", "--output-dir")  # of transformers' TrainingArguments


def pack(job: Job, *, made: Mapping[str, bytes] | None = None, limit: int = LIMIT, any_key: bool = False) -> Travel:
    """Everything that goes with a job; ``made`` are files that a config names and that are made here.

    ``any_key`` takes a config's keys that look like misspelled ones.

    Raises:
        UsageError: a config that cannot be used, a file that is missing, more than ``limit`` bytes.
    """
    config = Path(job.target)
    is_config = job.kind == "config"
    if is_config:
        luggage = travel(config, overrides=job.args, made=made, limit=limit, any_key=any_key)
    else:
        luggage = _code(job, limit)
    hook = importlib.resources.files("trainer") / "hooks" / "sitecustomize.py"
    texts = {**luggage.texts, f"{HOOKS}/sitecustomize.py": hook.read_bytes()}
    return dataclasses.replace(luggage, texts=texts)


def _code(job: Job, limit: int) -> Travel:
    if is_own_trainer(job):
        return _own_trainer(job, limit)
    folder, name, notices = _script(job) if job.kind == "script" else _module(job)
    texts: dict[str, bytes] = {}
    entries: tuple[Entry, ...] = ()
    if folder is None:
        texts[f"{WORK}/.clusterctl"] = b"Nothing travelled with this run: what it runs lies on the node.\n"
    else:
        _misplaced(job, folder)
        luggage, left = _gathered(folder)
        notices += left
        entries = luggage.pack(limit)
    there, unclear = files_named(job, folder)
    notices += unclear
    output = _output(job)
    if output:
        output = posixpath.normpath(posixpath.join(WORK, output))
    return Travel(
        config=Path(job.target),
        config_name=name,
        texts=texts,
        entries=entries,
        notices=tuple(notices),
        progress=posixpath.join(output, TRAINER_LOG) if output else None,  # a script may write one too
        output=output,
        there=there,
    )


def _script(job: Job) -> tuple[Path | None, str, list[str]]:
    """The folder that travels, the script's name in it, and notices."""
    script = Path(job.target)
    if not script.exists():
        if script.is_absolute():
            return job.code, job.target, [f"{script} is not on this machine: the nodes' own is run"]
        raise UsageError(f"there is no {script}", hint="a script on the nodes is given by its absolute path")
    if not script.is_file():
        raise UsageError(f"{script} is not a file", hint="clusterctl train SCRIPT.py")
    folder = (job.code or script.parent).resolve()
    path = script.parent.resolve() / script.name
    if not path.is_relative_to(folder):
        raise UsageError(f"{script} does not lie in {job.code}, which is to travel", hint=f"--code {script.parent}")
    return folder, path.relative_to(folder).as_posix(), []


def _module(job: Job) -> tuple[Path | None, str, list[str]]:
    """As ``_script``. A module that lies here travels with this folder, as ``python -m`` would find it here first."""
    top = job.target.partition(".")[0]
    if job.code is None and not _is_here(top):
        return None, job.target, [f"{top} is not in this folder: the packed environment's own is run"]
    return (job.code or Path.cwd()).resolve(), job.target, []


def _gathered(folder: Path) -> tuple[Luggage, list[str]]:
    """The files of a folder that travel, and notices of what does not."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", hint="--code DIR")
    if folder == Path.home().resolve() or folder in Path.home().resolve().parents:
        raise UsageError(
            f"{folder} is no project's folder, and all of it would travel",
            hint="put the script into a folder of its own, or name the one that travels: --code DIR",
        )
    found = editable.list_checkout(folder, WORK, folder / ".no-environment")
    luggage = Luggage(folder, frozenset({f"{WORK}/.clusterctl"}))
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
            luggage.add(path, str(folder))
    notices = list(found.notices)
    if keys:
        notices.append(f"{folder}: private keys do not travel: {', '.join(keys[:3])}")
    return luggage, notices


def _above(path: Path, folder: Path) -> Iterator[Path]:
    for above in path.parents:
        if above == folder:
            return
        yield above


def _is_output(path: Path) -> bool:
    """Whether it is what this command itself writes, as in ``clusterctl train … >train.log``: it grows meanwhile."""
    with suppress(OSError):
        found = path.stat()
        for number in (1, 2):
            with suppress(OSError):
                if os.path.samestat(found, os.fstat(number)):
                    return True
    return False


def _is_private_key(path: Path) -> bool:
    """An ssh key: ssh reads only those that nobody else may."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
            return False
        with path.open("rb") as file:
            return b"PRIVATE KEY" in file.readline(100)
    except OSError:
        return False


def _misplaced(job: Job, folder: Path) -> None:
    """Refuse an argument that names a file here which will not be there on the nodes."""
    here = Path.cwd().resolve()
    for word in (*job.launcher_args, *job.args):
        value = word.partition("=")[2] if word.startswith("-") else word
        if not value or value.startswith(("/", "~", "-")) or not ("/" in value or Path(value).suffix):
            continue
        if exists(here / value) and not exists(folder / value):
            where = "code" if job.code else "script"
            raise UsageError(
                f"{value} is in {here}, but not in the folder that travels with the {where}, {folder}",
                hint="the processes start in the folder that travels: --code . and the path from there",
            )


def files_named(job: Job, folder: Path | None) -> tuple[tuple[str, ...], list[str]]:
    """The absolute paths of the nodes that options for configurations name, and notices of files that are not here.

    Args:
        job: a script or module with its arguments.
        folder: the one that travels; None: nothing does.

    Raises:
        UsageError: such an option names a file that will not be on the nodes.
    """
    there = []
    notices = []
    words = (*job.launcher_args, *job.args)
    for word, after in zip(words, (*words, "")[1:], strict=True):
        option, has, value = word.partition("=")
        value = value if has else after
        suffix = Path(value).suffix.lower()
        if not option.startswith("-") or value.startswith("-") or suffix not in _CONFIGURATIONS or "://" in value:
            continue
        name = option.lstrip("-").replace("-", "_").lower()
        if value.startswith("/"):
            there += [posixpath.normpath(value)] if _READS.search(name) else []
            continue
        if folder is not None and exists(folder / value):
            continue
        where = f"in {folder}, the folder that travels" if folder else "on the nodes: nothing travels with this run"
        if _READS.search(name):
            raise UsageError(
                f"{option} {shown(value)}: there is no such file {where}",
                hint="correct the name, or take the file's folder along: --code DIR; an absolute path is on the nodes",
            )
        if not _WRITES.search(name):
            notices.append(f"{option} {shown(value)}: there is no such file {where}")
    return tuple(dict.fromkeys(there)), notices


def exists(path: Path) -> bool:
    """Whether a path is there; a name that no file can have is not."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a path, or a NUL in it
        return False


def _output(job: Job) -> str | None:
    """Where the script keeps its checkpoints: what the user said, else the argument of transformers' trainers."""
    if job.output is not None:
        return job.output
    for word, after in zip(job.args, (*job.args, "")[1:], strict=True):
        name, has, value = word.partition("=")
        if name in _OUTPUT:
            return (value if has else after) or None
    return None


# --- clusterctl's own trainer ----------------------------------------------------------------------
# The packed environment needs torch only, not clusterctl: the trainer's source travels. The current folder may hold
# bundles and models: only what the trainer's arguments name travels from there.

PACKAGE = "trainer"
_PARTS = ("gpt", "ds_config")  # the trainer, and what it takes its DeepSpeed configuration from
_FILES = ("__init__.py", "bounds.py")  # what both of them import
_OWN_READS = ("data", "init", "deepspeed-config")  # trainer.gpt's options that name what must be there
_OUT_DEFAULT = "out"  # trainer.gpt's default of --out


def is_own_trainer(job: Job) -> bool:
    """Whether a job is the trainer that comes with clusterctl; a package of that name in this folder goes first."""
    top, _, rest = job.target.partition(".")
    ours = job.kind == "module" and top == PACKAGE and rest.partition(".")[0] in _PARTS
    return ours and job.code is None and not _is_here(top)


def _is_here(top: str) -> bool:
    """Whether ``python -m`` would find a module or package of this name in this folder."""
    here = Path.cwd()
    return (here / f"{top}.py").is_file() or (here / top).is_dir()


def _own_trainer(job: Job, limit: int) -> Travel:
    """The trainer's source, and the files and folders that its arguments or its ``--config`` name in this folder.

    Raises:
        UsageError: a configuration that cannot be read, something that is missing, more than ``limit`` bytes.
    """
    here = Path.cwd().resolve()
    luggage = Luggage(here, frozenset({f"{WORK}/{PACKAGE}"}))
    configured = _configured(job.args)
    for word in _words(job.args, configured):
        for name in _paths(word):
            path = here / name
            if name and not Path(name).is_absolute() and ".." not in Path(name).parts and exists(path):
                luggage.add(path, name)
    _refuse_missing(job, configured, here)
    program = {name: data for part in _PARTS for name, data in sources(part).items()}
    program |= {name: (importlib.resources.files(PACKAGE) / name).read_bytes() for name in _FILES}
    told = job.output or _value(job.args, "out") or str(configured.get("out") or _OUT_DEFAULT)
    out = posixpath.normpath(posixpath.join(WORK, told))
    return Travel(
        config=Path(job.target),
        config_name=job.target,
        texts={f"{WORK}/{PACKAGE}/{name}": data for name, data in program.items()},
        entries=luggage.pack(limit),
        progress=posixpath.join(out, TRAINER_LOG),
        output=out,
    )


def _refuse_missing(job: Job, configured: Mapping[str, Any], here: Path) -> None:
    """Refuse an option of ``trainer.gpt`` that names a folder or file which is not in this folder."""
    if job.target != f"{PACKAGE}.gpt":
        return
    for option in _OWN_READS:
        values = _values(job.args, option) or configured.get(option.replace("-", "_"), ())
        for value in values if isinstance(values, (list, tuple)) else (values,):
            if not isinstance(value, str) or not value or value == "scratch" or value.startswith("/"):
                continue
            if ".." in Path(value).parts or not any(name and exists(here / name) for name in _paths(value)):
                raise UsageError(
                    f"--{option} {shown(value)}: there is no such file or folder in {here}",
                    hint="a relative path travels with the run; an absolute one is a path on the nodes",
                )


def _values(args: Sequence[str], name: str) -> list[str]:
    """The values of an option of the trainer's, which takes one or more."""
    found: list[str] = []
    taking = False
    for word in args:
        if word.startswith("--"):
            key, has, value = word.partition("=")
            taking = key == f"--{name}" and not has
            found += [value] if key == f"--{name}" and has else []
        elif taking:
            found.append(word)
    return found


def _words(args: Sequence[str], configured: Mapping[str, Any]) -> Iterator[str]:
    """What may name a path: the arguments, and the values of the file that ``--config`` names."""
    for word in args:
        yield word.partition("=")[2] if word.startswith("-") else word
    for value in configured.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, str):
                yield each


def _paths(word: str) -> tuple[str, ...]:
    """A word as it stands, and as a folder of data with its weight, ``DIR:0.3``."""
    folder, has, weight = word.rpartition(":")
    return (word, folder) if has and weight.replace(".", "", 1).isdigit() else (word,)


def _value(args: Sequence[str], name: str) -> str:
    """The value of an option of the trainer's."""
    for word, after in zip(args, (*args, "")[1:], strict=True):
        key, has, value = word.partition("=")
        if key == f"--{name}":
            return value if has else after
    return ""


def _configured(args: Sequence[str]) -> Mapping[str, Any]:
    """The options in the file that ``--config`` names."""
    name = _value(args, "config")
    if not name:
        return {}
    said = load_either(Path(name), hint="--config FILE of options")
    return said if isinstance(said, dict) else {}
