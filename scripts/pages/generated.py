"""How a program here writes its files. Importing it makes provision and the recordings of tests/unit importable.

With ``--check``, a program writes nothing, and fails if a file differs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

sys.path[:0] = [str(ROOT)]
sys.path += [str(ROOT / "tests" / "unit")]


def write(texts: Mapping[str, str]) -> None:
    """Write or check files, by their paths in the repository."""
    for name, text in texts.items():
        path = ROOT / name
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif text != path.read_text(encoding="utf-8"):
            sys.exit(f"{name} is not up to date: run {Path(sys.argv[0]).resolve().relative_to(ROOT)}")
