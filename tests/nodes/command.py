"""``clusterctl`` as a user runs it, for tests."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import warm

CLUSTERCTL = Path(sys.executable).with_name("clusterctl")


def run(*argv, cwd, env=None, timeout=120, fresh=False):
    """The finished command; ``env`` is added to the environment. Nothing a user can cause may show a traceback.

    ``fresh``: a Python of its own, for what the command line of a process tells others; it takes half a second more.
    """
    words, options = [str(CLUSTERCTL), *map(str, argv)], {"cwd": cwd, "env": {**os.environ, **(env or {})}}
    if fresh:
        options |= {"check": False, "capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    result = (subprocess if fresh else warm).run(words, timeout=timeout, **options)
    assert "Traceback" not in result.stderr, result.stderr
    return result


def train(*argv, **options):
    """``clusterctl train``, once more where torch crashed behind the end of a training.

    Its C++ threads race with the end of the interpreter: github.com/pytorch/pytorch/issues/190489, seen once in about a
    hundred trainings.
    """
    result = run("train", *argv, **options)
    said = result.stdout + result.stderr
    if result.returncode == 6 and "Training completed" in said and "terminate called without an active" in said:
        warnings.warn(said, stacklevel=2)
        result = run("train", *argv, **options)
    return result
