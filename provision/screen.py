"""A terminal, drawn with rich: styled lines and the bars of the stages. Imported only where there is one."""

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
    """rich's console, but a reader that went away is an error for the caller, not the end of the process."""

    def on_broken_pipe(self) -> None:
        """Raise what a write to a pipe without a reader raises."""
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
            refresh_per_second=5,  # often enough for the eye, seldom enough for a slow line
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
    """What a stage's meter says at this moment."""

    def __init__(self, say: Callable[[Meter], str], column: Column) -> None:
        super().__init__(column)
        self._say = say

    def render(self, task: Task) -> Text:
        return Text(self._say(task.fields["meter"]))
