"""Compiles Python sources, as a program of its own: ``python -s -S compiler.py``.

Asked on stdin with a list of ``(name, source)``, written by marshal, it answers with a list of the files that belong
into ``__pycache__``; empty for what is no Python of this version. ``name`` is what the code object keeps of where it
came from; an import corrects it.

The files are *unchecked hash-based* (PEP 552): they hold no time, and no import looks whether the source has changed.
"""

# It runs in a fresh process, and imports nothing but the standard library: what marshal writes depends on what else is
# in memory, and the same sources shall give the same bytes.

from __future__ import annotations

import marshal
import sys
from importlib.util import MAGIC_NUMBER, source_hash

_UNCHECKED = (1).to_bytes(4, "little")


def compiled(source: bytes, name: str) -> bytes:
    """The compiled file of a source; empty for what cannot be compiled, such as a template."""
    try:
        code = compile(source, name, "exec", dont_inherit=True, optimize=0)
    except (SyntaxError, ValueError):  # ValueError: a null byte
        return b""
    return MAGIC_NUMBER + _UNCHECKED + source_hash(source) + marshal.dumps(code)


def main() -> None:
    """What the program does; its questions come on file descriptor 0, its answers go to 1."""
    with open(0, "rb") as questions, open(1, "wb") as answers:
        asked: list[tuple[str, bytes]] = marshal.load(questions)  # noqa: S302 - from our own parent
        marshal.dump([compiled(source, name) for name, source in asked], answers)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    main()
