"""The options in the words of a command line, in the syntaxes of the usual parsers."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from provision.run import Job
from trainer.words import Option, last, read


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", []),
        ("data out", [("", "data", "out")]),
        ("--out x", [("--out", "x")]),
        ("--out=x y", [("--out", "x"), ("", "y")]),
        ("--out= y", [("--out", ""), ("", "y")]),
        ("--out=a=b", [("--out", "a=b")]),
        ("-o x -p=y", [("-o", "x"), ("-p", "y")]),
        ("-ox", [("-ox",)]),
        ("--data a b --fp16", [("--data", "a", "b"), ("--fp16",)]),
        ("--lr -1e-5 --at -.5 -3", [("--lr", "-1e-5"), ("--at", "-.5", "-3")]),
        ("--in - --x", [("--in", "-"), ("--x",)]),
        ("--fp16 -- --out x", [("--fp16",), ("", "--out", "x")]),
        ("-- a -- b", [("", "a", "--", "b")]),
        ("x=1 +a.b=2 ++c=3", [("x", "1"), ("+a.b", "2"), ("++c", "3")]),
        ("--set a=1 b=2 --c 3", [("--set", "a=1", "b=2"), ("a", "1"), ("b", "2"), ("--c", "3")]),
        ("a=1 -- b=2", [("a", "1"), ("b", "2")]),
        ("https://x/?a=b 1=2 =x", [("", "https://x/?a=b", "1=2", "=x")]),
        ("--", []),
    ],
)
def test_the_options_with_their_values(line, expected):
    assert [(option.typed, *option.values) for option in read(line.split())] == expected


def test_names_are_those_of_variables():
    names = [option.name for option in read(["--Out-Dir", "x", "+train.Out-Dir=x", "-o", "rest"])]
    assert names == ["out_dir", "train.out_dir", "o"]
    assert Option("").name == ""  # plain words have none


def test_the_last_of_two_counts():
    options = read(["--out", "a", "--out-dir=b", "out_dir=c", "d"])
    assert (last(options, "out_dir"), last(options, "out"), last(options, "none")) == (("c",), ("a",), ())


@pytest.mark.parametrize(
    "line",
    ["--data a b --lr -1 --fp16", "--lr=-1e-3 --data=a", "--data a --data b c", "--fp16 --lr 2 -- rest", "x --lr 1"],
)
def test_argparse_reads_the_same(line):
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", nargs="+", default=[])
    parser.add_argument("--lr", default="")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("rest", nargs="*")
    given = parser.parse_args(line.split())
    options = read(line.split())
    assert (list(last(options, "data")), "".join(last(options, "lr"))) == (given.data, given.lr)
    assert any(option.name == "fp16" for option in options) == given.fp16
    assert [value for option in options if not option.typed for value in option.values] == given.rest


def test_the_launchers_options_take_no_word_of_the_script():
    job = Job("script", "a.py", ("data",), launcher_args=("--standalone",))
    assert job.options == (Option("--standalone"), Option("", ("data",)))
    assert replace(job, launcher_args=()).options == (Option("", ("data",)),)
