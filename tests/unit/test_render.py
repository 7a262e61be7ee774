from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path, PurePosixPath

import pytest
from case_table import every_case
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jinja2 import DictLoader

from provision import render as render_module
from provision.errors import ClusterctlError
from provision.render import quote, render, words

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
NASTY = "'\"$(id)`id`\\ \n ü ; & * ~ # !\t"


@pytest.fixture
def templates(monkeypatch):
    """Templates from a dict instead of the folder."""
    environment = render_module.template_environment()
    files: dict[str, str] = {}
    monkeypatch.setattr(environment, "loader", DictLoader(files))
    monkeypatch.setattr(environment, "cache", None)
    return files


def sh_words(script: str) -> list[bytes]:
    """What sh makes of ``script``, one item a word."""
    done = subprocess.run(
        ["sh"],
        input=f"for word in {script}; do printf '%s\\000' \"$word\"; done".encode("utf-8", "surrogateescape"),
        stdout=subprocess.PIPE,
        check=True,
    )
    return done.stdout.split(b"\0")[:-1]


def text_of_a_file_name(raw: bytes) -> str:
    return raw.replace(b"\0", b"").decode("utf-8", "surrogateescape")


@given(st.binary(max_size=60).map(text_of_a_file_name))
@example(NASTY)
@example("")
@example("a=b")
@example(b"\xff\xfe".decode("utf-8", "surrogateescape"))
@settings(deadline=None)
def test_sh_reads_a_quoted_word_back(text):
    assert sh_words(quote(text)) == [os.fsencode(text)]


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1, max_size=5))
@settings(deadline=None)
def test_sh_reads_words_back(items):
    assert sh_words(words(items)) == [item.encode() for item in items]


def test_plain_words_are_not_quoted():
    assert [quote(value) for value in ("abc", 3, 1.5, PurePosixPath("/opt/env-2.1"), "")] == [
        "abc",
        "3",
        "1.5",
        "/opt/env-2.1",
        "''",
    ]


@pytest.mark.parametrize("value", ["a\0b", None, True, ["a"], {"a": 1}, b"a"])
def test_value_that_cannot_be_a_word_is_refused(value):
    with pytest.raises(ClusterctlError):
        quote(value)


def test_one_text_is_not_a_list_of_words():
    with pytest.raises(ClusterctlError, match="not a list"):
        words("abc")


def test_values_in_sh_templates_are_quoted(templates):
    templates["a.sh.j2"] = "it's $HOME {{ x }} {{ 'a b' }} {{ n }} {{ y | raw }} {{ z | words }}\n"
    assert render("a.sh.j2", x="a'b", n=3, y="p | q", z=["1 2", "3"]) == "it's $HOME 'a'\\''b' 'a b' 3 p | q '1 2' 3\n"


def test_values_in_other_templates_are_not(templates):
    templates["a.conf.j2"] = "x = {{ x }}\n"
    assert render("a.conf.j2", x="it's") == "x = it's\n"


def test_raw_text_that_was_changed_is_quoted_again(templates):
    templates["a.sh.j2"] = "{{ (x | raw) ~ y }} {{ x | raw | upper }}"
    assert render("a.sh.j2", x="a b", y=";") == "'a b;' 'A B'"


def test_macros_and_set_blocks_quote_inside_and_need_raw_outside(templates):
    templates["a.sh.j2"] = (
        "{% macro put(x) %}echo {{ x }}{% endmacro %}"
        "{% macro twice(x) %}{{ caller() | raw }} {{ x }} {{ caller() }}{% endmacro %}"
        "{% set block %}cat {{ x }}{% endset %}"
        "{{ put(x) | raw }}; {{ block | raw }}; {{ put(x) }}; {% call twice(x) %}id {{ x }}{% endcall %}"
    )
    assert render("a.sh.j2", x="a b") == r"echo 'a b'; cat 'a b'; 'echo '\''a b'\'''; id 'a b' 'a b' 'id '\''a b'\'''"


def test_an_included_or_imported_template_quotes_by_its_own_name(templates):
    templates["part.sh.j2"] = "echo {{ x }}\n"
    templates["lib.sh.j2"] = "{% macro put(x) %}echo {{ x }}{% endmacro %}"
    templates["a.conf.j2"] = "{% include 'part.sh.j2' %}{{ x }}"
    templates["b.conf.j2"] = "{% from 'lib.sh.j2' import put %}{{ put(x) }}"
    assert render("a.conf.j2", x="a b") == "echo 'a b'\na b"
    assert render("b.conf.j2", x="a b") == "echo 'a b'"


def test_lines_with_only_a_tag_vanish_and_the_last_newline_stays(templates):
    templates["a.j2"] = "a\n  {% if x %}\nb\n  {% endif %}\nc\n"
    assert render("a.j2", x=True) == "a\nb\nc\n"


@pytest.mark.parametrize("body", ["{{ missing }}", "{{ missing | raw }}", "{% if missing %}{% endif %}"])
@pytest.mark.parametrize("name", ["a.sh.j2", "a.conf.j2"])
def test_a_missing_variable_is_named_with_its_template(templates, name, body):
    templates[name] = body
    with pytest.raises(ClusterctlError, match=rf"template {re.escape(name)}: 'missing' is undefined"):
        render(name)


def test_a_value_that_cannot_be_quoted_is_named_with_its_template(templates):
    templates["a.sh.j2"] = "{{ x }}"
    with pytest.raises(ClusterctlError, match=r"template a\.sh\.j2: .*NUL"):
        render("a.sh.j2", x="\0")


def test_a_missing_template_is_named(templates):
    templates["a.j2"] = "{% include 'part.j2' %}"
    with pytest.raises(ClusterctlError, match=r"nothing\.j2 does not exist"):
        render("nothing.j2")
    with pytest.raises(ClusterctlError, match=r"part\.j2 does not exist"):
        render("a.j2")


@every_case("path", sorted(TEMPLATES.rglob("*.sh.j2")), ids=lambda path: str(path.relative_to(TEMPLATES)))
def test_no_template_puts_a_word_where_sh_expects_none(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        code = re.sub(r"\{\{[^}]*\|\s*(raw|words)\s*\}\}", "", line)
        if "{{" not in code:
            continue
        assert not re.match(r"\s*#|[^'\"]*\s#\s[^'\"]*\{\{", code), f"{path}:{number}: a value in a comment"
        before = re.sub(r"\{\{.*?\}\}", "", code[: code.rindex("{{")])
        before = re.sub(r"'[^']*'|\\.", "", before)
        assert before.count('"') % 2 == 0, f"{path}:{number}: a value inside double quotes"
        assert before.count("'") == 0, f"{path}:{number}: a value inside single quotes"
