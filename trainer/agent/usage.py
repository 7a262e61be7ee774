"""Asks a program for its options: runs it once with ``--help``.

The program may ignore ``--help`` and start to train. So it runs in a copy of its small files with an empty home, both
of which are removed again, and without GPUs, input and secrets. Its process group is killed when time is over, or when
it has ended and left processes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List

TEXT = 256 << 10  # bytes of its output
_FILE = 16 << 20  # bytes of a file that it may write
_SMALL = 1 << 20  # bytes of a file that is copied
_ALL = 64 << 20  # bytes that are copied
_FILES = 5_000  # files that are copied
_KEPT = ("PATH", "LANG", "LC_ALL")
_SET = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",  # some read these while they start
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1",
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "disabled",
    "COLUMNS": "200", "TERMINAL_WIDTH": "200", "TERM": "dumb", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8",
}  # fmt: skip


def usage(folder: str, words: List[str], *, path: str = "", seconds: float = 30.0) -> Dict[str, Any]:
    """What a program prints.

    Args:
        folder: the folder of its files, in which it starts.
        words: the arguments of Python, with the option that asks for help.
        path: its PYTHONPATH; relative folders are those of ``folder``.
        seconds: after which it is killed.

    Returns:
        ``text``, and ``rc``, which is None if it was killed.
    """
    scratch = tempfile.mkdtemp(prefix="clusterctl-help-")
    try:
        home, work, output = Path(scratch, "home"), Path(scratch, "job"), Path(scratch, "output")
        home.mkdir()
        work.mkdir()
        _copy(Path(folder), work)
        env = {name: os.environ[name] for name in _KEPT if name in os.environ}
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
        env.update(_SET, HOME=str(home), TMPDIR=str(home), **({"PYTHONPATH": path} if path else {}))
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=work,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_limit,  # noqa: PLW1509 - this process has no other thread
            )
            try:
                rc = process.wait(seconds)
            except subprocess.TimeoutExpired:
                rc = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        with output.open("rb") as file:
            return {"text": file.read(TEXT).decode("utf-8", "replace"), "rc": rc}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # a killed process may still be ending there


def _limit() -> None:
    """Bound the files that the program writes, its output included."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE, _FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _copy(folder: Path, work: Path) -> None:
    """Copy the small files: the program's modules and configurations."""
    size = 0
    for count, path in enumerate(_small(folder)):
        size += path.stat().st_size
        if count >= _FILES or size > _ALL:
            return
        target = work / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _small(folder: Path) -> Iterator[Path]:
    for above, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(above, name)
            if path.is_file() and path.stat().st_size <= _SMALL:
                yield path
