"""A command line becomes a line of sh, and many answers become few blocks."""

from __future__ import annotations

import subprocess

import pytest

from provision.errors import NodesFailedError, UsageError
from provision.model import Result
from provision.summaries.nodes import command_output, command_rows
from provision.tasks.command import Commanded, command_line


@pytest.mark.parametrize(
    "words", [["a b"], ["-n", "it's"], ["$(id)", "`id`", '"', "\\", "ü", ""], ["*", "~", ";", "&&", "\n\n"]]
)
def test_several_words_reach_the_program_unchanged(words):
    line = command_line(["printf", "%s\\0", *words])
    done = subprocess.run(["sh", "-c", line], capture_output=True, check=True)
    assert done.stdout == b"".join(word.encode() + b"\0" for word in words)


def test_one_word_is_a_line_of_sh():
    assert command_line(["echo $((1 + 1)) | cat"]) == "echo $((1 + 1)) | cat"


@pytest.mark.parametrize("words", [[], [""], ["  ", "\n"]])
def test_nothing_to_run(words):
    with pytest.raises(UsageError, match="no command"):
        command_line(words)


def text(results, failed=None):
    return "\n".join(row.text for row in command_rows(Commanded("x", results, failed or {})))


def test_equal_answers_are_one_block_and_most_nodes_come_first():
    results = {f"gpu{number:02}": Result(0, "same\n") for number in range(1, 6)}
    results["gpu01"] = Result(3, "odd\n", "why\n")
    rule = "-" * 15
    assert text(results).split("\n") == [
        *[rule, "gpu[02-05] (4)", rule, "same"],
        *[rule, "gpu01", rule, "odd", "why"],
    ]


def test_inner_blank_lines_are_kept_and_escapes_removed():
    assert text({"a": Result(0, "\n  one\n\n\x1b[31mtwo\x1b[0m\n\n")}).split("\n")[3:] == ["", "  one", "", "two"]


def test_missing_output_is_reported_only_if_all_succeeded():
    results = {"gpu1": Result(0, ""), "gpu2": Result(0, "")}
    assert text(results) == "gpu[1-2]: done, no output"
    assert text(results, {"gpu3": "down"}) == ""
    assert text({}, {"gpu3": "down"}) == ""


def test_json_holds_every_node_and_the_error_names_the_failed():
    result = Commanded("x", {"a": Result(0, "1"), "b": Result(7, "", "e", 0.5)}, {"b": "exit status 7", "c": "down"})
    data, message = command_output(result)
    assert message == ""
    assert data["nodes"] == {
        "a": {"rc": 0, "out": "1", "err": "", "seconds": 0.0},
        "b": {"rc": 7, "out": "", "err": "e", "seconds": 0.5},
        "c": {"rc": None, "out": "", "err": "", "reason": "down"},
    }
    with pytest.raises(NodesFailedError, match="on 2 of 3 nodes") as caught:
        result.raise_failed()
    assert caught.value.exit_code == 5
    Commanded("x", {"a": Result(0, "")}, {}).raise_failed()
