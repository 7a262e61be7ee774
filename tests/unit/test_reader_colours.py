"""Lines with colours give the same readings as lines without, for any trainer."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for reader_logs; last, so that it hides no module

from reader_logs import LOGS, data, readings

from provision.diagnosis.reading import log_lines, progress
from trainer.reader import read

RED, PLAIN, BOLD, CLEAR = b"\x1b[1;31m", b"\x1b[0m", b"\x1b[38;5;208m", b"\x1b[2K"
TITLE = b"\x1b]0;training\x07"
LINE = "iter 12: loss 2.4519, time 81.20ms, mfu 41.20%"


@pytest.mark.parametrize("before", [RED, CLEAR, TITLE, RED + BOLD, b"\x1b(B" + RED, b"\r" + CLEAR, b"\x1b7" + RED])
@pytest.mark.parametrize("after", [b"", PLAIN, PLAIN + b"\r"])
def test_a_line_that_starts_with_a_colour_is_read(before, after):
    (reading,) = read([before + LINE.encode() + after + b"\n"])
    assert (reading.step, reading.loss, reading.ms) == (12, 2.4519, 81.2)


def test_diagnose_reads_lines_with_colours():
    text = (RED + LINE.encode() + PLAIN).decode()
    (event,) = progress(log_lines(text, "node01"))
    assert (event["step"], event["loss"], event["ms"]) == (12, 2.4519, 81.2)


@pytest.mark.parametrize("log", LOGS)
def test_colours_do_not_change_the_readings(log):
    """Each line starts and ends with a code."""
    content = data(log)
    lines = [RED + line + PLAIN if line.strip() else line for line in re.split(rb"(?<=[\r\n])", content)]
    whole = b"".join(re.sub(rb"([\r\n]*)(\x1b\[0m)$", rb"\2\1", line) for line in lines)
    assert repr(readings(whole)) == repr(readings(content))


def test_a_number_may_have_a_colour():
    (reading,) = read([b"iter 12: loss " + RED + b"2.4519" + PLAIN + b", time 81.20ms\n"])
    assert (reading.step, reading.loss) == (12, 2.4519)


def test_step_comes_from_the_training_bar_and_not_from_one_below_it():
    line = b"{'loss': 2.5, 'learning_rate': 1e-05, 'epoch': 0.5}\n"
    lower = b"\r" + RED + b" 50%|#####     | 4/8 [00:00<00:00, 9.2it/s]" + PLAIN + b"\x1b[A"
    upper = b"\r" + RED + b" 10%|#         | 9/900 [00:01<00:09, 31.92it/s]" + PLAIN + b"\n"
    (reading,) = read([line, lower, upper])
    assert (reading.step, reading.total) == (9, 900)
