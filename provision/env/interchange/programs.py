"""What ``bin/conda-unpack`` of an archive says: read, never run."""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from provision.env.bundle.manifest import PACKAGE_FILE
from provision.errors import BundleError
from trainer.untrusted import parse_object

# Files of conda-pack's own, which environments do not need here, by a text that only they hold.
SCRIPTS: Mapping[str, bytes] = {
    "bin/activate": b"_conda_pack_activate",
    "bin/activate.fish": b"Exit conda mode and return",
    "bin/deactivate": b"_conda_pack_deactivate",
    "bin/conda-unpack": b"_prefix_records",
    "bin/conda_unpack_progress.py": b"progress",
}

LIMIT = 32 << 20  # bytes of a conda-unpack; a row has about 350, of 10,000 files in a large environment

# What stood for the prefix before conda-build declared it; split, so that this file does not hold it.
_OLDEST = "/opt/anaconda1anaconda2" + "anaconda3"
_PYTHON = re.compile(rb"#!(/[^\n]*)/bin/python[^/\n ]*(?: [^\n]*)?\n")
_COMMAND = re.compile(r"^# cmd: .* (?:-p|--prefix)[ =](/[^\s'\"]+)", re.MULTILINE)


class Record(NamedTuple):
    """A file that names a prefix: its path, the prefix or what stands for it, and ``text`` or ``binary``."""

    path: str
    placeholder: str
    mode: str


@dataclass(frozen=True)
class Unpacker:
    """The tables of a ``conda-unpack``.

    Attributes:
        records: files that name a prefix.
        scripts: scripts outside ``bin`` that ask ``/usr/bin/env`` for their interpreter, and had its path before.
        source_prefix: where the environment was packed; only our own archives tell it.
    """

    records: tuple[Record, ...]
    scripts: tuple[str, ...] = ()
    source_prefix: str = ""


def read(data: bytes) -> Unpacker:
    """The tables in the program ``data``.

    Raises:
        BundleError: it is no conda-unpack.
    """
    if len(data) > LIMIT:
        raise BundleError(
            f"its bin/conda-unpack has {len(data)} bytes, more than the {LIMIT} that are read",
            hint="make the archive again",
        )
    try:
        values = dict(_assignments(ast.parse(data)))
        rows = [Record(*row) for row in values["_prefix_records"]]
        scripts = [path for path, _ in values.get("_script_records", ())]
        source = values.get("_source_prefix", "")
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise BundleError(
            "its bin/conda-unpack is none that conda-pack writes", hint="make the archive again"
        ) from error
    texts = [text for row in rows for text in row] + [*scripts, source]
    if not all(isinstance(text, str) for text in texts) or any(row.mode not in ("text", "binary") for row in rows):
        raise BundleError("its bin/conda-unpack lists what conda-pack does not know", hint="make the archive again")
    return Unpacker(tuple(rows), tuple(scripts), source)


def _assignments(program: ast.Module) -> Iterable[tuple[str, Any]]:
    for node in program.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("_prefix_records", "_script_records", "_source_prefix"):
                yield name, ast.literal_eval(node.value)


def declared(metas: Iterable[bytes]) -> tuple[Record, ...]:
    """What the packages of an environment say of the placeholders in their files, from the files of ``conda-meta``."""
    return tuple(record for data in metas for record in _declared_in(data))


def _declared_in(data: bytes) -> list[Record]:
    try:
        rows = [
            Record(one["_path"], one["prefix_placeholder"], one["file_mode"])
            for one in parse_object(data, limit=PACKAGE_FILE)["paths_data"]["paths"]
            if one.get("prefix_placeholder")
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []  # no package's file
    return [row for row in rows if all(isinstance(text, str) for text in row)]


def prefix_of_records(records: Iterable[Record], declared: Iterable[Record]) -> str:
    """The prefix that an archive's files name: most records hold it, and no package declares it; empty if none is left.

    conda-pack lists every text file that no package of its cache owns, with the prefix that was packed.
    """
    placeholders = {_OLDEST, *(record.placeholder for record in declared)}
    counted = Counter(record.placeholder for record in records if record.placeholder not in placeholders)
    return max(counted, key=lambda prefix: (counted[prefix], prefix), default="")


def prefix_of_history(text: str) -> str:
    """The prefix that an environment was last changed under, from ``conda-meta/history``; empty if it does not say."""
    found = _COMMAND.findall(text)
    return str(found[-1]) if found else ""


def prefix_of_scripts(scripts: Iterable[bytes]) -> str:
    """The prefix that most scripts name as that of their Python; empty if none does."""
    counted = Counter(os.fsdecode(match[1]) for data in scripts if (match := _PYTHON.match(data)))
    counted.pop("/usr", None)
    return max(counted, key=lambda prefix: (counted[prefix], prefix), default="")
