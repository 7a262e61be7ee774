"""Tables of cases: every case runs, and a failure names each that failed."""

import pytest
from case_table import every_case


def test_every_case_runs_with_the_fixtures_of_the_test():
    seen = []

    @every_case("number, word", [(1, "a"), (2, "b")])
    def check(fixture, number, word):
        seen.append((fixture, number, word))

    check(fixture="x")
    assert seen == [("x", 1, "a"), ("x", 2, "b")]


def test_a_failure_names_each_case_that_failed_and_has_its_message():
    @every_case("number", [1, 2, 3, 4], ids="n{}".format)
    def check(number):
        if number == 4:
            with pytest.raises(ValueError, match="none"):
                pass
        assert number % 2, f"{number} is even"

    with pytest.raises(AssertionError, match=r"2 of 4 cases failed\ncase 2: n2: 2 is even") as failed:
        check()
    assert "case 4: n4: DID NOT RAISE" in str(failed.value)
    assert str(failed.value.__cause__).startswith("2 is even")


def test_tables_of_two_parameters_are_combined():
    seen = []

    @every_case("first", "ab")
    @every_case("second", [1, 2])
    def check(first, second):
        seen.append((first, second))

    check()
    assert seen == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_cases_may_be_made_when_the_test_runs():
    made = []

    @every_case("number", lambda: made or [1])
    def check(number):
        made.append(number)

    assert made == []
    check()
    assert made == [1]


@pytest.mark.parametrize("cases", [[], list])
def test_an_empty_table_fails(cases):
    @every_case("number", cases)
    def check(number):
        pass

    with pytest.raises(AssertionError, match="the table is empty"):
        check()


def test_a_case_that_skips_fails():
    @every_case("number", [1])
    def check(number):
        pytest.skip("not here")

    with pytest.raises(AssertionError, match="not here"):
        check()
