"""Launchers: pure functions from a ``RunSpec`` to one plan for each node.

Each file of this folder is a launcher, and the file is its registration. It has the names in ``REQUIRED``; ``kit`` has
what launchers share. docs/launchers.md explains the names.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from types import ModuleType
from typing import Any

from provision.errors import ClusterctlError, UsageError
from provision.inventory.document import shown
from provision.launchers.kit.environment import RANKS, SYSTEM_PATH, UNSET, caches, environment, first_environment
from provision.launchers.kit.network import network
from provision.launchers.kit.options import VARIABLES, with_counts, with_variables
from provision.launchers.kit.plans import filled, node_plan, notices, require, resume
from provision.masking import secret_option
from provision.registry import load_module, module_names
from provision.run import LIMIT, Job, Launch, RunFiles, RunSpec, code
from provision.run.job import of_module, of_target, override
from provision.typed import to_slashes, unwrap
from trainer.agent.contract.plan import Plan

__all__ = [
    "DEFAULT",
    "RANKS",
    "REQUIRED",
    "SYSTEM_PATH",
    "UNSET",
    "arranged",
    "caches",
    "choose",
    "config_options",
    "environment",
    "filled",
    "first_environment",
    "from_words",
    "get",
    "launch",
    "names",
    "network",
    "notices",
    "pack",
]

# What a launcher's file defines. It may also define CONFIG, the help of its option --NAME-config FILE, with
# pack(job, files); check(spec), which returns notices; and resume(spec).
REQUIRED = {
    "NAME": str,
    "ABOUT": str,
    "COMMANDS": tuple,
    "KINDS": tuple,
    "REQUIRES": tuple,
    "OPTIONS": object,
    **dict.fromkeys(("suits", "parse", "command"), object),
}
DEFAULT = "torchrun"  # what starts a job that no launcher claims
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_PYTHON_FLAGS = ("-u", "-B", "-O", "-s")


@functools.cache
def names() -> tuple[str, ...]:
    """Every launcher's name, which is its file's."""
    return module_names(__name__)


@functools.cache
def get(name: str) -> ModuleType:
    """The launcher of a name.

    Raises:
        UsageError: there is none.
        ClusterctlError: its file lacks a required name.
    """
    if name not in names():
        raise UsageError(f"unknown launcher {shown(name)}", hint=f"--launcher {' | '.join(('auto', *names()))}")
    module = load_module(__name__, name, "a launcher", REQUIRED)
    if name != module.NAME:
        raise ClusterctlError(f"{module.__file__} is not a launcher: its NAME is {module.NAME}, not {name}")
    return module


def config_options() -> dict[str, str]:
    """The launchers with a configuration file (``--NAME-config FILE``), each with the option's help."""
    return {name: get(name).CONFIG for name in names() if hasattr(get(name), "CONFIG")}


# --- parsing a command line ------------------------------------------------------------------------


def from_words(words: Sequence[str], *, module: str | None = None, **options: Any) -> Job:
    """The job that a command line means.

    Args:
        words: the words after the options: ``sft.yaml``, ``train.py --lr 1e-5``, or a launcher's command such as
            ``torchrun --nproc_per_node 8 train.py``. With ``module``, only its arguments.
        module: the name after ``-m``.
        options: fields of the ``Job``, and ``NAME_config``, a launcher's configuration. None: not given.

    Raises:
        UsageError: nothing to run, or a job that cannot run.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if module is not None:
        job = of_module(module, words)
    elif not words:
        raise UsageError(
            "nothing to run",
            hint="clusterctl train CONFIG.yaml; clusterctl train SCRIPT.py; clusterctl train -m MODULE",
        )
    else:
        job = _typed(words)
    if given.get("launcher") == "auto":
        del given["launcher"]
    for name in config_options():
        if (path := given.pop(f"{name}_config", None)) is not None:
            chosen = given.get("launcher", job.launcher)
            if chosen not in ("auto", name):
                raise UsageError(f"--{name}-config: the launcher {chosen} does not use it", hint=f"--launcher {name}")
            given |= {"launcher": name, "launcher_config": path}
    job = override(job, given)
    choose(job)
    words = job.args if job.kind != "config" else ()  # a configuration's arguments are in its file
    secret = secret_option([*words, *(job.resume_arg or "").split()])
    if secret is not None:
        raise UsageError(
            f"{secret}: every user of a node can read a command's arguments in the list of processes (ps)",
            hint="let the script read it from the environment, such as HF_TOKEN: export it here, give --env HF_TOKEN",
        )
    if job.per_node is not None and job.per_node < 1:
        raise UsageError(f"{job.per_node} processes on a node: it must be at least one", hint="--gpus-per-node 1")
    return job


def choose(job: Job) -> str:
    """The launcher for a job: the named one, else the one that claims the job.

    Raises:
        UsageError: the launcher is unknown, or it cannot start this job.
    """
    if job.launcher == "auto":
        return next((name for name in names() if get(name).suits(job)), DEFAULT)
    kinds = get(job.launcher).KINDS
    if job.kind not in kinds:
        what = "a LLaMA-Factory config" if job.kind == "config" else f"a {job.kind}"
        able = " and ".join(name for name in names() if job.kind in get(name).KINDS)
        starts = "configs only" if kinds == ("config",) else f"only {able} starts one"
        can = f"{job.launcher} starts {starts}" if kinds == ("config",) else starts
        raise UsageError(f"--launcher {job.launcher}: {job.target} is {what}; {can}", hint="omit --launcher")
    return job.launcher


def _typed(words: Sequence[str]) -> Job:
    """The job of a typed command or file, without what is around it.

    Raises:
        UsageError: it is neither, or nothing follows the variables.
    """
    typed = unwrap(words, _is_known, os.environ)
    plain, changed = to_slashes(typed.words, always=typed.windows)
    job = _command(plain) or of_target(plain[0], plain[1:])
    job = replace(job, notices=(*job.notices, *typed.notices, *changed))
    tables = [get(name).OPTIONS for name in names()]
    found = {
        name: VARIABLES.get(name) or next(filter(None, (each.meaning(name) for each in tables)), "")
        for name in typed.env
    }
    job = with_variables(job, typed.env, {name: meaning for name, meaning in found.items() if meaning})
    return with_counts(job, typed.counts)


def _is_known(words: Sequence[str]) -> bool:
    """Whether words are a launcher's command, a Python program, a script or a config."""
    program = words[0].rpartition("/")[2]
    if _PYTHON.fullmatch(program):
        rest = [word for word in words[1:] if word not in _PYTHON_FLAGS]
        return bool(rest) and (not rest[0].startswith("-") or (rest[0] == "-m" and len(rest) > 1))
    suffix = PurePath(words[0].replace("\\", "/")).suffix.lower()
    return _launcher_of(program) is not None or suffix in (".py", ".yaml", ".yml", ".json")


def _command(words: Sequence[str]) -> Job | None:
    """The job of a launcher's command, or of a Python command."""
    program, rest = words[0].rpartition("/")[2], list(words[1:])
    if _PYTHON.fullmatch(program):
        while rest and rest[0] in _PYTHON_FLAGS:
            rest = rest[1:]
        if len(rest) >= 2 and rest[0] == "-m":
            launcher = _launcher_of(f"python -m {rest[1]}")
            command = f"python -m {rest[1]}"
            return get(launcher).parse(command, rest[2:]) if launcher else of_module(rest[1], rest[2:])
        if not rest or rest[0].startswith("-"):
            what = f"python {rest[0]}" if rest else "python alone"
            raise UsageError(f"{what} cannot be run on the nodes", hint="put the code into a SCRIPT.py")
        return of_target(rest[0], rest[1:])
    launcher = _launcher_of(program)
    job: Job | None = get(launcher).parse(program, rest) if launcher else None
    return job


def _launcher_of(command: str) -> str | None:
    return next((name for name in names() if command in get(name).COMMANDS), None)


# --- the commands of a run -------------------------------------------------------------------------


def pack(
    job: Job, *, generated: Mapping[str, bytes] | None = None, limit: int = LIMIT, any_key: bool = False
) -> RunFiles:
    """All files that a job needs, see ``code.pack``; its launcher adds its own files.

    Raises:
        UsageError: a config that cannot be used, a file that is missing, more than ``limit`` bytes.
    """
    files = code.pack(job, generated=generated, limit=limit, any_key=any_key)
    launcher = get(choose(job))
    packed: RunFiles = launcher.pack(job, files) if hasattr(launcher, "pack") else files
    return packed


def launch(spec: RunSpec) -> Launch:
    """One plan for each node, by the launcher that ``spec`` or its job names.

    Raises:
        PreflightError: nodes whose environment lacks the launcher's package.
        UsageError: the launcher is unknown, or it cannot start this job.
    """
    launcher = get(choose(spec.job) if spec.launcher == "auto" else spec.launcher)
    more = launcher.check(spec) if hasattr(launcher, "check") else ()
    for package in launcher.REQUIRES:
        require(spec, package)
    resumes = getattr(launcher, "resume", resume)(spec)
    plans = [
        node_plan(spec, rank, launcher.NAME, launcher.command(spec, rank), resumes) for rank in range(len(spec.workers))
    ]
    return Launch(tuple(plans), (*notices(spec), *more))


def arranged(
    plans: Sequence[Plan], master: str, active: int | None = None, others: Sequence[tuple[str, int]] = ()
) -> list[Plan]:
    """A run's plans for other nodes of its roster than before, with ranks in the order of the plans.

    Log and cache folders keep their names. Nothing is expected of a run on fewer nodes: the band was that of all nodes.

    Args:
        plans: the plans of the nodes, in the order of their ranks, spares last.
        master: the address of the first node.
        active: how many of the nodes have ranks; None: all.
        others: address and port of the agents of the nodes after the first, for a run that survives the loss of nodes.
    """
    count = len(plans) if active is None else active
    nodes = tuple(each.node for each in plans)
    changed: list[Plan] = []
    for rank, plan in enumerate(plans):
        link = plan.link._replace(host=master, nodes=nodes, others=tuple(others)) if plan.link else None
        new = plan._replace(
            node_rank=rank,
            nnodes=count,
            first_rank=sum(each.processes for each in plans[:rank]) if rank < count else 0,
            min_nodes=None if plan.min_nodes is None else min(plan.min_nodes, count),
            env={**plan.env, "MASTER_ADDR": master},
            link=link if len(plans) > 1 else None,
            expected=plan.expected if count == plan.nnodes else None,
        )
        changed.append(new)
    return changed
