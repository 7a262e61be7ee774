"""``pack-env --with-ops``: extensions that DeepSpeed would compile on the nodes are built here."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from provision.env.ops import choose, prebuild, unbuilt
from provision.env.source import facts
from provision.model import Emit, Notice, StageFinished, StageStarted

if TYPE_CHECKING:
    from provision.env.source.scan import Source


def additions(
    prefix: Path, *, wanted: bool, baseline: str | None, environ: Mapping[str, str], emit: Emit
) -> tuple[tuple[Source, ...], tuple[str, ...]]:
    """The files that are packed beside those of an environment, and what the bundle says about them.

    Args:
        prefix: the environment.
        wanted: build; otherwise only say what the nodes would have to compile.
        baseline: the processors to build for, by name; None: the platform's usual ones.
        environ: the process environment, where the cache is named.
        emit: is told about the progress, and what could not be built.

    Raises:
        UsageError: no such baseline.
    """
    sites = sorted(str(path.relative_to(prefix)) for path in prefix.glob("lib/python*/site-packages") if path.is_dir())
    if not wanted:
        notices = unbuilt(prefix, sites)
        found: tuple[Source, ...] = ()
    else:
        chosen = choose(baseline, facts.platform(prefix))
        began = time.monotonic()
        emit(StageStarted("ops", "Building DeepSpeed's extensions (minutes the first time)", unit="steps"))
        ops = prebuild(prefix, sites, chosen, cache_folder(environ))
        emit(StageFinished("ops", time.monotonic() - began, summary=", ".join(ops.built) or "none"))
        notices, found = ops.notices, ops.additions
    for text in notices:
        emit(Notice(text, "warning"))
    return found, notices


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where things are kept between runs: ``$CLUSTERCTL_CACHE``, else clusterctl in the user's cache folder."""
    if given := environ.get("CLUSTERCTL_CACHE"):
        return Path(given)
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises where there is none
    return Path(environ.get("XDG_CACHE_HOME") or f"{home}/.cache") / "clusterctl"
