"""The host memory that this process can get. It does not import torch."""

from __future__ import annotations

import re
from pathlib import Path


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that this process can get without swapping, or 0 if that is unknown.

    The lowest of ``MemAvailable`` and what the limits of its control groups leave.
    """
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    found = [int(match.group(1)) << 10] if match else []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        limit, used, cached = _V1 if controllers else _V2
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            most, now = _text(group / limit).strip(), _text(group / used).strip()
            if most.isdigit() and now.isdigit():
                cache = re.search(r"^%s (\d+)$" % cached, _text(group / "memory.stat"), re.MULTILINE)
                found.append(max(0, int(most) - int(now) + (int(cache.group(1)) if cache else 0)))
            if group == top:
                break
    return min(found, default=0)


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
