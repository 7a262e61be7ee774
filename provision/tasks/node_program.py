"""A part of the agent that is sent to a node and runs from memory until its connection ends.

``top`` and ``monitor`` use it. A node needs only Python for it: no release, no run and no free disk. Nothing remains.
"""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from provision.render import render
from provision.run.files import sources

# zipimport needs a path: the program is a file in memory.
_LOADER = """\
import os, sys
if sys.version_info < (3, 8):
    sys.exit("clusterctl needs Python 3.8 or newer on nodes, this is %d.%d" % sys.version_info[:2])
size, data = int(sys.argv[1]), b""
while len(data) < size:
    part = os.read(0, size - len(data))
    if not part:
        sys.exit("clusterctl: the connection ended")
    data += part
file = os.memfd_create("clusterctl")
while data:
    data = data[os.write(file, data):]
sys.path.insert(0, "/proc/self/fd/%d" % file)
from agent.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


@cache
def program(modules: tuple[str, ...]) -> bytes:
    """These modules of the agent, and its command line, as a zip archive."""
    files = sources("agent")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for name in ("__init__", "__main__", *modules):
            out.writestr(f"agent/{name}.py", files[f"agent/{name}.py"])
    return archive.getvalue()


def program_script(
    prefixes: Sequence[str], modules: tuple[str, ...], words: Sequence[str], *, release: str = ""
) -> str:
    """The script that starts the program; its stdin is ``program_until``.

    Args:
        prefixes: releases whose Python runs it; without one, the system's does.
        modules: of the agent.
        words: the agent's command line.
        release: a file with the path of the release to prefer, if it exists.
    """
    return render(
        "run/node_program.sh.j2",
        prefixes=list(prefixes),
        release=release,
        loader=_LOADER,
        size=len(program(modules)),
        words=list(words),
    )


def program_until(modules: tuple[str, ...], over: threading.Event) -> Iterator[bytes]:
    """The program, and then nothing until ``over``: the end of stdin ends it."""
    yield program(modules)
    over.wait()


def ended(err: str, rc: int) -> str:
    """Why the program ended."""
    lines: list[Any] = err.strip().splitlines()
    return lines[-1][:200] if lines else f"the program on the node ended with status {rc}"
