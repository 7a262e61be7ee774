"""Copies the files of one checkpoint from other nodes to this one, and makes room for them."""

from __future__ import annotations

import os
import threading
from typing import Any, Callable, Dict, Optional, Tuple

from ..checkpoints.names import COPIES
from ..contract.plan import Copies
from ..link import CopyError
from ..link.copies import FASTEST, Wanted
from ..run_files import NodePlan
from . import held
from .choices import Generation, Room, to_remove

TRIES = 3  # of a copy
PAUSE = 5.0  # seconds between them

Files = Dict[str, Tuple[int, int, int]]  # by path below the checkpoint: size, modification time, the rank that has it


class Copier:
    """Copies to one node.

    Args:
        plan: the node's plan, with an output folder.
        link: the agents' link.
        closed: ends a copy that is running.
        pace: the bytes per second that are known before a copy, or None.
        begin: called before each try.
        on_bytes: called with the number of bytes of each piece.
    """

    def __init__(
        self,
        plan: NodePlan,
        link: Any,
        closed: threading.Event,
        *,
        pace: Callable[[], Optional[int]] = lambda: None,
        begin: Callable[[], None] = lambda: None,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        assert plan.output is not None
        self._output, self._link, self._closed = plan.output, link, closed
        self._copies = plan.data.copies or Copies()
        self._pace, self._begin, self._on_bytes = pace, begin, on_bytes

    def copy(self, generation: Generation, files: Files, kept: Optional[str]) -> int:
        """Copy the files of a checkpoint. Returns the number of bytes. ``kept``: a folder of copies that stays.

        Raises:
            CopyError, OSError: not all of them could be copied.
        """
        output = self._output
        held.begin(output, generation)
        folder = held.folder_of(generation)
        total = [0]

        def on_bytes(count: int) -> None:
            total[0] += count
            self._on_bytes(count)

        def done(wanted: Wanted, digest: str) -> None:
            name = wanted.target[len(folder) + 1 :]
            held.record(output, generation, name, held.Recorded(wanted.size, files[name][1], digest))

        for left in range(TRIES - 1, -1, -1):
            have = next((copy.files for copy in held.read(output) if copy.folder == folder), {})
            missing = {name: file for name, file in files.items() if have.get(name, (0, 0))[:2] != file[:2]}
            self._make_room(folder, kept, sum(size for size, _, _ in missing.values()))
            pace = self._pace() or FASTEST
            base = "" if generation.single else generation.name + "/"
            wanted = [
                Wanted("%s/%s" % (folder, name), size, rank, generation.name if generation.single else base + name, "",
                       mtime, pace)
                for name, (size, mtime, rank) in sorted(missing.items())
            ]  # fmt: skip
            self._begin()
            try:
                self._link.fetch(wanted, lambda: not self._closed.is_set(), on_bytes, done)
                break
            except CopyError:
                if not left or self._closed.wait(PAUSE):
                    raise
        return total[0]

    def _make_room(self, folder: str, kept: Optional[str], needed: int) -> None:
        """Remove old copies, so that ``needed`` bytes fit.

        Raises:
            OSError: they do not fit.
        """
        output = self._output
        found = os.statvfs(output)
        room = Room(self._copies.space, found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
        protected = {folder} | ({kept} if kept else set())
        removed, lacking = to_remove(held.kept(output), needed, protected, room)
        if lacking is not None:
            limit = "the disk must keep a tenth free" if room.space is None else "--copies-space is %d" % room.space
            raise OSError(
                "it needs %d bytes in %s, and %d of them do not fit (%s). Free some space, or resume with "
                "a larger --copies-space or with --copies 0" % (needed, output / COPIES, lacking, limit)
            )
        for each in removed:
            held.remove(output, each)
