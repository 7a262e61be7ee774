"""The parts of the screens of ``monitor`` and ``top``: panes of lines, questions, texts and lists.

Lines are drawn as plain text: no text from a node is read as markup.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text as Plain
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from provision.output_text import Line
from provision.summaries.words import Say, columns, wrapped

if TYPE_CHECKING:
    from textual import events

    from provision.run.view import View

_COPIED = 50_000  # signs; some terminals drop an OSC 52 of more than 75 kB
_TMUX = 5.0  # seconds for tmux


Returned = TypeVar("Returned")


class Watching(App[Returned]):
    """An app that takes a view every few seconds and draws it, also in a new size.

    ``look`` returns what is known now, ``every`` are seconds between two refreshes, ``say`` gives the words in the
    user's language.
    """

    ENABLE_COMMAND_PALETTE = False

    def __init__(self, look: Callable[[], View], every: float, say: Say) -> None:
        super().__init__(ansi_color=True)
        self._look, self._every, self._say = look, every, say
        self._view: View | None = None

    def on_resize(self, _event: events.Resize) -> None:
        """Draw in the new size."""
        self.call_after_refresh(self.draw)

    def look(self) -> None:
        """Take what is known now."""
        self._view = self._look()
        self.draw()

    def draw(self) -> None:
        """Draw what is known."""
        raise NotImplementedError


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
        self.virtual_size = Size(max((columns(line.text) for line in lines), default=0), len(lines))
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

    def __init__(self, text: str, say: Say) -> None:
        super().__init__()
        self._text, self._say = text, say

    def compose(self) -> ComposeResult:
        """One pane."""
        yield Pane("question", self._say("confirm"))

    def on_mount(self) -> None:
        """Show the question."""
        self.query_one(Pane).put([Line(self._text), Line(""), Line(self._say("y  yes      n  no"), "bold")])

    def action_answer(self, answer: bool) -> None:
        """Close it."""
        self.dismiss(answer)


class Text(ModalScreen[None]):
    """Shows a text until a key closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("c", "copy"), Binding("escape,q,enter,ctrl+c", "close")]

    def __init__(self, title: str, text: str, say: Say) -> None:
        super().__init__()
        self._title, self._text, self._say = title, text, say

    def compose(self) -> ComposeResult:
        """One pane."""
        yield Pane("text", self._title)

    def on_mount(self) -> None:
        """Scroll with the arrow keys."""
        self.query_one(Pane).focus()

    def on_resize(self) -> None:
        """Show the text in the new width."""
        self.call_after_refresh(self._put)

    def _put(self) -> None:
        pane = self.query_one(Pane)
        pane.put([Line(line, hang=None) for line in wrapped(self._text, pane.size.width - 1)])

    def action_copy(self) -> None:
        """Copy the text."""
        self.app.notify(copy(self.app, self._text, self._say), markup=False)

    def action_close(self) -> None:
        """Close it."""
        self.dismiss(None)


class Choice(ModalScreen[str | None]):
    """A list of lines, of which one can be chosen: the result is its key."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,n,ctrl+c", "close")]

    def __init__(self, title: str, lines: Sequence[tuple[str, Line]], say: Say) -> None:
        super().__init__()
        self._title, self._lines, self._say = title, lines, say

    def compose(self) -> ComposeResult:
        """One list."""
        options = [Option(Plain(line.text, style=line.style, no_wrap=True)) for _, line in self._lines]
        chosen = OptionList(*options, id="choice")
        chosen.border_title = self._title
        yield chosen

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Close it with the chosen key."""
        self.dismiss(self._lines[event.option_index][0])

    def action_close(self) -> None:
        """Close it without a choice."""
        self.dismiss(None)


def copy(app: App[str], text: str, say: Say) -> str:
    """Copy a text, and return what was done.

    OSC 52 asks the terminal, which also works over ssh. tmux ignores it unless ``set-clipboard`` is ``on``; there, the
    text becomes tmux's newest buffer, and tmux passes it to its terminal.
    """
    text = text[:_COPIED]
    app.copy_to_clipboard(text)
    tmux = shutil.which("tmux") if os.environ.get("TMUX") else None
    if tmux is not None:
        try:
            command = [tmux, "load-buffer", "-w", "-"]
            subprocess.run(command, input=text.encode(), capture_output=True, check=True, timeout=_TMUX)
        except (OSError, subprocess.SubprocessError):
            return say("copied, if the terminal allows it (OSC 52)")
        return say("copied into tmux's buffer: its key ] pastes it")
    return say("copied, if the terminal allows it (OSC 52)")
