"""The machine, the versions, and the load."""

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def machine(work: Path) -> str:
    """One line: processors, memory, disk, system, and the load at the start."""
    cpu = _first(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text()) or platform.machine()
    memory = int(_first(r"^MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())) / (1 << 20)
    disk = _answer("findmnt", "-no", "FSTYPE,SOURCE", "-T", str(work))
    system = _first(r'^PRETTY_NAME="?([^"\n]*)', Path("/etc/os-release").read_text())
    return (
        f"{os.cpu_count()} cores of {cpu.strip()}, {memory:.0f} GiB, {' on '.join(disk.split())}, {system}, "
        f"Linux {platform.release()}; load {os.getloadavg()[0]:.1f} at the start"
    )


def versions(clusterctl: Path) -> str:
    """One line: clusterctl with its commit, and every installed peer."""
    commit = _answer("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10")
    found = [f"{_answer(str(clusterctl), '--version').replace(', version', '')} ({commit or 'no commit'})"]
    found.append(f"Python {platform.python_version()}")
    for name, argv, pattern in _PEERS:
        answer = _answer(*argv)
        found.append(f"{name} {_first(pattern, answer)}" if answer else f"no {name}")
    return ", ".join(found)


_BIN = ROOT / ".venv" / "bin"
_PEERS: Sequence[tuple[str, tuple[str, ...], str]] = (
    ("tar", ("tar", "--version"), r"\) (\S+)"),
    ("zstd", ("zstd", "--version"), r"v(\d[\d.]+)"),
    ("conda-pack", (str(_BIN / "conda-pack"), "--version"), r"(\d\S+)"),
    ("OpenSSH", ("ssh", "-V"), r"OpenSSH_([^ ,]+)"),
    ("rsync", ("rsync", "--version"), r"version (\S+)"),
    ("clush", (str(_BIN / "clush"), "--version"), r"(\d\S+)"),
)


def _answer(*argv: str) -> str:
    """A program's output; empty if it is not installed."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    except OSError:
        return ""
    return "" if done.returncode else (done.stdout + done.stderr).strip()


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else ""
