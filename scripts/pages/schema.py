#!/usr/bin/env python3
"""Writes provision/inventory/schema.json, the inventory's JSON schema.

scripts/pages/schema.py          writes the file
scripts/pages/schema.py --print  shows it
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "provision" / "inventory" / "schema.json"

sys.path[:0] = [str(ROOT)]

from provision.inventory.json_schema import build  # noqa: E402


def schema() -> str:
    return json.dumps(build(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if "--print" in sys.argv[1:]:
        print(schema(), end="")
    else:
        FILE.write_text(schema(), encoding="utf-8")
