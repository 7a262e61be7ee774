"""The screen of ``clusterctl monitor``: panes with lines that ``summaries/monitor.py`` makes. It decides nothing.

Lines are drawn as plain text: no text from a node is read as markup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Input

from provision.errors import ClusterctlError
from provision.output_text import Line, clean
from provision.summaries.monitor import (
    TABLES,
    event_lines,
    head_lines,
    log_lines,
    loss_plot,
    speed_plot,
    speed_title,
)

if TYPE_CHECKING:
    from textual import events

    from provision.run.view import View

WIDE = 110  # columns from which log and events are side by side
HELP = """\
q  quit; the run continues            s  stop the run (asks)
w  save a checkpoint and stop (asks)  d  diagnosis; there, c copies it
g  nodes, single GPUs, or network     e  log or events (narrow terminals)
r  log of the next rank, R: of all    /  search the log; Escape ends it
n  the next running run               ?  this help
Tab and arrow keys scroll the panes

GPUS has a sign for the use of each GPU. USE, MEM and TEMP are ranges over
the GPUs of a node, POWER is their sum. Agents take a sample every 10 s.
A GPU that is slowed down has a sign: T, t heat; B power brake; p power cap;
H hardware; c clocks set; s sync boost.
A log line with (x N) stands for N lines that differ only in their numbers.
Below a curve: R restart, H hang, C checkpoint, ! warning. Times are UTC."""


class Pane(ScrollView, can_focus=True):
    """Lines of text that scroll. It stays at its end while the user has not scrolled up, if it ``follows``."""

    def __init__(self, name: str, title: str = "", *, follows: bool = False) -> None:
        super().__init__(id=name)
        self.border_title = title
        self._follows = follows
        self._lines: Sequence[Line] = ()

    @property
    def text(self) -> str:
        """All its lines."""
        return "\n".join(line.text for line in self._lines)

    def put(self, lines: Sequence[Line]) -> None:
        """Replace the lines."""
        if lines == self._lines:
            return
        at_end = self.scroll_offset.y >= self.max_scroll_y
        self._lines = lines
        self.virtual_size = Size(max((len(line.text) for line in lines), default=0), len(lines))
        if self._follows and at_end:
            self.scroll_end(animate=False)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Draw a visible line."""
        left, top = self.scroll_offset
        if not 0 <= y + top < len(self._lines):
            return Strip.blank(self.size.width)
        text, style, _ = self._lines[y + top]
        strip = Strip([Segment(text, Style.parse(style) if style else None)])
        return strip.crop_extend(left, left + self.size.width, None)


class Question(ModalScreen[bool]):
    """Asks before something is done."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)"),
        Binding("n,escape,q,enter,ctrl+c", "answer(False)"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """One pane."""
        yield Pane("question", "confirm")

    def on_mount(self) -> None:
        """Show the question."""
        self.query_one(Pane).put([Line(self._text), Line(""), Line("y  yes      n  no", "bold")])

    def action_answer(self, answer: bool) -> None:
        """Close it."""
        self.dismiss(answer)


class Text(ModalScreen[None]):
    """Shows a text until a key closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("c", "copy"), Binding("escape,q,enter,ctrl+c", "close")]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title, self._text = title, text

    def compose(self) -> ComposeResult:
        """One pane."""
        yield Pane("text", self._title)

    def on_mount(self) -> None:
        """Show the text."""
        self.query_one(Pane).put([Line(line, hang=None) for line in self._text.split("\n")])
        self.query_one(Pane).focus()

    def action_copy(self) -> None:
        """Copy the text with OSC 52, which also works over ssh."""
        self.app.copy_to_clipboard(self._text)
        self.app.notify("copied, if the terminal allows it (OSC 52)", markup=False)

    def action_close(self) -> None:
        """Close it."""
        self.dismiss(None)


class Monitor(App[bool]):
    """The screen. ``run`` returns True if the user wants to see the next run.

    Args:
        look: returns what is known now.
        stop: stops the run; ``True``: after it saves. Returns the result as text.
        diagnose: returns the diagnosis as text.
        every: seconds between two refreshes.
    """

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit"),
        Binding("s", "stop(False)"),
        Binding("w", "stop(True)"),
        Binding("d", "diagnose"),
        Binding("n", "next"),
        Binding("g", "gpus"),
        Binding("e", "events"),
        Binding("r", "rank(1)"),
        Binding("R", "rank(0)"),
        Binding("slash", "search"),
        Binding("escape", "end_search"),
        Binding("question_mark", "help"),
    ]
    CSS = """
    Screen { layout: vertical; background: ansi_default; color: ansi_default; }
    Pane { background: ansi_default; color: ansi_default; scrollbar-size: 1 1; overflow-x: hidden; }
    #head { height: 2; }
    #nodes { border-top: solid ansi_default; overflow-x: auto; }
    #plots { height: 7; }
    #loss, #speed { width: 1fr; border-top: solid ansi_default; overflow-y: hidden; }
    #bottom { height: 1fr; }
    #log, #events { width: 1fr; border-top: solid ansi_default; }
    #log { width: 2fr; }
    Pane:focus { border-title-style: reverse; }
    #keys { height: 1; }
    #search { height: 1; border: none; padding: 0; display: none; background: ansi_default; color: ansi_default; }
    ModalScreen { align: center middle; background: ansi_default; }
    #question, #text { border: solid ansi_default; width: 100%; height: 100%; max-width: 120; }
    #question { height: 7; max-width: 70; }
    """

    def __init__(
        self,
        look: Callable[[], View],
        stop: Callable[[bool], str],
        diagnose: Callable[[], str],
        every: float = 2.0,
    ) -> None:
        super().__init__(ansi_color=True)
        self._look, self._stop, self._diagnose, self._every = look, stop, diagnose, every
        self._view: View | None = None
        self._rank: int | None = None
        self._table = 0
        self._events = False
        self._words = ""

    def compose(self) -> ComposeResult:
        """The panes."""
        yield Pane("head")
        yield Pane("nodes", "nodes")
        with Horizontal(id="plots"):
            yield Pane("loss", "loss")
            yield Pane("speed", "tokens/s")
        with Horizontal(id="bottom"):
            yield Pane("log", "log", follows=True)
            yield Pane("events", "events", follows=True)
        with Vertical(id="keys"):
            yield Input(id="search", placeholder="search the log")
            yield Pane("hint")

    def on_mount(self) -> None:
        """Start refreshing."""
        self.query_one("#log").focus()
        self.look()
        self.set_interval(self._every, self.look)

    def on_resize(self, _event: events.Resize) -> None:
        """Draw in the new size."""
        self.call_after_refresh(self.draw)

    def look(self) -> None:
        """Take what is known now."""
        self._view = self._look()
        self.draw()

    def draw(self) -> None:
        """Draw what is known."""
        view, panes = self._view, {pane.id: pane for pane in self.screen_stack[0].query(Pane)}
        if view is None or not panes:
            return
        width, height = self.size
        title, lines_of = TABLES[self._table]
        rows = lines_of(view, width, max(4, height - 20))
        low = height < 20  # a window with a few rows shows head, nodes and log
        panes["nodes"].styles.height = min(len(rows) + 1, max(2, height // 2 - 3 if not low else height // 3))
        panes["nodes"].border_title = title
        plots = self.screen_stack[0].query_one("#plots")
        plots.display = not low
        plots.styles.height = max(6, min(16, height // 4 + 1))
        panes["speed"].display = width >= 60
        panes["events"].display = width >= WIDE or self._events
        panes["log"].display = width >= WIDE or not self._events
        head = head_lines(view, width)
        panes["head"].styles.height = len(head)
        panes["head"].put(head)
        panes["nodes"].put(rows)
        for name, lines in (("loss", loss_plot), ("speed", speed_plot)):
            panes[name].put(lines(view, *panes[name].size))
        panes["speed"].border_title = speed_title(view)
        panes["log"].put(log_lines(view, self._rank, self._words))
        panes["log"].border_title = self._log_title()
        panes["events"].put(event_lines(view))
        panes["hint"].put(
            [Line("q quit  s stop  w save  d diagnosis  g GPUs  e events  r rank  / search  ? help", "dim")]
        )

    def _log_title(self) -> str:
        rank = "log" if self._rank is None else f"log of rank {self._rank}"
        return clean(f"{rank}, with {self._words!r}" if self._words else rank).replace("[", "(")

    def action_next(self) -> None:
        """Leave for the next running run."""
        self.exit(result=True)

    def action_gpus(self) -> None:
        """Show single GPUs, the network, or nodes again."""
        self._table = (self._table + 1) % len(TABLES)
        self.draw()

    def action_events(self) -> None:
        """Show events instead of the log, where there is no place for both."""
        self._events = not self._events
        self.draw()

    def action_rank(self, forward: int) -> None:
        """Show the log of the next rank, or of all."""
        ranks = self._view.ranks if self._view else ()
        after = [rank for rank in ranks if self._rank is None or rank > self._rank]
        self._rank = after[0] if forward and after else None
        self.draw()

    def action_search(self) -> None:
        """Type the text to search."""
        field, hint = self.query_one("#search", Input), self.query_one("#hint")
        field.display, hint.display = True, False
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Search while the text is typed."""
        self._words = event.value
        self.draw()

    def on_input_submitted(self, _event: Input.Submitted) -> None:
        """Keep the search, and return to the log."""
        self._leave_search()

    def action_end_search(self) -> None:
        """Show all lines again."""
        self.query_one("#search", Input).value = ""
        self._leave_search()

    def _leave_search(self) -> None:
        self.query_one("#search", Input).display = False
        self.query_one("#hint").display = True
        self.query_one("#log").focus()

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(Text("help", HELP))

    def action_stop(self, save: bool) -> None:
        """Stop the run, after a question."""
        view = self._view
        if view is None:
            return
        if not view.live:
            self.notify(f"the run is {view.state}", markup=False)
            return
        text = f"Save a checkpoint and stop {view.run}?" if save else f"Stop {view.run} on every node?"

        def answered(yes: bool | None) -> None:
            if yes:
                self.notify("stopping; this may take a while", markup=False)
                self._work("stop", lambda: self._stop(save))

        self.push_screen(Question(text), answered)

    def action_diagnose(self) -> None:
        """Show the diagnosis."""
        self.notify("reading the logs of all nodes", markup=False)
        self._work("diagnosis (c copies it)", self._diagnose)

    def _work(self, title: str, function: Callable[[], str]) -> None:
        """Call a function in a thread, and show its text."""

        def work() -> None:
            try:
                text = function()
            except ClusterctlError as error:
                text = "\n".join(part for part in (str(error), error.hint and f"try: {error.hint}") if part)
            self.call_from_thread(self.push_screen, Text(title, clean(text)))

        self.run_worker(work, thread=True, exclusive=True, group=title)
