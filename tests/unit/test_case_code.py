"""A case code carries a diagnosis through a phone; a wrong line is named, and nothing wrong is decoded."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))  # for recorded_runs; last, so that it hides no module

from recorded_runs.cases import case, cases

from provision.cli import cli
from provision.diagnosis import diagnose
from provision.diagnosis.case_code import KNOWN, SYMBOLS, Case, decode, encode, hash_of
from provision.diagnosis.cause import GRADES
from provision.diagnosis.causes import TABLE
from provision.diagnosis.conditions import RULES
from provision.errors import UsageError
from provision.output import Reporter
from provision.summaries.diagnosis import case_output, diagnosis_output

FULL = Case(
    "1.12.3", "failed", "cuda.oom", "cause", True, False, 16, 1, 3, 27, 2, 41_250, None, 9, "5f0c1d2e", ("loss.nan",)
)  # fmt: skip
NUMBER = st.none() | st.integers(0, 1 << 40)
CASES = st.builds(
    Case,
    st.tuples(*[st.integers(0, 300)] * 3).map(lambda numbers: ".".join(map(str, numbers))),
    st.sampled_from(["", "running", "finished", "failed", "stopped"]),
    st.sampled_from([each.id for each in TABLE]),
    st.sampled_from(GRADES),
    st.booleans(), st.booleans(), st.integers(0, 5000), st.integers(0, 99), NUMBER, NUMBER, st.integers(0, 99), NUMBER,
    st.none() | st.integers(0, 255), st.none(), st.sampled_from(["", "00000000", "5f0c1d2e"]),
    st.lists(st.sampled_from([each.id for each in RULES]), max_size=3).map(tuple),
)  # fmt: skip


@given(CASES)
def test_a_case_survives(found):
    assert decode(encode(found)) == found


def test_recorded_diagnoses_have_a_code_of_at_most_four_lines():
    for each in cases()[::4]:
        found = diagnose(each.evidence)
        if found.case is not None:
            lines = encode(found.case)
            assert decode(lines) == found.case
            assert len(lines) <= 4
            assert all(line in diagnosis_output(found)[1] for line in lines)


def test_ids_have_different_hashes():
    assert len(KNOWN) == len({each.id for each in (*TABLE, *RULES)})


@pytest.mark.parametrize("number", range(3))
def test_each_wrong_symbol_is_found_in_its_line(number):
    lines = encode(FULL)
    line = lines[number]
    for place, right in enumerate(line):
        for wrong in SYMBOLS if right != "-" else ():
            if wrong != right:
                typed = [*lines[:number], line[:place] + wrong + line[place + 1 :], *lines[number + 1 :]]
                with pytest.raises(UsageError, match=f"line {number + 1} of the code is wrong"):
                    decode(typed)


def test_neighbours_that_changed_places_are_found():
    lines = [line.replace("-", "") for line in encode(FULL)]
    for number, line in enumerate(lines):
        for place in range(15):
            swapped = line[:place] + line[place + 1] + line[place] + line[place + 2 :]
            if swapped != line:
                with pytest.raises(UsageError, match=f"line {number + 1} "):
                    decode([*lines[:number], swapped, *lines[number + 1 :]])


def test_a_letter_heard_wrong_is_proposed():
    lines = list(encode(FULL))
    place = next(place for place, letter in enumerate(lines[1]) if letter in "BDMNFS5")
    wrong = {"B": "D", "D": "B", "M": "N", "N": "M", "F": "S", "S": "F", "5": "S"}[lines[1][place]]
    with pytest.raises(UsageError) as caught:
        decode([lines[0], lines[1][:place] + wrong + lines[1][place + 1 :], *lines[2:]])
    assert lines[1] in caught.value.hint


@pytest.mark.parametrize(
    "write",
    [
        lambda lines: ["\n".join(lines)],
        lambda lines: [" ".join(lines)],
        lambda lines: [" ".join(lines).replace("-", " ")],
        lambda lines: ["".join(lines).replace("-", "").lower()],
        lambda lines: ["; ".join(lines).replace("0", "O").replace("1", "l")],
        lambda lines: [line.replace("1", "I").replace("0", "o") for line in lines],
        lambda lines: ["\n".join(lines).replace("-", "\N{EN DASH}").replace("2", "\N{FULLWIDTH DIGIT TWO}")],
    ],
)
def test_a_code_may_be_typed_in_many_ways(write):
    assert decode(write(encode(FULL))) == FULL


def test_what_is_no_code_is_refused_with_the_reason():
    lines = encode(FULL)
    other = encode(replace(FULL, rank=26))
    assert lines[1] != other[1]
    for typed, why in (
        (lines[:2], "has 4 lines, and 2 were typed"),
        ([lines[1], lines[0], *lines[2:]], "line 1 of the code is wrong"),
        ([lines[0], other[1], *lines[2:]], "not of the same code"),
        ([lines[0], lines[1][:-1], *lines[2:]], "line 2 of the code has 15 symbols"),
        ([lines[0], "U" + lines[1][1:], *lines[2:]], "line 2 of the code has 'U'"),
        ([""], "0 lines"),
        (["A" * 5000], "too long"),
        (["A" * 1000], "lines"),
    ):
        with pytest.raises(UsageError, match=why):
            decode(typed)


@given(st.lists(st.text(st.sampled_from(SYMBOLS + "-uoil \n{\x00漢"), max_size=40), max_size=9))
def test_any_text_is_decoded_or_refused(typed):
    try:
        decode(typed)
    except UsageError:
        return
    pytest.fail("random text is no code")


def test_a_cause_of_a_newer_version_is_reported_as_such():
    newer = decode(encode(replace(FULL, cause="fabric.newer", conditions=("loss.newer",))))
    assert newer.cause == f"{hash_of('fabric.newer'):07x}"
    assert decode(encode(newer)) == newer
    text = " ".join(case_output(newer)[1].split())
    assert "a cause that this version of clusterctl does not know; version 1.12.3 does" in text
    assert newer.cause in text


def test_a_timeout_without_a_rank_blames_no_rank():
    found = next(
        result for each in cases() if (result := diagnose(each.evidence)).verdict and result.verdict.unresolved
    )  # fmt: skip
    assert (found.case.node, found.case.rank) == (None, None)
    assert "the logs do not say which rank did not arrive:" in case_output(decode(encode(found.case)))[1]


def test_a_newer_format_is_refused_by_its_number(monkeypatch):
    monkeypatch.setattr("provision.diagnosis.case_code.FORMAT", 2)
    lines = encode(FULL)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="has format 2; this clusterctl reads format 1"):
        decode(lines)


def test_the_command_decodes_without_an_inventory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = encode(diagnose(case("cuda_oom").evidence).case)
    CliRunner().invoke(cli, ["diagnose", "--code", *lines], obj=Reporter(), catch_exceptions=False)
    shown = capsys.readouterr().out
    for words in ("node-2 rank 3 failed first: CUDA out of memory", "confidence high", "exit code 1", "last step 6"):
        assert words in shown
    refused = CliRunner().invoke(cli, ["diagnose", "--code", "x", "--log", "y"], obj=Reporter())
    assert isinstance(refused.exception, UsageError)
