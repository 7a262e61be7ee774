"""Samples a node for ``clusterctl top``: one JSON object per line, until the input ends. It needs no run.

The fields are those of ``sampling.py``, without those of a run, and:

============  =========================================================================================================
``cores``     processors of the node
``users``     ``[{"gpu", "pid", "user", "command", "memory"}]``: the processes on the GPUs, with the GPU's index, and
              bytes of its memory; null if unknown. Processes outside this container have no user and no command
============  =========================================================================================================
"""

from __future__ import annotations

import json
import os
import pwd
import select
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

from .processes import read
from .sampling import FORMAT, USERS, Gpus, Output, Sampler, nvidia_smi

FIRST = 1.0  # seconds between the first two samples: rates need two
ONCE = 15.0  # seconds to wait for nvidia-smi, which may start its driver, if only one sample is wanted
EVERY = 5  # seconds between two lists of processes
_FRESH = 2.5 * EVERY  # seconds that a process of the last list counts
_COMMAND = 300  # characters
_OF_A_RUN = ("rss", "cpu")
APPS = ("nvidia-smi", "--query-compute-apps=pid,gpu_uuid,used_memory", FORMAT, "--loop=%d" % EVERY)


class Users:
    """The processes on the GPUs. Without any, nvidia-smi prints nothing, so silence is no sign that it hangs."""

    def __init__(self, command: Tuple[str, ...] = APPS) -> None:
        self._output = Output([command])
        self._seen: Dict[Tuple[int, str], Tuple[float, Optional[int]]] = {}
        self._names: Dict[int, str] = {}

    def look(self, now: float, indices: Dict[str, int]) -> List[Dict[str, Any]]:
        """The processes of the last list; ``indices`` are the GPUs' by UUID."""
        for line in self._output.lines(now):
            pid, _, rest = line.partition(",")
            uuid, _, memory = (part.strip() for part in rest.partition(","))
            if pid.strip().isdigit() and uuid.startswith(("GPU-", "MIG-")):
                self._seen[int(pid), uuid] = (now, int(memory) << 20 if memory.isdigit() else None)
        self._seen = {key: value for key, value in self._seen.items() if now - value[0] <= _FRESH}
        found = [
            dict(self._about(pid), gpu=indices.get(uuid), pid=pid, memory=memory)
            for (pid, uuid), (_, memory) in sorted(self._seen.items())[:USERS]
        ]
        return sorted(found, key=lambda each: (each["gpu"] is None, each["gpu"], each["pid"]))

    def close(self) -> None:
        """End nvidia-smi."""
        self._output.close()

    def _about(self, pid: int) -> Dict[str, Any]:
        """A process's user and command line."""
        try:
            uid = os.stat("/proc/%d" % pid).st_uid  # noqa: PTH116
        except OSError:
            return {"user": None, "command": None}
        if uid not in self._names:
            try:
                self._names[uid] = pwd.getpwuid(uid).pw_name
            except KeyError:
                self._names[uid] = str(uid)
        words = read("/proc/%d/cmdline" % pid)[: 4 * _COMMAND].replace(b"\0", b" ").decode("utf-8", "replace").strip()
        return {"user": self._names[uid], "command": words[:_COMMAND] or None}


def top(every: float, folder: str, *, once: bool = False) -> int:
    """Print samples until the input ends; ``once``: one sample that has everything, as soon as it is known."""
    while folder != os.path.dirname(folder) and not os.path.isdir(folder):  # noqa: PTH112, PTH120
        folder = os.path.dirname(folder)  # noqa: PTH120 - the disk on which clusterctl's folder will be
    gpus, users = Gpus(nvidia_smi(max(1, round(every)))), Users()
    sampler = Sampler(folder=folder, gpus=gpus)
    began, number, with_gpus = time.monotonic(), 0, 0
    try:
        while True:
            sample = {name: value for name, value in sampler.sample({}).items() if name not in _OF_A_RUN}
            now = time.monotonic()
            sample.update(cores=os.cpu_count(), users=users.look(now, gpus.indices))
            number += 1
            with_gpus += "gpus" in sample
            complete = number > 1 and (with_gpus > 1 or not gpus.pids or now - began > ONCE)
            if complete or not once:
                sys.stdout.write(json.dumps(sample, separators=(",", ":")) + "\n")
                sys.stdout.flush()
            if once and complete:
                return 0
            wait = FIRST if number == 1 or once else every
            if select.select([0], [], [], wait)[0] and not os.read(0, 4096):
                return 0
    finally:
        sampler.close()
        users.close()
