"""``clusterctl pack-tool``: pack clusterctl itself into one file, for machines without network, pip and Python."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from provision.tasks.pack import refuse_folder
from provision.tool.pack import pack

if TYPE_CHECKING:
    from provision.model import Emit
    from provision.tool.pack import Tool

FILE = "clusterctl.run"


@dataclass(frozen=True)
class ToolResult:
    """The file, its contents, and the seconds that packing took."""

    file: Path
    tool: Tool
    seconds: float


def pack_tool(*, output: Path | None = None, emit: Emit) -> ToolResult:
    """Write clusterctl with its Python and every package it needs into one self-extracting file.

    Args:
        output: the file's path; by default clusterctl.run in the current folder. An existing file is replaced.
        emit: receives events.

    Raises:
        UsageError: the running Python cannot be packed or lacks a package, or the output cannot be written.
    """
    out = output or Path(FILE)
    refuse_folder(out, f"clusterctl pack-tool -o {out / FILE}")
    began = time.monotonic()
    tool = pack(out, emit=emit)
    return ToolResult(out, tool, time.monotonic() - began)
