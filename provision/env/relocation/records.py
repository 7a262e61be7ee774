"""Update lists of hashes after files were rewritten: ``RECORD`` and ``conda-meta``."""

from __future__ import annotations

import csv
import io
import json
import posixpath
from base64 import urlsafe_b64encode
from collections.abc import Mapping

from provision.env.bundle.manifest import PACKAGE_FILE, Entry
from provision.env.source.packages import record_path
from trainer.agent.contract.untrusted import parse_object


def update(path: str, data: bytes, rewritten: Mapping[str, Entry], prefix: str) -> bytes:
    """Update the hashes of rewritten files in a list; the other hashes do not change.

    Args:
        path: the path of the list.
        data: its content, already rewritten for the new prefix.
        rewritten: the new entries of rewritten files, by path.
        prefix: the new prefix; a RECORD may use it for files outside ``site-packages``.
    """
    return _conda(data, rewritten) if path.endswith(".json") else _record(path, data, rewritten, prefix)


def _record(path: str, data: bytes, rewritten: Mapping[str, Entry], prefix: str) -> bytes:
    site = posixpath.dirname(posixpath.dirname(path))
    lines = []
    for line in data.decode("utf-8", "surrogateescape").splitlines(keepends=True):
        row = next(csv.reader([line]), [])
        entry = rewritten.get(record_path(row[0], site, prefix)) if len(row) == 3 and row[1] else None
        end = line[len(line.rstrip("\r\n")) :]
        lines.append(record_row(row[0], bytes.fromhex(entry.sha256), entry.size, end=end) if entry else line)
    return "".join(lines).encode("utf-8", "surrogateescape")


def record_row(name: str, sha256: bytes, size: int, *, end: str) -> str:
    """A row of a RECORD for a file; ``end`` is the line end."""
    digest = urlsafe_b64encode(sha256).rstrip(b"=").decode()
    row = io.StringIO()
    csv.writer(row, lineterminator=end).writerow([name, f"sha256={digest}", size])
    return row.getvalue()


def _conda(data: bytes, rewritten: Mapping[str, Entry]) -> bytes:
    try:
        package = parse_object(data, limit=PACKAGE_FILE)
        listed = package["paths_data"]["paths"]
        changed = False
        for one in listed:
            entry = rewritten.get(one["_path"])
            if entry is not None and one.get("sha256_in_prefix") != entry.sha256:
                one["sha256_in_prefix"] = entry.sha256
                changed = True
    except (ValueError, KeyError, TypeError, AttributeError):
        return data  # not a package's file; conda ignores it too
    return json.dumps(package, indent=2, sort_keys=True).encode() if changed else data
