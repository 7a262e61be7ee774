"""The members of a bundle: their headers, and the index at the beginning that points to the manifest."""

from __future__ import annotations

import json

from provision.env.bundle import tar
from provision.env.bundle.manifest import FORMAT

INDEX = "clusterctl-bundle"
INDEX_SIZE = 512
MANIFEST = "manifest.json"
MTIME = 315532800  # 1980-01-01: equal environments give equal bundles, except for the time of packing


def member_header(name: str, size: int) -> bytes:
    """The tar header of a member."""
    return tar.header(name.encode(), size=size, mtime=MTIME)


def index_member(offset: int, size: int, sha256: str, split: int = 0) -> bytes:
    """The first member, header and data.

    Args:
        offset: of the manifest's data.
        size: of the manifest.
        sha256: of the manifest.
        split: bytes of a part; 0 for a bundle in one file.
    """
    index = {
        "magic": INDEX,
        "format": FORMAT,
        "manifest_offset": offset,
        "manifest_size": size,
        "manifest_sha256": sha256,
        "split": split,
    }
    return member_header(INDEX, INDEX_SIZE) + json.dumps(index).encode("ascii").ljust(INDEX_SIZE)
