"""Secrets are read from the environment, and hidden wherever a run is shown."""

from __future__ import annotations

import json

import pytest

from provision.cli.train import read_variables
from provision.errors import UsageError
from provision.launchers import from_words
from provision.masking import is_secret, mask_env, mask_plan, mask_words, secret_option
from provision.run import record
from provision.run.shells import as_cmd, as_powershell, as_sh
from trainer.agent.contract.plan import Link, Plan, Resume

TOKEN = "hf_" + "aB3" * 11  # the shape of one


@pytest.fixture
def reported():
    return []


def test_a_variable_without_a_value_is_read_from_the_environment(monkeypatch, reported):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert read_variables(("HF_TOKEN", "NCCL_DEBUG=INFO", "EMPTY="), reported.append) == {
        "HF_TOKEN": TOKEN,
        "NCCL_DEBUG": "INFO",
        "EMPTY": "",
    }
    assert reported == []


def test_a_variable_that_is_not_set_is_refused_with_the_next_step(monkeypatch, reported):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(UsageError, match="HF_TOKEN is not set") as caught:
        read_variables(("HF_TOKEN",), reported.append)
    assert "export HF_TOKEN=VALUE" in caught.value.hint


@pytest.mark.parametrize("word", ["=x", "1A=secret", "A-B=secret", "Ä=secret", "A\n=secret", ""])
def test_invalid_name_is_refused_without_showing_the_value(word, reported):
    with pytest.raises(UsageError, match="not a valid variable name") as caught:
        read_variables((word,), reported.append)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_typed_secret_gives_a_warning_without_its_value(reported):
    read_variables((f"HF_TOKEN={TOKEN}", "TOKENIZERS_PARALLELISM=false"), reported.append)
    (notice,) = reported
    assert (notice.level, TOKEN in notice.text) == ("warning", False)
    assert notice.text.endswith("export HF_TOKEN, then use --env HF_TOKEN")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["train.py", "--hf_token", "x"], "--hf_token"),
        (["train.py", "--hub-token=x"], "--hub-token"),
        (["train.py", "WANDB_API_KEY=x"], "WANDB_API_KEY"),
        (["torchrun", "train.py", "--logger.api_key", "x"], "--logger.api_key"),
        (["train.py", "--password", "x"], "--password"),
        (["train.py", "--note", f"is {TOKEN}"], "is hf_…"),
    ],
)
def test_a_secret_among_the_arguments_of_a_script_is_refused(words, option):
    with pytest.raises(UsageError, match="every user of a node can read") as caught:
        from_words(words)
    assert str(caught.value).startswith(f"{option}: ")
    assert TOKEN not in str(caught.value)
    assert "--env HF_TOKEN" in caught.value.hint


def test_a_secret_in_the_resume_argument_is_refused():
    with pytest.raises(UsageError, match="every user of a node can read"):
        from_words(["t.py"], resume_arg="--hub_token x --resume={checkpoint}")


@pytest.mark.parametrize(
    "words",
    [
        ["t.py", "--pad_token", "x", "--eos-token=y", "--max_tokens", "5", "--tokenizer", "z", "--keys", "a"],
        ["t.py", "--model", "/data/sk-learn-experiments-of-2026-v1", "--init", "hf_internal_testing_llama_tiny_random"],
        ["t.py", "--use_auth_token", "true", "--token", "<image>", "--hf_token", "--lr", "1"],
        ["sft.yaml", "hf_hub_token=x"],  # in the config that travels, in a folder of its user's
        ["WANDB_API_KEY=x", "torchrun", "t.py"],  # in the environment of the nodes
    ],
)
def test_arguments_without_secrets_are_unchanged(words):
    from_words(words)


def test_words_are_shown_without_secrets():
    words = ["WANDB_API_KEY=x", "torchrun", "t.py", "--hub_token", "y", "--hf-token=z", "--lr", "1", TOKEN]
    masked = ["WANDB_API_KEY=***", "torchrun", "t.py", "--hub_token", "***", "--hf-token=***", "--lr", "1", "***"]
    assert mask_words(words) == masked
    assert mask_words(["sft.yaml", "hf_hub_token=x", "https_proxy=http://me:pw@h:1"]) == [
        "sft.yaml",
        "hf_hub_token=***",
        "https_proxy=http://me:***@h:1",
    ]
    assert secret_option(["--lr", "1"]) is None


def test_an_environment_is_shown_without_secrets():
    env = {"HF_TOKEN": "a", "DB_PASSWD": "b", "http_proxy": "http://me:pw@h:1/", "TOKENIZERS_PARALLELISM": "0"}
    assert mask_env(env) == {
        "HF_TOKEN": "***",
        "DB_PASSWD": "***",
        "http_proxy": "http://me:***@h:1/",
        "TOKENIZERS_PARALLELISM": "0",
    }
    assert not is_secret("TOKENIZERS_PARALLELISM")


PLAN = Plan(
    "r1",
    "n",
    ("python", "t.py", "--hub_token", "s3cret"),
    {"WANDB_API_KEY": "s3cret", "URL": "https://u:s3cret@h"},
    cwd="/run/job",
    port=1,
    link=Link("10.0.0.1", 2, "s3cret", ("n",)),
    resume=Resume("out", ("--hub_token", "s3cret", "--resume={checkpoint}"), {"HF_TOKEN": "s3cret"}),
)


@pytest.mark.parametrize("shell", [as_sh, as_powershell, as_cmd])
def test_a_dry_run_shows_no_secret(shell):
    assert "s3cret" not in shell(PLAN)


def test_record_has_no_secret_and_is_private(tmp_path):
    folder = tmp_path / "runs/r1"
    record.write(folder, {"plans": {"n": mask_plan(PLAN).to_object()}})
    assert "s3cret" not in json.dumps(record.read(folder))
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "run.json")] == [0o700, 0o600]
