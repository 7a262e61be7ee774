#!/usr/bin/env python3
"""Writes provision/inventory/schema.json, the inventory's JSON schema."""

from __future__ import annotations

import json

from generated import write

from provision.inventory.json_schema import build


def schema() -> str:
    return json.dumps(build(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    write({"provision/inventory/schema.json": schema()})
