"""Draws styled lines and the stages' bars on a terminal with rich. Imported only if there is a terminal."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task
from rich.table import Column
from rich.text import Text

from provision.output_text import Meter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Screen(Console):
    """rich's console, which raises an error when the reader closes the pipe, instead of exiting."""

    def on_broken_pipe(self) -> None:
        """Raise the error of a write to a pipe without a reader."""
        self.quiet = True
        raise BrokenPipeError

    def show(self, text: str, style: str) -> None:
        """Print text that is already wrapped."""
        self.print(Text(text, style=style), soft_wrap=True)

    def bars(self, now: Callable[[], float], *, unicode: bool) -> Progress:
        """The display of running stages; each of its tasks has the field ``meter``."""
        return Progress(
            SpinnerColumn("dots" if unicode else "line"),
            _Cell(Meter.label, Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=10),
            _Cell(lambda meter: meter.numbers(now()), Column(no_wrap=True)),
            console=self,
            transient=True,
            expand=True,
            redirect_stdout=False,
            redirect_stderr=False,
            refresh_per_second=5,  # often enough for the eye, rarely enough for a slow connection
        )


def screen(file: TextIO, environ: Mapping[str, str]) -> Screen:
    """The screen of a terminal, coloured unless ``NO_COLOR`` is set."""
    return Screen(
        file=file,
        force_terminal=True,
        color_system=None if environ.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
        width=None if environ.get("COLUMNS", "80").strip("0") else shutil.get_terminal_size().columns,
    )


class _Cell(ProgressColumn):
    """A column with text from a stage's meter."""

    def __init__(self, text: Callable[[Meter], str], column: Column) -> None:
        super().__init__(column)
        self._text = text

    def render(self, task: Task) -> Text:
        return Text(self._text(task.fields["meter"]))
