"""Validates a node's report of its checkpoints (``selection.offer``): the node may be broken or lie.

It imports nothing of the agent, because the controller checks the same offers.
"""

from __future__ import annotations

from typing import Any, Callable

from .untrusted import is_whole

CHECKPOINTS = 16  # of one node
FILES = 200_000  # of one checkpoint
OTHERS = 1000  # names of other checkpoints
POINTERS = 16
_DIGEST = 64  # hexadecimal digits of SHA-256
_NAME = 4096  # characters


def problem(offer: Any) -> str:
    """Return what is wrong with an offer, or "" for a valid one. Unknown keys are ignored."""
    if not isinstance(offer, dict):
        return "is not an object"
    if "ranks" in offer and not _list_of(offer["ranks"], is_whole, 2, 2):
        return "has invalid ranks"
    if not _list_of(offer.get("pointers", []), _pointer, 0, POINTERS):
        return "has an invalid file latest"
    if not _list_of(offer.get("others", []), file_name, 0, OTHERS) or not is_whole(offer.get("kept", 0)):
        return "has invalid names of other checkpoints"
    checkpoints = offer.get("checkpoints", [])
    if not _list_of(checkpoints, _checkpoint, 0, CHECKPOINTS):
        return "has invalid checkpoints"
    if not _list_of(offer.get("copies", []), _copied, 0, CHECKPOINTS):
        return "has invalid copies of checkpoints"
    return "has checkpoints but no ranks" if checkpoints and "ranks" not in offer else ""


def text(value: Any) -> bool:
    """Whether the value is a short text."""
    return isinstance(value, str) and len(value) <= _NAME


def file_name(value: Any) -> bool:
    """Whether the value is the name of a file below a folder."""
    return text(value) and "\0" not in value and not {"", ".", ".."} & set(value.split("/"))


def _list_of(value: Any, check: Callable[[Any], bool], least: int, most: int) -> bool:
    return isinstance(value, (list, tuple)) and least <= len(value) <= most and all(map(check, value))


def _file(value: Any) -> bool:
    if not _list_of(value, lambda _: True, 4, 4):
        return False
    size, mtime, mark, torn = value
    return is_whole(size) and is_whole(mtime) and text(mark) and (torn is None or text(torn))


def _pointer(value: Any) -> bool:
    if not isinstance(value, dict) or not file_name(value.get("name")) or not text(value.get("tag")):
        return False
    return value.get("file") is None or _file(value["file"])


def _content(name: Any, value: Any) -> bool:
    return text(value) if name == "latest" else text(name) and _list_of(value, text, 0, FILES)


def _checkpoint(value: Any) -> bool:
    if not isinstance(value, dict) or not file_name(value.get("name")) or not isinstance(value.get("single"), bool):
        return False
    if not (value.get("step") is None or is_whole(value["step"])):
        return False
    files, says = value.get("files"), value.get("says")
    return (
        isinstance(files, dict)
        and len(files) <= FILES
        and all(file_name(name) and _file(facts) for name, facts in files.items())
        and isinstance(says, dict)
        and all(_content(name, value) for name, value in says.items())
    )


def digest(value: Any) -> bool:
    """Whether the value is a SHA-256 digest in hexadecimal digits."""
    return isinstance(value, str) and len(value) == _DIGEST and not value.strip("0123456789abcdef")


def _copied(value: Any) -> bool:
    """Whether an entry of ``copies`` is valid: a checkpoint with its folder, its time and its files' digests."""
    if not _checkpoint(value) or not is_whole(value.get("saved")) or not file_name(value.get("folder")):
        return False
    digests = value.get("digests")
    return isinstance(digests, dict) and set(digests) == set(value["files"]) and all(map(digest, digests.values()))
