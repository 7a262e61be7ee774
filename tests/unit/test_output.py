"""What people see: on a terminal, in a pipe, with --json and --quiet."""

# ruff: noqa: E501 - output lines are not wrapped

from __future__ import annotations

import io
import json
import os
import re
import threading
from dataclasses import dataclass
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.errors import (
    ClusterctlError,
    InterruptedByUser,
    InventoryError,
    NodesFailedError,
    PreflightError,
    UsageError,
)
from provision.model import Finding, Found, LogLine, Notice, Progress, StageFinished, StageStarted, StepResult
from provision.output import Reporter
from provision.output_text import (
    Line,
    Meter,
    clean,
    clock,
    duration,
    finding_lines,
    finished_lines,
    plain,
    size,
    span,
    step_lines,
    wrap,
)


class Screen:
    """A reporter between two streams and a clock that is set by hand."""

    def __init__(
        self, *, terminal: bool = False, encoding: str = "utf-8", environ: dict[str, str] | None = None, **kwargs
    ):
        self.time = 100.0
        self.out, self.err = (_File(terminal=terminal, encoding=encoding) for _ in range(2))
        self.reporter = Reporter(out=self.out, err=self.err, environ=environ or {}, now=lambda: self.time, **kwargs)

    def emit(self, *events):
        for event in events:
            self.reporter(event)

    @property
    def shown(self) -> tuple[str, str]:
        self.reporter.close()
        return self.out.text(), self.err.text()


class _File(io.TextIOWrapper):
    def __init__(self, *, terminal: bool, encoding: str):
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)
        self._terminal = terminal

    def isatty(self):
        return self._terminal

    def text(self):
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


@pytest.fixture(autouse=True)
def terminal_of_80_columns(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


def on_screen(text: str) -> str:
    """What stays on a terminal that was written ``text`` to: a small one, enough for rich's bars."""
    rows, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if token == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif token == "\r":
            column = 0
        elif token == "\x1b[2K":
            rows[row] = ""
        elif re.fullmatch(r"\x1b\[\d*A", token):
            row = max(0, row - int(token[2:-1] or 1))
        elif not token.startswith("\x1b"):
            rows[row] = rows[row][:column].ljust(column) + token + rows[row][column + len(token) :]
            column += len(token)
    return "\n".join(line.rstrip() for line in rows).rstrip() + "\n"


STAGE = (
    StageStarted("send", "Send release 0123456789ab", 3_400_000_000, "bytes"),
    Progress("send", 400_000_000),
)


# --- a pipe ---------------------------------------------------------------------------------------


def test_a_stage_is_a_line_at_its_start_one_at_its_end_and_one_every_ten_seconds():
    screen = Screen()
    screen.emit(*STAGE)
    for _ in range(232):
        screen.time += 0.125
        screen.emit(Progress("send", 400_000_000 + round((screen.time - 100) * 50_000_000), note="gpu01 relays"))
    screen.emit(
        StageFinished("send", 83.2, {"gpu01": "deployed", "gpu02": "deployed", "gpu03": "unchanged"}, "120 chunks")
    )
    out, err = screen.shown
    assert out == ""
    assert err.splitlines() == [
        "Send release 0123456789ab ...",
        "Send release 0123456789ab: 26 %, 900 MB/3.4 GB, 50.0 MB/s, 0:50 left, gpu01 relays",
        "Send release 0123456789ab: 41 %, 1.4/3.4 GB, 50.0 MB/s, 0:40 left, gpu01 relays",
        "Send release 0123456789ab: done in 1 min 23 s, 120 chunks",
        "  gpu[01-02]: deployed",
        "  gpu03: unchanged",
    ]


def test_a_stage_in_which_nodes_failed():
    screen = Screen()
    states = {"gpu01": "ok", "gpu02": "unreachable: no route to host", "gpu03": "failed: tar\ndisk full"}
    screen.emit(StageStarted("probe", "Look at 3 nodes"), StageFinished("probe", 1.2, states))
    assert screen.shown[1].splitlines() == [
        "Look at 3 nodes ...",
        "Look at 3 nodes: failed on 2 of 3 nodes after 1.2 s",
        "  gpu01: ok",
        "  gpu02: unreachable: no route to host",
        "  gpu03:",
        "    failed: tar",
        "    disk full",
    ]


def test_progress_and_an_end_without_a_start():
    screen = Screen()
    screen.emit(Progress("x", 1, 2), StageFinished("x", 1.0), StageFinished("y", 2.0))
    assert screen.shown[1] == "x ...\nx: done in 1.0 s\ny: done in 2.0 s\n"


def test_notices_and_findings_are_shown():
    screen = Screen()
    finding = Finding("firewall", "gpu01", "FAIL", "29500/tcp is refused", "open", "ranks cannot meet", "open it")
    screen.emit(Notice("3 nodes"), Notice("mind\x1b[2J the gap", "warning"), Found(finding))
    assert screen.shown == (
        "",
        (
            "3 nodes\n"
            "warning: mind the gap\n"
            "FAIL    firewall  gpu01: 29500/tcp is refused (expected: open)\n"
            "        ranks cannot meet\n"
            "        try: open it\n"
        ),
    )


def test_log_lines_are_output_and_named_once_there_are_two_nodes():
    screen = Screen()
    screen.emit(LogLine("gpu01", 0, "one"), LogLine("gpu01", 1, "two"), LogLine("gpu02", 0, "three"))
    screen.emit(LogLine("gpu01", None, "10%\r50%\r\x1b[31mfour\x1b[0m"))
    assert screen.shown == ("one\ntwo\ngpu02/0 | three\ngpu01 | four\n", "")


def test_characters_outside_the_encoding_are_escaped():
    screen = Screen(encoding="ascii")
    screen.emit(LogLine("gpu01", 0, "für \udc80"))
    assert screen.shown[0] == "f\\xfcr \\udc80\n"


# --- --json and --quiet -----------------------------------------------------------------------------


@dataclass
class Thing:
    path: PurePosixPath
    loss: float


def test_json_is_one_object_on_stdout():
    screen = Screen(as_json=True)
    screen.emit(*STAGE, LogLine("gpu01", 0, "a log line"), StageFinished("send", 1.0))
    screen.reporter.show([Line("a table")])
    screen.reporter.show_steps({"gpu01": (StepResult("hosts", "ok"),)})
    screen.reporter.result({"things": (Thing(PurePosixPath("/a"), float("nan")),), "b": {"y", "x"}}, "as text")
    screen.reporter.finish()
    out, err = screen.shown
    assert json.loads(out) == {"things": [{"path": "/a", "loss": None}], "b": ["x", "y"]}
    assert "a log line" in err
    assert "table" not in err


def test_json_of_an_error():
    screen = Screen(as_json=True)
    screen.reporter.show_error(
        InventoryError("inventory.yaml has a mistake", problems=["prefix: is missing"], hint="h")
    )
    out, err = screen.shown
    assert json.loads(out) == {
        "error": {
            "message": "inventory.yaml has a mistake",
            "exit_code": 2,
            "hint": "h",
            "problems": ["prefix: is missing"],
        }
    }
    assert err == "error: inventory.yaml has a mistake\n  prefix: is missing\ntry: h\n"
    screen = Screen(as_json=True)
    screen.reporter.show_error(PreflightError("no", reasons={"a": "x"}))
    assert json.loads(screen.shown[0])["error"]["reasons"] == {"a": "x"}


def test_json_of_a_command_that_has_a_result_and_fails_is_one_object():
    screen = Screen(as_json=True)
    screen.reporter.result({"findings": []})
    screen.reporter.show_error(UsageError("no"))
    screen.reporter.finish()
    found = json.loads(screen.shown[0])
    assert (found["findings"], found["error"]["message"]) == ([], "no")


def test_quiet_keeps_results_warnings_and_errors():
    screen = Screen()
    screen.reporter.configure(quiet=True)
    screen.emit(*STAGE, StageFinished("send", 1.0), LogLine("a", 0, "log"), Notice("info"), Notice("mind", "warning"))
    screen.emit(Found(Finding("x", "a", "OK", "fine")), Found(Finding("x", "a", "WARN", "odd")))
    screen.reporter.result({}, "the result")
    screen.reporter.show_error(UsageError("no"))
    assert screen.shown == ("the result\n", "warning: mind\nWARN    x  a: odd\nerror: no\n")


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ClusterctlError("it broke"), "error: it broke\n"),
        (UsageError("no\x1b]0;title\x07 such file", hint="name one"), "error: no such file\ntry: name one\n"),
        (InterruptedByUser("interrupted; nothing is left running"), "interrupted; nothing is left running\n"),
        (
            InventoryError(
                "inventory.yaml has 2 mistakes", problems=["a (line 1): b", "c (line 2): d"], hint="correct it"
            ),
            "error: inventory.yaml has 2 mistakes\n  a (line 1): b\n  c (line 2): d\ntry: correct it\n",
        ),
        (
            NodesFailedError(
                "3 of 4 nodes failed, the others are done",
                reasons={"gpu01": "no route", "gpu02": "last lines:\n  boom", "gpu03": "no route"},
                hint="clusterctl deploy --limit gpu[01-03]",
            ),
            (
                "error: 3 of 4 nodes failed, the others are done\n"
                "  gpu[01,03]: no route\n"
                "  gpu02:\n"
                "    last lines:\n"
                "      boom\n"
                "try: clusterctl deploy --limit 'gpu[01-03]'\n"
            ),
        ),
        (ClusterctlError("first\nsecond"), "error: first\n  second\n"),
    ],
)
def test_errors(error, shown):
    screen = Screen()
    screen.reporter.show_error(error)
    assert screen.shown == ("", shown)


# --- a terminal -----------------------------------------------------------------------------------


def test_terminal_shows_a_bar_and_keeps_earlier_lines():
    screen = Screen(terminal=True)
    screen.emit(*STAGE)
    screen.time += 10
    screen.emit(Progress("send", 1_400_000_000, note="gpu01 relays"), LogLine("gpu01", 0, "above [/red] the bar"))
    screen.emit(StageStarted("unpack", "Unpack", 2), Progress("unpack", 1))
    with screen.reporter.paused():
        pass
    screen.emit(StageFinished("send", 83.2, {"gpu01": "deployed"}), StageFinished("unpack", 1.0, {"gpu01": "failed"}))
    screen.reporter.result({}, "the end")
    out, err = screen.shown
    assert "1.4/3.4 GB, 100 MB/s, 0:20 left" in err
    assert "Send release 0123456789ab: gpu0" in err
    assert "1/2" in err
    assert on_screen(err) == (
        "above [/red] the bar\n"
        "✓ Send release 0123456789ab (1 min 23 s)\n"
        "  gpu01: deployed\n"
        "! Unpack (1.0 s)\n"
        "  gpu01: failed\n"
    )
    assert "\x1b[32m" in err  # green, and the cursor is back:
    assert err.rindex("\x1b[?25h") > err.rindex("\x1b[?25l")
    assert all(len(line) <= 80 for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "\n", err).split("\n"))
    assert out == "the end\n"


def test_a_terminal_wraps_reasons_and_commands_between_words():
    screen = Screen(terminal=True, environ={"NO_COLOR": "1"})
    screen.reporter.show_error(
        NodesFailedError(
            "no", reasons={"gpu01": "word " * 20}, hint=" ".join(["in", "/known_hosts" * 7, *["node[01-02]"] * 7])
        )
    )
    assert screen.shown[1].splitlines() == [
        "error: no",
        "  gpu01: " + " ".join(["word"] * 14),
        "      " + " ".join(["word"] * 6),
        "try: in",
        "    " + "/known_hosts" * 7,
        "    " + " ".join(["node[01-02]"] * 6),
        "    node[01-02]",
    ]


def test_a_detached_stage_is_not_done():
    event = StageFinished("train", 96.0, {"node01": "running"}, running="is still running")
    assert finished_lines("Training r1", event, None) == finished_lines("Training r1", event, ("+", "-"))
    assert [line.text for line in finished_lines("Training r1", event, None)] == ["Training r1: is still running"]


def test_spans_have_one_unit():
    assert [span(seconds) for seconds in (59.9, 500, 7300, 180_000)] == ["59 s", "8 min", "2 h", "2 d"]


def test_no_color_means_none():
    screen = Screen(terminal=True, environ={"NO_COLOR": "1"})
    screen.emit(*STAGE, StageFinished("send", 1.0), Notice("mind", "warning"))
    assert not re.search(r"\x1b\[[0-9;]*m", screen.shown[1])


@pytest.mark.parametrize("environ", [{"CI": "true"}, {"TERM": "dumb"}])
def test_environment_can_disable_the_bar(environ):
    screen = Screen(terminal=True, environ=environ)
    screen.emit(*STAGE, StageFinished("send", 1.0))
    assert "Send release 0123456789ab ...\n" in screen.shown[1]
    assert "\x1b[?25l" not in screen.shown[1]


def test_a_terminal_without_unicode():
    screen = Screen(terminal=True, encoding="ascii", environ={"NO_COLOR": "1"})
    screen.emit(*STAGE, StageFinished("send", 1.0, {"a": "failed"}))
    assert on_screen(screen.shown[1]) == "x Send release 0123456789ab (1.0 s)\n  a: failed\n"


# --- that showing never ends the work ----------------------------------------------------------------


def test_closed_reader_ends_results_only():
    read, write = os.pipe()
    os.close(read)
    gone = os.fdopen(write, "w", buffering=1)
    reporter = Reporter(out=gone, err=gone, environ={})
    reporter(LogLine("a", 0, "x" * 10_000))
    reporter(Notice("text"))
    reporter.show_error(UsageError("no"))
    with pytest.raises(BrokenPipeError):
        reporter.result({}, "x" * 10_000)
    with pytest.raises(BrokenPipeError):
        gone.close()


def test_lines_from_many_threads_are_not_mixed():
    screen = Screen()
    threads = [
        threading.Thread(target=lambda n=n: [screen.emit(Notice(f"{n}" * 50)) for _ in range(50)]) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = screen.shown[1].splitlines()
    assert sorted(lines) == sorted(f"{n}" * 50 for n in range(8) for _ in range(50))


# --- the pieces -----------------------------------------------------------------------------------


def test_a_table_of_steps():
    ok, changed = StepResult("/etc/hosts block", "ok", "not shown"), StepResult("chrony", "would change")
    results = {f"gpu{index:02}": (ok, changed) for index in range(1, 33)}
    results["gpu31"] = (StepResult("/etc/hosts block", "failed", "tee: /etc/hosts:\n  read-only\n"),)
    assert [line.text for line in step_lines(results)] == [
        "step              state         nodes",
        "/etc/hosts block  ok            gpu[01-30,32]",
        "                  failed        gpu31",
        "    tee: /etc/hosts:",
        "      read-only",
        "chrony            would change  gpu[01-30,32]",
    ]
    assert step_lines({}) == []


def test_findings_that_differ_only_in_the_node_are_merged():
    findings = [Finding("clock", f"gpu0{index}", "OK", "in step") for index in (1, 2)]
    findings.append(Finding("clock", "gpu03", "UNKNOWN", "no answer"))
    assert [line.text for line in finding_lines(findings)] == [
        "OK      clock  gpu[01-02]: in step",
        "UNKNOWN clock  gpu03: no answer",
    ]
    screen = Screen()
    screen.reporter.show_findings(findings[:1])
    assert screen.shown == ("OK      clock  gpu01: in step\n", "")


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1234, "1.2 kB"), (123_456, "123 kB"), (999_999, "1.0 MB"), (3.4e9, "3.4 GB"), (7e14, "700.0 TB")],
)  # fmt: skip
def test_size(count, shown):
    assert size(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown", "short"),
    [
        (-1, "0.0 s", "0:00"),
        (0.44, "0.4 s", "0:01"),
        (9.96, "10 s", "0:10"),
        (59.6, "1 min 00 s", "1:00"),
        (185, "3 min 05 s", "3:05"),
        (3599.7, "1 h 00 min", "1:00:00"),
        (3725, "1 h 02 min", "1:02:05"),
    ],
)
def test_time_spans(seconds, shown, short):
    assert (duration(seconds), clock(seconds)) == (shown, short)


def test_speed_ignores_earlier_progress_and_a_stall_shows_none():
    meter = Meter(StageStarted("s", "S", 1000, "steps"), 0)
    assert meter.numbers(0) == "0/1000"
    meter.update(Progress("s", 500), 5)
    assert (meter.speed(5), meter.numbers(60)) == (None, "500/1000")
    meter.update(Progress("s", 510), 10)
    assert meter.speed(10) == 2.0
    assert meter.numbers(10) == "510/1000, 4:05 left"
    meter.update(Progress("s", 510), 60)
    assert (meter.speed(60), meter.numbers(60)) == (None, "510/1000")
    for second in range(61, 120):
        meter.update(Progress("s", 510 + 4 * (second - 60)), second)
    assert meter.speed(119) == pytest.approx(4, rel=0.05)
    unknown = Meter(StageStarted("s", "S"), 0)
    assert (unknown.numbers(0), unknown.label()) == ("", "S")
    assert unknown.line(90).text == "S: 1 min 30 s"
    unknown.update(Progress("s", 3, note="n"), 0)
    assert (unknown.line(0).text, unknown.label()) == ("S: 3, n", "S: n")


@given(st.text())
def test_clean_removes_all_control_characters(text):
    assert all(char == "\n" or char.isprintable() or ord(char) > 0x9F for char in clean(text))


@given(st.lists(st.from_regex("[a-z/.-]{1,90}", fullmatch=True)), st.integers(0, 6), st.integers(40, 200))
def test_wrap_loses_no_word_and_breaks_none(words, indent, width):
    line = Line(" " * indent + " ".join(words))
    rows = wrap(line, width)
    assert " ".join(rows).split() == words
    assert all(len(row) <= width or len(row.split()) == 1 for row in rows)


def test_plain_keeps_json_types():
    assert plain({"a": [1, 2.5, True, None, "x"], 3: float("inf")}) == {"a": [1, 2.5, True, None, "x"], "3": None}
