"""Finds GPUs that a node has lost (Xid 79: the GPU has fallen off the bus), after a rank has failed.

A failed rank alone says nothing about its node. A GPU that nvidia-smi listed before and no longer lists does: another
start there fails again. Any other answer of nvidia-smi, and none, is no proof. The same holds for a spare, before it
takes the rank of a lost node.
"""

from __future__ import annotations

import re
import time
from typing import Any, Callable, Dict, List, Optional, Sequence

from .sampling import FORMAT, Output

LISTED = ("nvidia-smi", "--query-gpu=uuid", FORMAT)
PATIENCE = 10.0  # seconds for nvidia-smi to answer: a restart waits for it
LOOK = 0.1  # seconds between looks for its output
_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]+")
_LOST = ("GPU is lost", "Unable to determine the device handle")


def lost_gpus(
    known: Dict[str, int], wait: Callable[[float], Any], command: Sequence[str] = LISTED, patience: float = PATIENCE
) -> Optional[str]:
    """Describe the GPUs that this node has lost; None: it has lost none, or it is not known.

    Args:
        known: by UUID, the indices of the GPUs when the attempt started.
        wait: waits for some seconds.
        command: lists the UUIDs of the GPUs.
        patience: seconds for it to answer.
    """
    if not known:
        return None
    lines = _lines(tuple(command), wait, patience)
    if lines is None:
        return None
    listed = {line.strip() for line in lines if _UUID.fullmatch(line.strip())}
    said = next((line.strip() for line in lines if any(text in line for text in _LOST)), None)
    if said is not None:
        return "it has lost a GPU: nvidia-smi says: %.300s" % said
    lost = sorted(index for uuid, index in known.items() if uuid not in listed)
    if not lost or not listed:
        return None
    return "it has lost GPU %s: nvidia-smi lists %d of %d" % (", ".join(map(str, lost)), len(listed), len(known))


class SpareGpus:
    """The GPUs of a spare, which has no rank that would fail when one is lost.

    ``wait`` waits for some seconds. ``lost`` describes the GPUs that are lost; None: none is, or it is not known.
    """

    def __init__(
        self, wait: Callable[[float], Any], command: Sequence[str] = LISTED, patience: float = PATIENCE
    ) -> None:
        self.lost: Optional[str] = None
        self._wait, self._command, self._patience = wait, tuple(command), patience
        self._known: Optional[Dict[str, int]] = None
        self._looked = 0  # the last attempt after whose failure it looked

    def learn(self) -> None:
        """Ask which GPUs the spare has, the first time that it waits for the end of an attempt."""
        if self._known is None:
            lines = _lines(self._command, self._wait, self._patience) or []
            uuids = [line.strip() for line in lines if _UUID.fullmatch(line.strip())]
            self._known = {uuid: index for index, uuid in enumerate(uuids)}

    def look(self, attempt: int) -> bool:
        """Look for lost GPUs, once after the failure of an attempt. True: the first one was found."""
        if not self._known or self.lost is not None or attempt == self._looked:
            return False
        self._looked = attempt
        self.lost = lost_gpus(self._known, self._wait, self._command, self._patience)
        return self.lost is not None


def _lines(command: "tuple[str, ...]", wait: Callable[[float], Any], patience: float) -> Optional[List[str]]:
    """The output of nvidia-smi; None if it does not end in time. It is not waited for: its driver may hang."""
    output = Output([command], again=None)
    limit = time.monotonic() + patience
    lines = output.lines(time.monotonic())
    try:
        while output.pid is not None:
            if time.monotonic() > limit:
                return None
            wait(LOOK)
            lines += output.lines(time.monotonic())
    finally:
        output.close()
    return lines
