"""What travels with clusterctl's own trainer, ``-m trainer.gpt``: its source, and what its arguments name here.

The packed environment needs torch only, not clusterctl. The folder in which the command is typed does not travel as
with a module of the user's: beside the data it may hold bundles and models.
"""

from __future__ import annotations

import importlib.resources
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.run.config import TRAINER_LOG
from provision.run.job import Job
from provision.run.luggage import WORK, Luggage, Travel
from provision.run.sources import sources
from provision.run.yaml_text import load_either

PACKAGE = "trainer"
_PARTS = ("gpt", "ds_config")  # the trainer, and what it takes its DeepSpeed configuration from
_FILES = ("__init__.py", "bounds.py")  # what both of them import
_READS = ("data", "init", "deepspeed-config")  # trainer.gpt's options that name what must be there
_OUT = "out"  # trainer.gpt's default of --out


def is_ours(job: Job) -> bool:
    """Whether a job is the trainer that comes with clusterctl; a package of that name in this folder goes first."""
    top, _, rest = job.target.partition(".")
    ours = job.kind == "module" and top == PACKAGE and rest.partition(".")[0] in _PARTS
    return ours and job.code is None and not lies_here(top)


def lies_here(top: str) -> bool:
    """Whether ``python -m`` would find a module or package of this name in this folder."""
    here = Path.cwd()
    return (here / f"{top}.py").is_file() or (here / top).is_dir()


def pack(job: Job, limit: int) -> Travel:
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
            if name and not Path(name).is_absolute() and ".." not in Path(name).parts and _is_there(path):
                luggage.add(path, name)
    _refuse_missing(job, configured, here)
    program = {name: data for part in _PARTS for name, data in sources(part).items()}
    program |= {name: (importlib.resources.files(PACKAGE) / name).read_bytes() for name in _FILES}
    told = job.output or _told(job.args, "out") or str(configured.get("out") or _OUT)
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
    for option in _READS:
        values = _all_told(job.args, option) or configured.get(option.replace("-", "_"), ())
        for value in values if isinstance(values, (list, tuple)) else (values,):
            if not isinstance(value, str) or not value or value == "scratch" or value.startswith("/"):
                continue
            if ".." in Path(value).parts or not any(name and _is_there(here / name) for name in _paths(value)):
                raise UsageError(
                    f"--{option} {shown(value)}: there is no such file or folder in {here}",
                    hint="a relative path travels with the run; an absolute one is a path on the nodes",
                )


def _all_told(args: Sequence[str], name: str) -> list[str]:
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


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no name of a file: too long, or with a NUL
        return False


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


def _told(args: Sequence[str], name: str) -> str:
    """The value of an option of the trainer's."""
    for word, after in zip(args, (*args, "")[1:], strict=True):
        key, has, value = word.partition("=")
        if key == f"--{name}":
            return value if has else after
    return ""


def _configured(args: Sequence[str]) -> Mapping[str, Any]:
    """The options in the file that ``--config`` names."""
    name = _told(args, "config")
    if not name:
        return {}
    said = load_either(Path(name), hint="--config FILE of options")
    return said if isinstance(said, dict) else {}
