"""Shows events and results. Only this module and ``provision.cli`` print.

- stdout: results (``result``, ``show_steps``, ``show_findings``) and the lines of a training log.
- stderr: progress, notices, findings during a command, and errors.

So ``clusterctl … > file`` keeps results only. With ``--json``, stdout is exactly one JSON object, even when the command
fails. On a terminal, progress is a bar with an ETA. Elsewhere (a pipe, CI, ``TERM=dumb``) it is a line when a stage
starts, one when it finishes, and at most one every ten seconds between. ``NO_COLOR`` is respected.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from provision import model
from provision.hints import complete, complete_fields
from provision.output_text import (
    Line,
    Meter,
    clean,
    error_data,
    error_lines,
    finding_lines,
    finished_lines,
    plain,
    step_lines,
    wrap,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from rich.progress import Progress, TaskID

    from provision.errors import ClusterctlError
    from provision.screen import Screen

LINE_EVERY = 10.0  # seconds between two progress lines of a stage where no bar can be drawn


class Reporter:
    """Shows events to the user, and the command's result. Events may come from any thread.

    A display that is closed (a terminal, ``| head``) never stops the command: events are then dropped. Only showing a
    result raises ``BrokenPipeError``.
    """

    def __init__(
        self,
        *,
        as_json: bool = False,
        quiet: bool = False,
        out: TextIO | None = None,
        err: TextIO | None = None,
        environ: Mapping[str, str] = os.environ,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = _Stream(out or sys.stdout, environ)
        self._err = _Stream(err or sys.stderr, environ)
        self._bars = self._err.console is not None and environ.get("CI", "") in {"", "0", "false"}
        self._json, self._quiet, self._now = as_json, quiet, now
        self._lock = threading.RLock()
        self._meters: dict[str, Meter] = {}
        self._tasks: dict[str, TaskID] = {}
        self._live: Progress | None = None
        self._data: Mapping[str, Any] | None = None  # of --json, until the command finishes
        self._log_node: str | None = None
        self._log_prefix = False
        self.typed = model.UNTYPED  # completes hints

    def configure(
        self, *, as_json: bool = False, quiet: bool = False, typed: model.CommandLine = model.UNTYPED
    ) -> None:
        """Apply the options of the command line."""
        self._json, self._quiet, self.typed = as_json, quiet, typed

    def close(self) -> None:
        """Remove the progress from the screen. Must be called at the end, even after an error."""
        with self._lock, suppress(OSError):
            self._stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops drawing during a question to the user; events wait for the answer."""
        with self._lock:
            self._stop()
            try:
                yield
            finally:
                self._restart()

    # --- events --------------------------------------------------------------------------------

    def __call__(self, event: model.Event) -> None:
        """Show one event."""
        with self._lock, suppress(OSError):
            match event:
                case model.StageStarted():
                    self._started(event)
                case model.Progress():
                    self._progress(event)
                case model.StageFinished():
                    self._finished(event)
                case model.LogLine():
                    self._log(event)
                case model.Found(finding):
                    if not self._quiet or finding.verdict in {"WARN", "FAIL"}:
                        self._err.write(finding_lines([replace(finding, fix=complete(self.typed, finding.fix))]))
                case model.Notice(notice, level):
                    text = complete(self.typed, notice)
                    if level == "warning":
                        self._err.write([Line(f"warning: {clean(text)}", "yellow")])
                    elif not self._quiet:
                        self._err.write([Line(clean(text))])

    def warn(self, text: str) -> None:
        """A warning to the user."""
        self(model.Notice(text, "warning"))

    def _started(self, event: model.StageStarted) -> None:
        meter = self._meters[event.stage] = Meter(event, self._now())
        if self._quiet:
            return
        if not self._bars:
            self._err.write([Line(f"{meter.title} ...")])
            return
        self._restart()
        self._draw(event.stage, meter)

    def _progress(self, event: model.Progress) -> None:
        if event.stage not in self._meters:
            self._started(model.StageStarted(event.stage, event.stage, event.total))
        meter, now = self._meters[event.stage], self._now()
        meter.update(event, now)
        if self._quiet:
            return
        if self._live:
            self._live.update(self._tasks[event.stage], completed=meter.done, total=meter.total)
        elif not self._bars and now - meter.printed >= LINE_EVERY:
            meter.printed = now
            self._err.write([meter.line(now)])

    def _finished(self, event: model.StageFinished) -> None:
        meter = self._meters.pop(event.stage, None)
        title = meter.title if meter else event.stage
        if self._live and event.stage in self._tasks:
            self._live.remove_task(self._tasks.pop(event.stage))
        if not self._meters:
            self._stop()
        if self._quiet:
            return
        marks = (("✓", "!", "✗") if self._err.unicode else ("*", "!", "x")) if self._bars else None
        nodes = meter.total if meter and meter.unit == "nodes" else None
        self._err.write(finished_lines(title, event, marks, nodes))

    def _log(self, event: model.LogLine) -> None:
        if self._quiet:
            return
        if self._log_node not in {None, event.node}:
            self._log_prefix = True
        self._log_node = event.node
        source = event.node if event.rank is None else f"{event.node}/{event.rank}"
        lines = [
            Line(f"{source} | {row}" if self._log_prefix else row, hang=None) for row in clean(event.line).split("\n")
        ]
        if self._json or (self._live and self._out.console is not None):
            self._err.write(lines)  # above the bar when both are on the screen
        else:
            self._out.write(lines)

    # --- results -------------------------------------------------------------------------------

    def show_error(self, error: ClusterctlError) -> None:
        """Print what failed on which nodes and the next command; with ``--json``, also as an object on stdout."""
        error.complete(lambda text: complete(self.typed, text))
        with self._lock:
            self._stop()
            with suppress(OSError):
                self._err.write(error_lines(error))
            if self._json:
                self._data = {**(self._data or {}), **error_data(error)}
                self.finish()

    def result(self, data: Mapping[str, Any], text: str = "") -> None:
        """Show the command's result: ``text``, or with ``--json`` ``data``, which ``finish`` prints."""
        if self._json:
            self._data = {**(self._data or {}), **data}
        elif text:
            self.show([Line(clean(row)) for row in complete(self.typed, text).split("\n")])

    def finish(self) -> None:
        """Print the result and the error of ``--json`` as one object, when the command has finished."""
        with self._lock:
            self._stop()
            data, self._data = self._data, None
            if data is not None:
                shown = complete_fields(self.typed, plain(data))
                self._out.write([Line(json.dumps(shown, indent=2, allow_nan=False), hang=None)], raw=True)

    def show(self, lines: Iterable[Line]) -> None:
        """Print lines of a result; with ``--json``, nothing."""
        with self._lock:
            self._stop()
            if not self._json:
                self._out.write(lines)

    def show_steps(self, results: Mapping[str, tuple[model.StepResult, ...]]) -> None:
        """Print a table of the steps' results."""
        self.show(step_lines(results))

    def show_findings(self, findings: Iterable[model.Finding]) -> None:
        """Print all findings of a check, folded over the nodes."""
        self.show(finding_lines(findings))

    # --- the screen ----------------------------------------------------------------------------

    def _restart(self) -> None:
        if self._live is None and self._bars and not self._quiet:
            assert self._err.console is not None
            self._live = self._err.console.bars(self._now, unicode=self._err.unicode)
            self._live.start()
            for stage, meter in self._meters.items():
                self._draw(stage, meter)

    def _draw(self, stage: str, meter: Meter) -> None:
        if self._live and stage not in self._tasks:
            self._tasks[stage] = self._live.add_task(meter.title, total=meter.total, completed=meter.done, meter=meter)

    def _stop(self) -> None:
        live, self._live = self._live, None
        self._tasks.clear()
        if live:
            live.stop()


class _Stream:
    """stdout or stderr: styled and wrapped on a terminal, bare text elsewhere."""

    def __init__(self, file: TextIO, environ: Mapping[str, str]) -> None:
        self.file = file
        self.console: Screen | None = None  # only on a terminal
        if file.isatty() and environ.get("TERM", "") not in {"dumb", "unknown"}:
            from provision.screen import screen  # noqa: PLC0415 - a pipe does not need rich

            self.console = screen(file, environ)

    @property
    def unicode(self) -> bool:
        return "utf" in (getattr(self.file, "encoding", None) or "").lower()

    def write(self, lines: Iterable[Line], *, raw: bool = False) -> None:
        try:
            self._write(lines, raw=raw)
        except BrokenPipeError:
            raise
        except OSError as error:  # a full disk: the error must name the stream
            raise OSError(error.errno, error.strerror, getattr(self.file, "name", "output").strip("<>")) from error

    def _write(self, lines: Iterable[Line], *, raw: bool) -> None:
        encoding = getattr(self.file, "encoding", None) or "utf-8"
        for line in lines:
            text = line.text.encode(encoding, "backslashreplace").decode(encoding)
            if self.console is None or raw:
                self.file.write(text + "\n")
            else:
                rows = wrap(line._replace(text=text), self.console.width)
                self.console.show("\n".join(rows), line.style)
        self.file.flush()
