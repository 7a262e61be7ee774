"""torch's flight recorder: a file of each rank with its last collectives, as lines that ``arrivals`` reads. Pure.

A dump is a pickle (``nccl_trace_rank_N``) or JSON. Only plain values are taken out of a pickle: whatever else it names
is refused, so that a dump from elsewhere runs no code.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

from trainer.agent.contract.untrusted import UntrustedError, parse_object

_PICKLE = b"\x80"


class _Plain(pickle.Unpickler):
    """Values without any class."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse."""
        raise pickle.UnpicklingError(f"{module}.{name}")


def is_dump(name: str, data: bytes) -> bool:
    """Whether a file is one of the flight recorder's."""
    return rank_of(name) is not None and data[:1] in {_PICKLE, b"{"} and b"pg_status" in data


def rank_of(name: str) -> int | None:
    """The rank in the name of a dump."""
    found = re.search(r"rank_?(\d{1,6})(?:\.json)?$", name)
    return int(found[1]) if found else None


def lines(name: str, data: bytes) -> str:
    """A line for each process group: what the rank enqueued last, in the words of torch's watchdog.

    Raises:
        UntrustedError: the file is no dump.
    """
    try:
        dump = _Plain(io.BytesIO(data)).load() if data[:1] == _PICKLE else parse_object(data, limit=len(data))
        groups = [(str(group), _numbers(status)) for group, status in dump["pg_status"].items()]
    except UntrustedError:
        raise
    except Exception as error:  # noqa: BLE001 - a pickle fails in many ways
        raise UntrustedError(f"is no flight recorder dump: {type(error).__name__}") from None
    rank = rank_of(name)
    return "".join(
        f"[rank{rank}]: [PG ID {group} PG GUID {group} Rank {rank}] flight recorder: last enqueued work: {enqueued}, "
        f"last completed work: {completed}\n"
        for group, (enqueued, completed) in groups
        if re.fullmatch(r"\w{1,40}", group)
    )


def _numbers(status: dict[str, Any]) -> tuple[int, int]:
    return int(status["last_enqueued_collective"]), int(status["last_completed_collective"])
