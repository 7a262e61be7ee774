"""The hostfile of DeepSpeed (``worker-1 slots=8``), which is that of Open MPI; MPICH writes ``worker-1:8``."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from provision.inventory.foreign.found import Found, host, lines
from provision.inventory.schema import as_gpus

if TYPE_CHECKING:
    from provision.inventory.choosing import Wanted


def read(text: str) -> Found:
    """The nodes of a hostfile. Its slots are the processes of a node, one a GPU."""
    hosts: dict[str, Wanted] = {}
    first: dict[str, int] = {}
    left_out: dict[str, list[int]] = defaultdict(list)
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, slots = _colon(words[0])
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if key == "slots" and equals:
                slots = value
            elif key in {"max_slots", "max-slots"} and equals:
                left_out[key].append(number)
            else:
                problems.append(f"line {number}: {word} is not understood; a line is HOST slots=N")
        try:
            node = replace(host(name), gpus=as_gpus(slots) if slots is not None else None)
        except ValueError as error:
            problems.append(f"line {number}: {error}")
            continue
        if name in hosts:
            problems.append(f"line {number}: {name} is there twice, first in line {first[name]}")
        hosts.setdefault(name, node)
        first.setdefault(name, number)
    notes = tuple(f"{key} ({lines(numbers)}) has no counterpart and is left out" for key, numbers in left_out.items())
    return Found("hostfile", tuple(hosts.values()), notes=notes, problems=tuple(problems))


def _colon(word: str) -> tuple[str, str | None]:
    found = re.fullmatch(r"([^:]+):(\d+)", word)  # an IPv6 address has more colons
    return (found[1], found[2]) if found else (word, None)
