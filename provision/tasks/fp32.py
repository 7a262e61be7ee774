"""One set of fp32 weights from a DeepSpeed checkpoint, made on a node with the packed environment's own DeepSpeed.

The parts that other nodes have written are here already; those that the node lacks are sent to it. It works in a folder
of its own, which goes again; the run's checkpoint stays as it is.
"""

from __future__ import annotations

import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from provision.errors import NodesFailedError
from provision.model import Emit, StageFinished, StageStarted
from provision.render import render
from provision.tasks.fetch import fetch, lacking, listed

if TYPE_CHECKING:
    from provision.model import Remote

_STAGE = "fp32"
_PIECE = 1 << 20
_DEADLINE = 4 * 3600.0  # a model of many billion parameters is read and written in full
_REMOVE_DEADLINE = 120.0


def weights(
    remote: Remote,
    run: str,
    checkpoint: str,
    here: Path,
    foreign: Sequence[str],
    *,
    tag: str,
    to: Path,
    emit: Emit,
) -> None:
    """Make the weights and bring them here.

    Args:
        remote: rank 0's node.
        run: the run's folder there.
        checkpoint: the checkpoint's folder there.
        here: the checkpoint's folder here, with the parts of all nodes.
        foreign: files below the output folder that came from other nodes.
        tag: the checkpoint's name where it lies in DeepSpeed's own layout, else "".
        to: the folder for the weights here.
        emit: is told about the progress.

    Raises:
        NodesFailedError: DeepSpeed's tool failed there.
    """
    began = time.monotonic()
    name = remote.node.name
    emit(StageStarted(_STAGE, f"Making fp32 weights on {name}", None, "bytes"))
    inside = [Path(each).relative_to(here.name).as_posix() for each in foreign if each.startswith(f"{here.name}/")]
    script = render("run/to_fp32.sh.j2", run=run, checkpoint=checkpoint, tag=tag)
    try:
        result = remote.run(script, stdin=_tar(here, sorted(inside)), deadline=_DEADLINE)
        if result.rc != 0:
            raise NodesFailedError(
                f"the fp32 weights could not be made on {name}; the checkpoint itself is here",
                reasons={name: "\n".join(result.err.strip().splitlines()[-5:]) or f"exit status {result.rc}"},
                hint=f"by hand: python -m deepspeed.utils.zero_to_fp32 {here} OUTPUT",
            )
        there = listed(remote, f"{run}/fp32/weights")
        fetch(remote, f"{run}/fp32/weights", lacking(there, to), to)
    finally:
        remote.run(render("run/remove.sh.j2", folder=f"{run}/fp32"), deadline=_REMOVE_DEADLINE)
    emit(StageFinished(_STAGE, time.monotonic() - began, {name: "done"}))


def _tar(folder: Path, names: Sequence[str]) -> Iterator[bytes]:
    """Files of a folder as a tar; in GNU format, which every tar reads."""
    for name in names:
        path = folder / name
        info = tarfile.TarInfo(name)
        info.size, info.mtime = path.stat().st_size, int(path.stat().st_mtime)
        yield info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        left = info.size
        with path.open("rb") as file:
            while left and (piece := file.read(min(_PIECE, left))):
                left -= len(piece)
                yield piece
        yield bytes(left + -info.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
