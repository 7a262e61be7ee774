"""Compile many Python sources on all processors, reproducibly."""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from provision.errors import UsageError
from provision.tool import compiler

_TOGETHER = 256  # sources per process: fixed, because earlier sources influence the bytes of later ones


def compiled(sources: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """The compiled files of sources, by the same names; sources that do not compile are omitted.

    Args:
        sources: the files' contents, by their names in the tool.

    Raises:
        UsageError: the compiler was killed.
    """
    names = sorted(sources)
    groups = [names[at : at + _TOGETHER] for at in range(0, len(names), _TOGETHER)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        answers = pool.map(lambda group: _ask([(name, sources[name]) for name in group]), groups)
        return {
            name: data
            for group, answer in zip(groups, answers, strict=True)
            for name, data in zip(group, answer, strict=True)
            if data
        }


def _ask(questions: list[tuple[str, bytes]]) -> list[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-s", "-S", compiler.__file__],
        input=marshal.dumps(questions),
        capture_output=True,
        env={**environment, "PYTHONHASHSEED": "0"},  # before Python 3.11 the bytes contain the order of sets
        check=False,
    )
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise UsageError(f"the sources of clusterctl could not be compiled: {why}", hint="is there enough free memory?")
    answers: list[bytes] = marshal.loads(done.stdout)  # noqa: S302 - from our own process
    return answers
