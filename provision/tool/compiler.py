"""Compiles Python sources, as a separate program: ``python -s -S compiler.py``.

Its input is a list of ``(name, source)`` in marshal's format. Its output is a list of files for ``__pycache__``, empty
for a source that does not compile. ``name`` is the file name in the code object; an import corrects it.

The files are *unchecked hash-based* (PEP 552): they contain no time, and imports do not compare them with the source.
"""

# It runs in a fresh process and imports only the standard library, because marshal's output depends on the objects in
# memory, and equal sources must give equal bytes.

from __future__ import annotations

import marshal
import sys
from importlib.util import MAGIC_NUMBER, source_hash

_UNCHECKED = (1).to_bytes(4, "little")


def compile_source(source: bytes, name: str) -> bytes:
    """The compiled file of a source; empty if it does not compile, such as a template."""
    try:
        code = compile(source, name, "exec", dont_inherit=True, optimize=0)
    except (SyntaxError, ValueError):  # ValueError: a null byte
        return b""
    return MAGIC_NUMBER + _UNCHECKED + source_hash(source) + marshal.dumps(code)


def main() -> None:
    """Compile the sources from file descriptor 0 and write the files to 1."""
    with open(0, "rb") as questions, open(1, "wb") as answers:
        asked: list[tuple[str, bytes]] = marshal.load(questions)  # noqa: S302 - from our own parent
        marshal.dump([compile_source(source, name) for name, source in asked], answers)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    main()
