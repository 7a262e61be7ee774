"""``clusterctl`` as a user runs it, for tests."""

import os
import subprocess
import sys
from pathlib import Path

CLUSTERCTL = Path(sys.executable).with_name("clusterctl")


def run(*argv, cwd, env=None, timeout=120):
    """The finished command; ``env`` is added to the environment. Nothing a user can cause may show a traceback."""
    result = subprocess.run(
        [CLUSTERCTL, *map(str, argv)],
        check=False,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
    assert "Traceback" not in result.stderr, result.stderr
    return result
