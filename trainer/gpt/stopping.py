"""The signals that end a training with its work kept: SIGTERM, and SIGINT, which Ctrl-C sends."""

from __future__ import annotations

import os
import signal
from typing import Any, List

SIGNALS = (signal.SIGTERM, signal.SIGINT)
IMPATIENT = 3  # Ctrl-C under torchrun arrives twice: from the terminal, and from torchrun


def listen() -> List[int]:
    """A list that grows by each of these signals. The third SIGINT ends the process without a checkpoint."""
    asked: List[int] = []

    def take(number: int, _: Any) -> None:
        asked.append(number)
        if number != signal.SIGINT:
            return
        if asked.count(number) >= IMPATIENT:
            os._exit(128 + number)
        if asked.count(number) == 1 and os.environ.get("RANK", "0") == "0":
            # Not sys.stderr: the signal may have interrupted a write to it.
            os.write(2, b"SIGINT: saving after this step; twice more to end without a checkpoint\n")

    for each in SIGNALS:
        signal.signal(each, take)
    return asked
