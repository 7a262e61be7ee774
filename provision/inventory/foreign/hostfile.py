"""Hostfiles of DeepSpeed and Open MPI (``worker-1 slots=8``) and of MPICH (``worker-1:8``), and plain lists of hosts.

``HOST:N`` means N slots, as in MPICH. N is a port if it cannot be a number of slots (22, or more than 1,024), or if the
line also has ``slots=``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from provision.inventory.document import shown
from provision.inventory.foreign.found import Found, host, lines
from provision.inventory.names import MAX_NODES, expand, split_target
from provision.inventory.schema import as_gpus, as_port, as_user

if TYPE_CHECKING:
    from provision.inventory.new_nodes import Wanted

_OMITTED = {"max_slots", "max-slots", "binding", "ifhn"}
_MOST_SLOTS = 1024
_SSH = "22"


def is_hostfile(lines: list[str]) -> bool:
    """Whether a line has a form that only hostfiles have: slots, ``user@host``, ``HOST:N``, or clusterctl's ranges."""
    if any(re.search(r"\s(max[-_])?slots\s*=|\s(binding|ifhn)=", line) for line in lines):
        return True
    words = [line.partition("#")[0].split() for line in lines]
    bare = all(len(each) == 1 and "=" not in each[0] for each in words if each)
    return bare and any(re.search(r"@|:[0-9]+$|^\[.*\]$|\[[^\]:]*\]", each[0]) for each in words if each)


def read(text: str) -> Found:
    """The nodes of a hostfile. The slots are the node's processes, one per GPU."""
    hosts: dict[tuple[str, int | None], Wanted] = {}
    first: dict[tuple[str, int | None], int] = {}
    left_out: dict[str, list[int]] = defaultdict(list)
    read_as: dict[str, list[int]] = defaultdict(list)
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        word, *words = line.partition("#")[0].split() or [""]
        if not word:
            continue
        options, unknown = _options(words)
        problems += [f"line {number}: {each} is not understood; a line is HOST slots=N" for each in unknown]
        for key in options.keys() & _OMITTED:
            left_out[key].append(number)
        try:
            user, address, port, slots = _target(word, options.get("slots"))
            user = as_user(options["user"]) if "user" in options else user
            names = expand(address)
            if len(hosts) + len(names) > MAX_NODES:
                problems.append(f"line {number}: makes more than {MAX_NODES} hosts")
                break
            gpus = as_gpus(slots) if slots is not None else None
            for name in names:
                node = replace(host(name), user=user, port=port, gpus=gpus, origin=f"line {number}")
                if (name, port) in hosts:
                    problems.append(f"line {number}: {name} is listed twice, first in line {first[name, port]}")
                hosts.setdefault((name, port), node)
                first.setdefault((name, port), number)
        except ValueError as error:
            problems.append(f"line {number}: {error}")
            continue
        if "slots" not in options and address.count(":") < 2 and (port or slots):
            read_as["port" if port else "slots"].append(number)
    notes = [f"{key} ({lines(numbers)}) has no counterpart and is skipped" for key, numbers in sorted(left_out.items())]
    if not re.search(r"\sslots\s*=", text):
        notes += _reading(read_as)
    return Found("hostfile", _name_hosts(list(hosts.values())), notes=tuple(notes), problems=tuple(problems))


def _options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The known ``KEY=VALUE`` words, and the unknown words."""
    options: dict[str, str] = {}
    unknown: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in {"slots", "user", *_OMITTED}:
            options[key] = value
        else:
            unknown.append(shown(word))
    return options, unknown


def _target(word: str, slots: str | None) -> tuple[str | None, str, int | None, str | None]:
    """Login name, address, port and slots."""
    user, address, number = split_target(word)
    if number is None:
        port = None
    elif slots is None and address.count(":") < 2 and number != _SSH and not _is_port(number):
        port, slots = None, number
    else:
        port = as_port(number)
    return None if user is None else as_user(user), address, port, slots


def _is_port(number: str) -> bool:
    return bool(re.fullmatch("[0-9]{4,9}", number)) and int(number) > _MOST_SLOTS


def _name_hosts(hosts: list[Wanted]) -> tuple[Wanted, ...]:
    """A host with several ports is several nodes, so none of them can have its name."""
    counts = Counter(each.address for each in hosts)
    return tuple(replace(each, name=None) if counts[each.address] > 1 else each for each in hosts)


def _reading(read_as: dict[str, list[int]]) -> list[str]:
    """Notes about how ``HOST:N`` was read, if no line has ``slots=``."""
    notes = []
    if slots := read_as.get("slots"):
        notes.append(
            f"the number after the colon ({lines(slots)}) is read as slots, as MPICH writes them; "
            "write a port as HOST:PORT slots=N"
        )
    if ports := read_as.get("port"):
        notes.append(f"the number after the colon ({lines(ports)}) is read as a port; write slots as slots=N")
    return notes
