"""Draws the monitor's screen into an SVG file: ``clusterctl monitor RUN --picture FILE.svg``, without a terminal.

For documentation and for messages to colleagues::

    clusterctl monitor RUN --picture out.svg --size 120x40 --press g

``--size`` is COLUMNSxROWS, 120x40 by default. ``--press`` are keys that are pressed first, separated by spaces, with
Textual's names (``slash``, ``escape``). The picture is drawn when every node has answered once, or after 30 s. A run
that is over works too. The file needs no network: Rich's links to fonts are removed, so a viewer uses its own
monospaced font, and each text has its width in the file.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from textual.pilot import Pilot

    from provision.cli.monitor_app import Monitor
    from provision.tasks.watch import Watch

_PATIENCE = 30.0  # seconds for the first answers
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def draw(app: Monitor, watched: Watch, file: Path, size: tuple[int, int], keys: str) -> None:
    """Run the screen without a terminal until its picture is written."""

    async def pilot(hands: Pilot[object]) -> None:
        await asyncio.to_thread(watched.answered.wait, _PATIENCE)
        app.look()
        for key in keys.split():
            await hands.press(key)
            await hands.pause()
        await app.workers.wait_for_complete()
        await hands.pause()
        drawn.append(svg_of(app))
        app.exit()

    drawn: list[str] = []
    app.run(headless=True, size=size, auto_pilot=pilot)
    file.write_text("".join(drawn), encoding="utf-8")


def svg_of(app: Monitor) -> str:
    """The screen as SVG that refers to no other file."""
    return _FONTS.sub("", app.export_screenshot(title="clusterctl monitor", simplify=True))
