"""Parses JSON that another program wrote: a peer, a node, a file on a node.

Whatever the bytes are, the result is a value or an ``UntrustedError``: never a RecursionError, and never more memory
than ``limit`` allows. ``is_whole``, ``whole``, ``is_number`` and ``finite`` check the range
of each number in it.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any, Dict, Optional, Union

LIMIT = 1 << 20  # bytes of one document, unless the caller knows better
DEPTH = 32  # levels of lists and objects; clusterctl's own documents have at most seven
MOST = 1 << 62  # bytes, steps and nanoseconds since the epoch are below this
_DIGITS = 40  # of an integer: 64 bits have 20
_LONG = b"0" * (_DIGITS + 1)
_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)


class UntrustedError(ValueError):
    """The bytes do not have the expected format. The text says why, and quotes only a few of them."""


def parse_json(data: Union[bytes, str], *, limit: int = LIMIT, depth: int = DEPTH) -> Any:
    """Parse one JSON document.

    Args:
        data: UTF-8, or text.
        limit: the maximal number of bytes (characters of text).
        depth: the maximal number of levels of lists and objects; a bare value has none.

    Raises:
        UntrustedError: the data is too long, too deep, not UTF-8, not JSON, or has a number of too many digits.
    """
    if len(data) > limit:
        raise UntrustedError("has %d bytes, more than the %d allowed" % (len(data), limit))
    try:
        text = data if isinstance(data, str) else bytes(data).decode("utf-8")
        # The callback costs as much as all other parsing, so only a text with a long number has it.
        digits = text.encode("utf-8", "replace").translate(_ZEROS)
        value = json.loads(text, parse_int=_integer) if _LONG in digits else json.loads(text)
    except UntrustedError:
        raise
    except UnicodeDecodeError:
        raise UntrustedError("is not UTF-8") from None
    except RecursionError:
        raise UntrustedError("is nested more than %d levels deep" % depth) from None
    except ValueError as error:
        raise UntrustedError("is not JSON: %s" % error) from None
    if text.count("{") + text.count("[") > depth:  # else it cannot be so deep
        _limit_depth(value, depth)
    return value


def parse_object(data: Union[bytes, str], *, limit: int = LIMIT, depth: int = DEPTH) -> Dict[str, Any]:
    """Parse a JSON document that must be an object.

    Raises:
        UntrustedError: as ``parse_json``, and where the value is not an object.
    """
    value = parse_json(data, limit=limit, depth=depth)
    if not isinstance(value, dict):
        raise UntrustedError("is not a JSON object")
    return value


def is_whole(value: Any, below: int = MOST, least: int = 0) -> bool:
    """Whether a parsed value is a whole number with ``least <= value < below``; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < below


def whole(value: Any, below: int = MOST, least: int = 0) -> Optional[int]:
    """The value if ``is_whole``, else None."""
    return value if is_whole(value, below, least) else None


def is_number(value: Any, below: float = math.inf, least: float = -math.inf) -> bool:
    """Whether a parsed value is a finite number with ``least <= value < below``; true and false are none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max and least <= value < below  # NaN is in no range


def finite(value: Any, below: float = math.inf, least: float = -math.inf) -> Optional[float]:
    """The value as a float if ``is_number``, else None."""
    return float(value) if is_number(value, below, least) else None


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise UntrustedError("has a number of %d digits" % len(text))
    return int(text)


def _limit_depth(value: Any, depth: int) -> None:
    """Check level by level, so that the depth of the value is not the depth of the stack."""
    level = [value] if type(value) in (dict, list) else []  # the parser makes no subclasses of them
    for _ in range(depth):
        if not level:
            return
        level = [
            child
            for each in level
            for child in (each.values() if type(each) is dict else each)
            if type(child) is dict or type(child) is list
        ]
    if not level:
        return
    raise UntrustedError("is nested more than %d levels deep" % depth)
