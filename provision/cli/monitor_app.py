"""The screen of ``clusterctl monitor``: panes with lines that ``summaries/monitor.py`` makes. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical
from textual.widgets import Input

from provision.cli.monitor_panes import Choice, Pane, Question, Text, Watching, copy
from provision.errors import ClusterctlError
from provision.output_text import Line, clean
from provision.summaries.monitor import (
    TABLES,
    event_lines,
    head_lines,
    log_lines,
    ranks_of,
)
from provision.summaries.monitor_help import help_lines, hint_line
from provision.summaries.monitor_plots import loss_plot, speed_plot, speed_title
from provision.summaries.words import Say, english

if TYPE_CHECKING:
    from provision.run.view import View

WIDE = 110  # columns from which log and events are side by side
PANES = 8  # logs of ranks at once
LEAST = 36  # columns of a log beside another one


@dataclass(frozen=True)
class Actions:
    """What keys do. All are called in a thread, and return what to show.

    Attributes:
        stop: stops the run; ``True``: after it saves.
        save: lets the run save a checkpoint and continue.
        diagnose: the diagnosis.
        runs: the runs to choose from, each with its id and its line.
    """

    stop: Callable[[bool], str]
    save: Callable[[], str]
    diagnose: Callable[[], str]
    runs: Callable[[], Sequence[tuple[str, Line]]]


class Monitor(Watching[str]):
    """The screen. ``run`` returns the id of a run if the user wants to see another one.

    Args:
        look: returns what is known now.
        actions: what keys do.
        every: seconds between two refreshes.
        say: gives the words in the user's language.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit"),
        Binding("s", "stop(False)"),
        Binding("S", "stop(True)"),
        Binding("w", "save"),
        Binding("d", "diagnose"),
        Binding("c", "copy"),
        Binding("n", "runs"),
        Binding("g", "gpus"),
        Binding("e", "events"),
        Binding("r", "rank(1)"),
        Binding("R", "rank(0)"),
        Binding("p", "panes"),
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
    #logs { layout: grid; width: 2fr; }
    #logs Pane, #events { width: 1fr; border-top: solid ansi_default; }
    Pane:focus { border-title-style: reverse; }
    #keys { height: 1; }
    Input { height: 1; border: none; padding: 0; display: none; background: ansi_default; color: ansi_default; }
    ModalScreen { align: center middle; background: ansi_default; }
    #question, #text { border: solid ansi_default; width: 100%; height: 100%; max-width: 120; }
    #question { height: 7; max-width: 70; }
    #choice {
        border: solid ansi_default; width: 100%; height: 100%; max-width: 120; scrollbar-size: 1 1; overflow-x: hidden;
        background: ansi_default; color: ansi_default;
    }
    #choice > .option-list--option-highlighted { text-style: reverse; background: ansi_default; color: ansi_default; }
    """

    def __init__(self, look: Callable[[], View], actions: Actions, every: float = 2.0, say: Say = english) -> None:
        super().__init__(look, every, say)
        self._actions = actions
        self._ranks: tuple[int, ...] = ()  # whose logs are shown, each in its pane; none: all in one
        self._table = 0
        self._events = False
        self._words = ""

    def compose(self) -> ComposeResult:
        """The panes."""
        say = self._say
        yield Pane("head")
        yield Pane("nodes", say("nodes"))
        with Horizontal(id="plots"):
            yield Pane("loss", say("loss"))
            yield Pane("speed", say("tokens/s"))
        with Horizontal(id="bottom"):
            with Container(id="logs"):
                yield Pane("log", say("log"), follows=True)
                for place in range(1, PANES):
                    yield Pane(f"log{place}", follows=True)
            yield Pane("events", say("events"), follows=True)
        with Vertical(id="keys"):
            yield Input(id="search", placeholder=say("search the logs"))
            yield Input(id="ranks", placeholder=say("ranks, such as 0 3-5; nothing: all in one log"))
            yield Pane("hint")

    def on_mount(self) -> None:
        """Start refreshing."""
        self.query_one("#log").focus()
        self.look()
        self.set_interval(self._every, self.look)

    def draw(self) -> None:
        """Draw what is known."""
        view, panes = self._view, {pane.id: pane for pane in self.screen_stack[0].query(Pane)}
        if view is None or not panes:
            return
        say, (width, height) = self._say, self.size
        title, lines_of = TABLES[self._table]
        rows = lines_of(view, width, max(4, height - 20), say)
        low = height < 20  # a window with a few rows shows head, nodes and log
        panes["nodes"].styles.height = min(len(rows) + 1, max(2, height // 2 - 3 if not low else height // 3))
        panes["nodes"].border_title = say(title)
        plots = self.screen_stack[0].query_one("#plots")
        plots.display = not low
        plots.styles.height = max(6, min(16, height // 4 + 1))
        panes["speed"].display = width >= 60
        panes["events"].display = width >= WIDE or self._events
        head = head_lines(view, width, say)
        panes["head"].styles.height = len(head)
        panes["head"].put(head)
        panes["nodes"].put(rows)
        for name, lines in (("loss", loss_plot), ("speed", speed_plot)):
            panes[name].put(lines(view, *panes[name].size, say))
        panes["speed"].border_title = speed_title(view, say)
        self._draw_logs(view, [panes[name] for name in ("log", *(f"log{place}" for place in range(1, PANES)))])
        panes["events"].put(event_lines(view, say))
        panes["hint"].put([hint_line(width, say)])

    def _draw_logs(self, view: View, panes: Sequence[Pane]) -> None:
        """One log of all ranks, or one of each chosen rank side by side."""
        width = self.size.width
        logs = self.screen_stack[0].query_one("#logs")
        logs.display = width >= WIDE or not self._events
        room = width * 2 // 3 if width >= WIDE else width
        chosen: tuple[int | None, ...] = self._ranks or (None,)
        logs.styles.grid_size_columns = max(1, min(len(chosen), room // LEAST))
        for place, pane in enumerate(panes):
            pane.display = place < len(chosen)
            if pane.display:
                pane.put(log_lines(view, chosen[place], self._words))
                pane.border_title = self._log_title(chosen[place])

    def _log_title(self, rank: int | None) -> str:
        title = self._say("log") if rank is None else self._say("log of rank {}", rank)
        return clean(self._say("{}, with {}", title, repr(self._words)) if self._words else title).replace("[", "(")

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
        after = [rank for rank in ranks if not self._ranks or rank > self._ranks[0]]
        self._ranks = tuple(after[:1]) if forward else ()
        self.draw()

    def action_search(self) -> None:
        """Type the text to search."""
        self._type("#search")

    def action_panes(self) -> None:
        """Type the ranks whose logs are shown side by side."""
        self._type("#ranks")

    def _type(self, name: str) -> None:
        for field in self.query(Input):
            field.display = False
        self.query_one("#hint").display = False
        self.query_one(name, Input).display = True
        self.screen.set_focus(self.query_one(name, Input))  # at once: the next key may already be there

    def on_input_changed(self, event: Input.Changed) -> None:
        """Search, or choose ranks, while it is typed."""
        if event.input.id == "search":
            self._words = event.value
        else:
            self._ranks = ranks_of(event.value, PANES)
        self.draw()

    def on_input_submitted(self, _event: Input.Submitted) -> None:
        """Keep what was typed, and return to the log."""
        self._stop_typing()

    def action_end_search(self) -> None:
        """Show all lines again."""
        for field in self.query(Input):
            field.value = ""
        self._ranks = ()
        self._stop_typing()
        self.draw()

    def _stop_typing(self) -> None:
        for field in self.query(Input):
            field.display = False
        self.query_one("#hint").display = True
        self.query_one("#log").focus()

    def action_help(self) -> None:
        """Show the keys."""
        text = "\n".join(line.text for line in help_lines(self._say))
        self.push_screen(Text(self._say("help"), text, self._say))

    def action_runs(self) -> None:
        """Choose another run, and leave for it."""

        def show() -> None:
            runs = self._actions.runs()
            self.call_from_thread(self.push_screen, Choice(self._say("runs"), runs, self._say), self._leave_for)

        self._work(self._say("runs"), show)

    def _leave_for(self, run: str | None) -> None:
        if run is not None and (self._view is None or run != self._view.run):
            self.exit(result=run)

    def action_stop(self, save: bool) -> None:
        """Stop the run, after a question."""
        if not (view := self._live()):
            return
        text = self._say("Save a checkpoint and stop {}?" if save else "Stop {} on every node?", view.run)

        def answered(yes: bool | None) -> None:
            if yes:
                self.notify(self._say("stopping; this may take a while"), markup=False)
                self._show(self._say("stop"), lambda: self._actions.stop(save))

        self.push_screen(Question(text, self._say), answered)

    def action_save(self) -> None:
        """Let the run save a checkpoint and continue."""
        if self._live():
            self._show(self._say("save"), self._actions.save)

    def _live(self) -> View | None:
        """What is known of the run, if it is running; else says that it is not."""
        view = self._view
        if view is not None and not view.live:
            self.notify(self._say("the run is over: {}", self._say(view.state)), markup=False)
        return view if view is not None and view.live else None

    def action_diagnose(self) -> None:
        """Show the diagnosis."""
        self.notify(self._say("reading the logs of all nodes"), markup=False)
        self._show(self._say("diagnosis (c copies it)"), self._actions.diagnose)

    def action_copy(self) -> None:
        """Copy the diagnosis."""

        def work() -> None:
            text = clean(self._actions.diagnose())
            self.call_from_thread(lambda: self.notify(copy(self, text, self._say), markup=False))

        self.notify(self._say("reading the logs of all nodes"), markup=False)
        self._work(self._say("copy"), work)

    def _show(self, title: str, function: Callable[[], str]) -> None:
        """Call a function in a thread, and show its text."""

        def show() -> None:
            self.call_from_thread(self.push_screen, Text(title, clean(function()), self._say))

        self._work(title, show)

    def _work(self, title: str, function: Callable[[], None]) -> None:
        """Call a function in a thread, and show its error."""

        def work() -> None:
            try:
                function()
            except ClusterctlError as error:
                text = "\n".join(part for part in (str(error), error.hint and self._say("try: {}", error.hint)) if part)
                self.call_from_thread(self.push_screen, Text(title, clean(text), self._say))

        self.run_worker(work, thread=True, exclusive=True, group=title)
