from __future__ import annotations

import pytest

from provision.errors import ClusterctlError
from provision.model import Step, StepResult
from provision.script import compile_steps, parse, whole


def test_results_carry_names_states_and_seconds():
    out = (
        "@clusterctl:T:start:0:one\n@clusterctl:T:step:0:ok:0:12\n"
        "@clusterctl:T:start:1:two: three\n@clusterctl:T:step:1:changed:0:1500\n"
        "@clusterctl:T:start:2:four\n@clusterctl:T:step:2:would change:0:0\n"
    )
    assert parse("T", out) == (
        StepResult("one", "ok", "", 0.012),
        StepResult("two: three", "changed", "", 1.5),
        StepResult("four", "would change", "", 0.0),
    )


def test_failed_step_has_the_output_after_its_marker():
    out = "@clusterctl:T:start:0:one\n@clusterctl:T:step:0:failed:3:5\nno such\n\nfile\n"
    assert parse("T", out) == (StepResult("one", "failed", "no such\n\nfile", 0.005),)


def test_a_failed_step_loses_only_the_empty_lines_around_its_output():
    out = "@clusterctl:T:step:0:failed:3:5\n\n  X marks the spot: X\n\n"
    assert parse("T", out)[0].detail == "  X marks the spot: X"


def test_a_silent_failure_names_its_exit_code():
    assert parse("T", "@clusterctl:T:step:0:failed:3:5\n")[0].detail == "exit code 3"


def test_output_that_is_not_utf8_becomes_printable():
    out = "@clusterctl:T:step:0:failed:1:5\n" + b"caf\xe9".decode("utf-8", "surrogateescape")
    assert parse("T", out)[0].detail == "caf\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    "line",
    [
        "@clusterctl:U:step:0:ok:0:1",  # another run's token
        " @clusterctl:T:step:0:ok:0:1",
        "@clusterctl:T:step:0:ok:0:1 ",
        "@clusterctl:T:step:0:ok:0",
        "@clusterctl:T:start:0:one",  # started, never finished
        "",
    ],
)
def test_other_lines_are_no_results(line):
    assert parse("T", line + "\n") == ()


def test_clock_set_back_gives_no_negative_time():
    assert parse("T", "@clusterctl:T:step:0:ok:0:-9000\n")[0].seconds == 0


def test_the_same_steps_give_the_same_script():
    steps = [Step("a", "true"), Step("b", "false", unless="true")]
    assert compile_steps(steps, token="T") == compile_steps(tuple(steps), token="T")


def test_script_of_a_dry_run_does_not_contain_the_actions():
    script = compile_steps([Step("a", "rm -rf everything", unless="test -e a")], token="T", dry_run=True)
    assert "rm -rf everything" not in script
    assert "test -e a" in script


@pytest.mark.parametrize("token", ["", "a b", "a'b", "a:b", "$x"])
def test_a_token_is_letters_and_digits(token):
    with pytest.raises(ClusterctlError):
        compile_steps([], token=token)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_marker_of_a_step_with_5000_digits_is_no_marker(place):
    """A hostile node knows the token: int() of so many digits would be a traceback."""
    numbers = ["0", "0", "5"]
    numbers[place] = "9" * 5000
    index, rc, time = numbers
    assert parse("t0", f"@clusterctl:t0:start:0:a\n@clusterctl:t0:step:{index}:ok:{rc}:{time}\n") == ()


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("-7", -7), ("9223372036854775807", 9223372036854775807)])
def test_a_number_of_an_answer(text, number):
    assert whole(text) == number


@pytest.mark.parametrize("text", ["", " 1", "1 ", "+1", "1.5", "x", "1\n", "٣", "10000000000000000000"])
def test_text_that_is_not_a_number(text):
    with pytest.raises(ValueError, match="is not a number"):
        whole(text)
