"""Bring zstd to nodes that lack it, so that they receive compressed bytes too.

The program is this machine's own ``zstd`` with its dynamic loader and its libraries, so the node's libraries do not
matter. It is in the transfer's folder and is deleted with it. A node uses it only after it has decompressed a sample.
"""

from __future__ import annotations

import functools
import io
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import zstandard

from provision.render import render
from provision.ssh.fanout import fan_out
from provision.tool.libraries import dynamic, reader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from provision.model import Node
    from provision.ssh.remote import Connections

BRING_FROM = 64 << 20  # unpacked bytes that a node lacks; for fewer, zstd's own 2 MB are not worth it
_SAMPLE = "zstd works"
_DEADLINE = 120.0
_LIBRARY = re.compile(r"=> (/.+) \(0x[0-9a-f]+\)$", re.MULTILINE)


def bring(connections: Connections, nodes: Sequence[Node], folder: str) -> tuple[frozenset[str], int]:
    """Put zstd into a transfer's folder on nodes.

    Args:
        connections: the connections to the nodes.
        nodes: nodes without zstd.
        folder: the transfer's own folder there, see ``Target.folder``.

    Returns:
        The names of the nodes on which it works, and the bytes sent to all of them together. It works nowhere if this
        machine has no zstd, or has another architecture.
    """
    archive = packed(shutil.which("zstd")) if nodes else b""
    if not archive:
        return frozenset(), 0
    script = render("transfer/bring_zstd.sh.j2", folder=folder, sample=_SAMPLE)

    def put(node: Node) -> bool:
        return connections[node].run(script, stdin=[archive], deadline=_DEADLINE).rc == 0

    working = frozenset(name for name, works in fan_out(nodes, put).items() if works is True)
    return working, len(archive) * len(nodes)


@functools.cache
def packed(program: str | None) -> bytes:
    """A tar.gz of zstd, its loader and libraries, a script ``run`` that starts it, and a sample; empty without zstd."""
    if program is None:
        return b""
    found = dynamic(reader(Path(program)))
    if found is None:  # a script, or a program of another kind of system
        return b""
    start = '"${0%/*}/zstd"'
    paths = {"zstd": Path(program)}
    if found.loader:
        start = f'"${{0%/*}}/loader" --library-path "${{0%/*}}" {start}'
        listed = subprocess.run([found.loader, "--list", program], capture_output=True, text=True, check=False)
        paths |= {Path(path).name: Path(path) for path in _LIBRARY.findall(listed.stdout)}
        paths["loader"] = Path(found.loader)
    files = {name: path.read_bytes() for name, path in paths.items()}
    files["run"] = f'#!/bin/sh\nexec {start} "$@"\n'.encode()
    files["sample"] = zstandard.compress(_SAMPLE.encode())
    return _archive(files)


def _archive(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.mode, member.size = 0o700, len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()
