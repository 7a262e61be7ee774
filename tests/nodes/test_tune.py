"""``plan --tune`` on two nodes with LLaMA-Factory: it measures candidates and writes the fastest of equal loss."""

import json

import pytest
import yaml

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(900)]

TUNE = ("--tune", "--candidates", "2", "--seconds", "4", "--json", "--gpu", "A100")


@pytest.fixture(scope="module")
def tuned(training_nodes, tmp_path_factory):
    """A folder of its own, in which two candidates were measured; the command's result."""
    mine = training_nodes.own(tmp_path_factory.mktemp("tune") / "project")
    mine.config("sft.yaml", per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=40)
    done = mine.run("plan", "sft.yaml", *TUNE, timeout=800)
    assert done.returncode == 0, done.stderr
    return mine, done


def test_every_candidate_is_measured_or_has_a_reason(tuned):
    _, done = tuned
    result = json.loads(done.stdout)
    names = [each["name"] for each in result["candidates"]]
    assert names == ["as it is", "recommended"]
    for each in result["candidates"]:
        assert each["dropped"] or (each["tokens"] > 0 and each["steps"] >= 3 and each["loss"] > 0), each
    assert not result["candidates"][0]["dropped"]
    assert result["best"] in names
    assert result["gain"] > 0  # how much is the machine's affair


def test_the_record_and_the_configuration_are_written(tuned):
    mine, done = tuned
    result = json.loads(done.stdout)
    kept = json.loads((mine.folder / "sft.faster.tune.json").read_text())
    assert kept["candidates"] == result["candidates"]
    if result["best"] == "as it is":  # which one is the fastest is the machine's affair
        assert not (mine.folder / "sft.faster.yaml").exists()
        return
    before = yaml.safe_load((mine.folder / "sft.yaml").read_text())
    after = yaml.safe_load((mine.folder / "sft.faster.yaml").read_text())
    assert {key: after[key] for key in ("dataset", "output_dir", "learning_rate", "max_steps", "seed")} == {
        key: before[key] for key in ("dataset", "output_dir", "learning_rate", "max_steps", "seed")
    }


def test_nothing_of_the_measurements_is_left(tuned):
    mine, _ = tuned
    shown = json.loads(mine.run("runs", "list", "--json").stdout)
    assert not [run for run in shown["runs"] if run["run"].split("-")[2:-1] == ["tune"] and run["state"] != "failed"]


def test_a_second_run_does_not_overwrite_the_first(tuned):
    mine, _ = tuned
    again = mine.run("plan", "sft.yaml", *TUNE)
    assert again.returncode == 2
    assert "exists" in again.stderr
