"""``clusterctl`` as a user runs it, for tests."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import forked

CLUSTERCTL = Path(sys.executable).with_name("clusterctl")


def run(*argv, cwd, env=None, timeout=120, first="", fresh=False):
    """The finished command. Nothing a user can cause may show a traceback.

    Args:
        argv: the words after ``clusterctl``.
        cwd: its folder.
        env: added to this process's environment.
        timeout: seconds.
        first: Python that runs before the command, to change its defaults.
        fresh: start a new Python, where the argv of the process is the subject; takes half a second more.
    """
    environment = {**os.environ, **(env or {})}
    if fresh:
        words, streams = (
            [CLUSTERCTL, *map(str, argv)],
            {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL},
        )
        result = subprocess.run(words, check=False, cwd=cwd, env=environment, timeout=timeout, **streams)
    else:
        result = forked.run(*argv, cwd=cwd, env=environment, timeout=timeout, first=first)
    assert "Traceback" not in result.stderr, result.stderr
    return result


def train(*argv, **options):
    """``clusterctl train``, repeated if torch crashed after the end of a training.

    Its C++ threads race with the end of the interpreter: github.com/pytorch/pytorch/issues/190489, seen once in about a
    hundred trainings.
    """
    result = run("train", *argv, **options)
    message = result.stdout + result.stderr
    if result.returncode == 6 and "Training completed" in message and "terminate called without an active" in message:
        warnings.warn(message, stacklevel=2)
        result = run("train", *argv, **options)
    return result
