"""The signals that stop a training after a last checkpoint: SIGTERM, and SIGINT from Ctrl-C."""

from __future__ import annotations

import os
import signal
from typing import Any, List

SIGNALS = (signal.SIGTERM, signal.SIGINT)
FORCED = 3  # under torchrun Ctrl-C arrives twice: from the terminal and from torchrun


def listen() -> List[int]:
    """Return a list to which each of these signals is appended. The third SIGINT exits without a checkpoint."""
    received: List[int] = []

    def receive(number: int, _: Any) -> None:
        received.append(number)
        if number != signal.SIGINT:
            return
        if received.count(number) >= FORCED:
            os._exit(128 + number)
        if received.count(number) == 1 and os.environ.get("RANK", "0") == "0":
            # Not sys.stderr: the signal may have interrupted a write to it.
            os.write(2, b"SIGINT: saving after this step; press twice more to exit without a checkpoint\n")

    for each in SIGNALS:
        signal.signal(each, receive)
    return received
