"""What every summary is: one mapping for ``--json``, one text for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Summary = tuple[Mapping[str, Any], str]
