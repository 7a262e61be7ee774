"""A file that an argument names and that will not be on the nodes is an error before the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from provision.errors import UsageError
from provision.launchers import from_words, pack


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "train.py")
    return tmp_path


def put(path, text="x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "--deepspeed", "missing.json"],
        ["train.py", "--deepspeed=missing.json"],
        ["train.py", "--deepspeed", "--deepspeed_config", "conf/missing.json"],
        ["train.py", "--config", "missing.yaml"],
        ["train.py", "--model-config", "missing.toml"],
        ["accelerate", "launch", "--deepspeed_config_file", "missing.json", "train.py"],
        ["deepspeed", "train.py", "--deepspeed_config", "x" * 5000 + ".json"],
    ],
)
def test_missing_configuration_is_refused(here, words):
    with pytest.raises(UsageError, match="there is no such file in") as caught:
        pack(from_words(words))
    assert "--code DIR" in caught.value.hint


def test_existing_configuration_is_sent(here):
    put(here / "conf/ds.json", "{}")
    taken = pack(from_words(["train.py", "--deepspeed", "conf/ds.json", "--report", "out.json", "--lr", "1"]))
    assert "job/conf/ds.json" in taken.digests
    assert taken.notices == ()
    assert taken.there == ()


def test_configuration_on_the_nodes_is_checked_there(here):
    taken = pack(from_words(["train.py", "--deepspeed", "/data//ds.json", "--log_file", "/data/x.json"]))
    assert taken.there == ("/data/ds.json",)


def test_other_missing_file_is_named(here):
    (notice,) = pack(from_words(["train.py", "--vocab", "vocab.json"])).notices
    assert notice.startswith("--vocab vocab.json: there is no such file in")


def test_nothing_is_sent_with_a_module_of_the_environment(here):
    put(here / "ds.json")
    with pytest.raises(UsageError, match="this run sends no files"):
        pack(from_words(["--deepspeed", "ds.json"], module="pkg.train"))


def test_file_named_in_accelerates_configuration_must_be_sent(here):
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\n"
    put(here / "a.yaml", text + "deepspeed_config: {deepspeed_config_file: conf/ds.json}\n")
    job = from_words(["train.py"], accelerate_config=Path("a.yaml"))
    with pytest.raises(UsageError, match=r"a\.yaml: deepspeed_config_file: conf/ds\.json is not in the folder"):
        pack(job)
    put(here / "conf/ds.json", "{}")
    assert "job/conf/ds.json" in pack(job).digests
