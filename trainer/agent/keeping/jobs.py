"""Reads what rank 0 sends about copies: a checkpoint, the files that this node copies, and addresses. Bounded."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, Tuple

from ..contract import offers as checkpoint_offers
from ..contract.offers import file_name
from ..contract.untrusted import is_whole
from ..link import CopyError
from .choices import Generation
from .copier import Files

ADDRESS = 64  # characters of an IP address


def files_of(listed: Any) -> Files:
    """The files to copy.

    Raises:
        CopyError: the list is invalid.
    """
    if not isinstance(listed, list) or len(listed) > checkpoint_offers.FILES:
        raise CopyError("rank 0 sent an invalid list of files")
    files = {}
    for each in listed:
        if (
            not isinstance(each, (list, tuple))
            or len(each) != 4
            or not file_name(each[0])
            or not all(map(is_whole, each[1:]))
        ):
            raise CopyError("rank 0 sent an invalid list of files")
        files[each[0]] = (each[1], each[2], each[3])
    return files


def addresses_of(listed: Any, positions: Iterable[int], own: int) -> Dict[int, Tuple[str, int]]:
    """The addresses of other agents, by position, without invalid ones."""
    found: Dict[int, Tuple[str, int]] = {}
    for position in positions:
        each = listed.get(str(position)) if isinstance(listed, dict) and position != own else None
        if isinstance(each, (list, tuple)) and len(each) == 2 and isinstance(each[0], str) and is_whole(each[1]):
            found[position] = (each[0][:ADDRESS], min(each[1], 65535))
    return found


def generation_of(message: Mapping[str, Any]) -> Generation:
    """The checkpoint that a message is about.

    Raises:
        CopyError: it is invalid.
    """
    name, saved, step = message.get("name"), message.get("saved"), message.get("step")
    if not file_name(name) or not is_whole(saved) or not (step is None or is_whole(step)):
        raise CopyError("an agent sent an invalid checkpoint")
    return Generation(str(name), message.get("single") is True, int(saved or 0), step)


def generation_chosen(choice: Any, offers: Mapping[int, Mapping[str, Any]]) -> Generation:
    """The checkpoint that ``selection.newest`` has chosen."""
    entries: List[Mapping[str, Any]] = [one for each in offers.values() for one in each.get("checkpoints", ())]
    single = any(one["single"] for one in entries if one["name"] == choice.name)
    return Generation(choice.name, single, choice.time, choice.step)
