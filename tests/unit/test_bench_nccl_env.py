"""Variables in the inventory's train.env: written where they belong, everything else byte for byte."""

from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from provision.errors import UsageError
from provision.inventory import load
from provision.inventory.writing import with_env
from provision.netbench import CHANNELS, SOCKETS, THREADS, Setting, Tuning
from provision.tasks.bench import write_tuning

BASE = "# my cluster\nprefix: /opt/llm/current\nnodes:\n  gpu01: 10.0.0.1   # the first\n"
VALUES = {THREADS: "4", CHANNELS: "8"}
ADDED = f"    {THREADS}: 4\n    {CHANNELS}: 8\n"

FILES = {
    "no train": (BASE, BASE + "train:\n  env:\n" + ADDED),
    "no newline at the end": (BASE.rstrip("\n"), BASE + "train:\n  env:\n" + ADDED),
    "train without a value": (BASE + "train:  # later\n", BASE + "train:  # later\n  env:\n" + ADDED),
    "train without env": (
        BASE + "train:\n  config: sft.yaml   # mine\n\n# what follows\nservices:\n  hosts:\n",
        BASE + "train:\n  config: sft.yaml   # mine\n  env:\n" + ADDED + "\n# what follows\nservices:\n  hosts:\n",
    ),
    "env without a value": (
        BASE + "train:\n  env:  # none yet\n  port: 29500\n",
        BASE + "train:\n  env:  # none yet\n" + ADDED + "  port: 29500\n",
    ),
    "env with others": (
        BASE + f"train:\n  env:\n    A: 1   # one\n    # two\n    {CHANNELS}: '2' # old\n\n# end\n",
        BASE + f"train:\n  env:\n    A: 1   # one\n    # two\n    {CHANNELS}: 8 # old\n    {THREADS}: 4\n\n# end\n",
    ),
    "wide indents": (
        BASE + "train:\n        env:\n                A: |\n                    x\n                B: y\n",
        BASE
        + "train:\n        env:\n                A: |\n                    x\n                B: y\n"
        + ADDED.replace("    ", " " * 16),
    ),
    "flow env": (BASE + "train: {env: {A: b}}\n", BASE + f"train: {{env: {{A: b, {THREADS}: 4, {CHANNELS}: 8}}}}\n"),
    "empty flow env": (BASE + "train:\n  env: {}\n", BASE + f"train:\n  env: {{{THREADS}: 4, {CHANNELS}: 8}}\n"),
    "flow train": (
        BASE + "train: {config: x.yaml}\n",
        BASE + f"train: {{config: x.yaml, env: {{{THREADS}: 4, {CHANNELS}: 8}}}}\n",
    ),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_other_lines_are_unchanged(name, newline, tmp_path):
    before, after = (text.replace("\n", newline) for text in FILES[name])
    edited = with_env(before, VALUES)
    assert edited == after
    assert with_env(edited, VALUES) == edited
    path = tmp_path / "inventory.yaml"
    path.write_bytes(edited.encode())
    assert {name: load(path).train.env[name] for name in VALUES} == VALUES


@pytest.mark.parametrize(
    "text",
    [
        BASE + "ssh: &common {user: root}\ntrain:\n  env: *common\n",
        BASE + f"train:\n  env:\n    {THREADS}: |\n      2\n",
        "{prefix: /opt/llm/current, nodes: {gpu01: 10.0.0.1}}\n",
        BASE + "train:\n  env: []\n",
    ],
)
def test_uneditable_file_is_refused_with_the_lines_to_write(text):
    with pytest.raises(UsageError) as refused:
        with_env(text, VALUES)
    assert f"{THREADS}: 4, {CHANNELS}: 8" in refused.value.hint


def test_removed_variables_are_deleted_with_their_lines():
    before = BASE + f"train:\n  env:\n    A: 1\n    {SOCKETS}: 2  # old\n    B: 2\n"
    gone = frozenset({SOCKETS, THREADS})
    assert with_env(before, {}, without=gone) == BASE + "train:\n  env:\n    A: 1\n    B: 2\n"
    alone = BASE + f"train:\n  env:\n    {SOCKETS}: 2\n"
    assert with_env(alone, {}, without=gone) == BASE + "train:\n  env:\n"
    with pytest.raises(UsageError, match="shares its line"):
        with_env(BASE + f"train: {{env: {{{SOCKETS}: 2}}}}\n", {}, without=gone)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20))
def test_any_value_is_read_back_as_it_was(value):
    text = with_env(BASE, {"A": value})
    assert yaml.load(text, yaml.BaseLoader)["train"]["env"]["A"] == value


@pytest.fixture
def inventory(tmp_path):
    real = tmp_path / "real.yaml"
    real.write_text(BASE + f"train:\n  env:\n    {SOCKETS}: 2\n    A: 1\n")
    real.chmod(0o640)
    (tmp_path / "inventory.yaml").symlink_to("real.yaml")
    return load(tmp_path / "inventory.yaml")


def found(best, gain):
    return Tuning(1.0, Setting(sockets=2), 2.0, best, 2.0 * gain, ())


def test_best_settings_replace_the_old_ones(inventory, tmp_path):
    tuning = found(Setting(threads=4, channels=8), 1.5)
    assert write_tuning(inventory, tuning)
    real = tmp_path / "real.yaml"
    assert real.read_text() == BASE + f"train:\n  env:\n    A: 1\n{ADDED}"
    assert real.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "inventory.yaml").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inventory.yaml", "real.yaml"]
    assert not write_tuning(inventory, tuning)


def test_a_small_gain_is_not_written(inventory, tmp_path):
    before = (tmp_path / "real.yaml").read_bytes()
    assert not write_tuning(inventory, found(Setting(threads=4), 1.049))
    assert not write_tuning(inventory, replace(found(Setting(sockets=2), 1.5)))
    assert (tmp_path / "real.yaml").read_bytes() == before
