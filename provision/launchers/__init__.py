"""Launchers: pure functions from a ``RunSpec`` to one plan for each node. One file a launcher; its name is the file's.

Files that begin with ``_`` are what they share.
"""

from __future__ import annotations

import importlib
import pkgutil

from provision.errors import UsageError
from provision.launchers._environment import RANKS, SYSTEM_PATH, UNSET, caches, environment
from provision.launchers._network import network
from provision.launchers._plans import notices
from provision.run import Launch, RunSpec, choose

__all__ = [
    "RANKS",
    "SYSTEM_PATH",
    "UNSET",
    "caches",
    "environment",
    "launch",
    "names",
    "network",
    "notices",
]


def names() -> tuple[str, ...]:
    """Every launcher's name."""
    return tuple(sorted(each.name for each in pkgutil.iter_modules(__path__) if not each.name.startswith("_")))


def launch(spec: RunSpec) -> Launch:
    """One plan for each node, by the launcher that ``spec`` names, or that its job asks for.

    Raises:
        PreflightError: nodes whose environment lacks the launcher's package.
        UsageError: there is no such launcher, or it cannot do what was asked for.
    """
    name = choose(spec.job) if spec.launcher == "auto" else spec.launcher
    if name not in names():
        raise UsageError(f"there is no launcher {name}", hint=f"--launcher {' | '.join(('auto', *names()))}")
    launched: Launch = importlib.import_module(f"{__name__}.{name}").launch(spec)
    return launched
