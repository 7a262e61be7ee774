"""Converts a dump of torch's flight recorder, a rank's last collectives, to lines that ``arrivals`` reads. Pure.

A dump is a pickle (``nccl_trace_rank_N``) or JSON. A pickle may contain only plain values: classes and functions are
refused, so that a dump from an unknown source runs no code.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

from trainer.agent.contract.untrusted import UntrustedError, parse_object

_PICKLE = b"\x80"


class _Plain(pickle.Unpickler):
    """Unpickles plain values only."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every class and function."""
        raise pickle.UnpicklingError(f"{module}.{name}")


def is_dump(name: str, data: bytes) -> bool:
    """Whether a file is a dump of the flight recorder."""
    return rank_of(name) is not None and data[:1] in {_PICKLE, b"{"} and b"pg_status" in data


def rank_of(name: str) -> int | None:
    """The rank in the name of a dump."""
    found = re.search(r"rank_?(\d{1,6})(?:\.json)?$", name)
    return int(found[1]) if found else None


def lines(name: str, data: bytes) -> str:
    """A line for each process group with the rank's last collective, in the format of torch's watchdog.

    Raises:
        UntrustedError: the file is not a dump.
    """
    try:
        dump = _Plain(io.BytesIO(data)).load() if data[:1] == _PICKLE else parse_object(data, limit=len(data))
        groups = [(str(group), _numbers(status)) for group, status in dump["pg_status"].items()]
    except UntrustedError:
        raise
    except Exception as error:  # noqa: BLE001 - a pickle fails in many ways
        raise UntrustedError(f"is not a flight recorder dump: {type(error).__name__}") from None
    rank = rank_of(name)
    return "".join(
        f"[rank{rank}]: [PG ID {group} PG GUID {group} Rank {rank}] flight recorder: last enqueued work: {enqueued}, "
        f"last completed work: {completed}\n"
        for group, (enqueued, completed) in groups
        if re.fullmatch(r"\w{1,40}", group)
    )


def _numbers(status: dict[str, Any]) -> tuple[int, int]:
    return int(status["last_enqueued_collective"]), int(status["last_completed_collective"])
