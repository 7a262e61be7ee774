"""The screen of ``clusterctl top``: a pane with lines that ``summaries/top.py`` makes. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from provision.cli.monitor_panes import Pane, Watching
from provision.output_text import Line
from provision.summaries.top import TABLES, top_head
from provision.summaries.words import Say, english

if TYPE_CHECKING:
    from provision.run.view import View


class TopScreen(Watching[None]):
    """The screen: ``look`` returns what is known now, ``every`` are seconds between two refreshes.

    ``say`` gives the words in the user's language.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c,escape", "quit"),
        Binding("g,tab,right_square_bracket", "table(1)", priority=True),
        Binding("G,shift+tab", "table(-1)", priority=True),
    ]
    CSS = """
    Screen { layout: vertical; background: ansi_default; color: ansi_default; }
    Pane { background: ansi_default; color: ansi_default; scrollbar-size: 1 1; overflow-x: auto; }
    #head, #hint { height: 1; overflow-x: hidden; }
    #table { height: 1fr; border-top: solid ansi_default; }
    Pane:focus { border-title-style: reverse; }
    """

    def __init__(self, look: Callable[[], View], every: float = 2.0, say: Say = english) -> None:
        super().__init__(look, every, say)
        self._table = 0

    def compose(self) -> ComposeResult:
        """The panes."""
        yield Pane("head")
        yield Pane("table", self._say(TABLES[0][0]))
        yield Pane("hint")

    def on_mount(self) -> None:
        """Start refreshing."""
        self.query_one("#table").focus()
        keys = self._say("q quit  g nodes, GPUs, processes, network  arrow keys scroll")
        self.query_one("#hint", Pane).put([Line(keys, "dim")])
        self.look()
        self.set_interval(min(1.0, self._every), self.look)

    def draw(self) -> None:
        """Draw what is known."""
        view, table = self._view, self.query_one("#table", Pane)
        if view is None:
            return
        title, lines_of = TABLES[self._table]
        table.border_title = self._say(title)
        table.put(lines_of(view, self.size.width, self.size.height, self._say))
        self.query_one("#head", Pane).put([top_head(view, self.size.width, self._say)])

    def action_table(self, by: int) -> None:
        """Show another table."""
        self._table = (self._table + by) % len(TABLES)
        self.query_one("#table", Pane).scroll_home(animate=False)
        self.draw()
