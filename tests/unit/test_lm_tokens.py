"""A vocabulary that another program wrote or damaged is refused in one line, without a traceback."""

from __future__ import annotations

import json

import pytest

from trainer.lm import tokens
from trainer.lm.errors import RefusedError

DEEP = 100_000


@pytest.mark.parametrize(
    "text",
    [
        "[" * DEEP + "]" * DEEP,
        '{"a":' * DEEP + "1" + "}" * DEEP,
        "",
        "\x00",
        "null",
        "7",
        '"abc"',
        '{"a": 0}',
        '["a", 1]',
        '["a", ["b"]]',
        '["a", "bc"]',
        '["a", ""]',
        '["a", "b", "a"]',
    ],
    ids=lambda text: text[:12],
)
def test_invalid_list_of_characters_is_refused(tmp_path, text):
    (tmp_path / tokens.CHARACTERS).write_text(text)
    with pytest.raises(RefusedError) as refused:
        tokens.load(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path}: the vocabulary cannot be read: ")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300 + len(str(tmp_path))


def test_saved_tokenizer_is_loaded(tmp_path):
    characters = ["\n", " ", "a", "é", "\U0001f600", "\u2028"]
    tokens.Characters(characters).save(tmp_path)
    assert json.loads((tmp_path / tokens.CHARACTERS).read_text()) == characters
    assert tokens.load(tmp_path).characters == characters
