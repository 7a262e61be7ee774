"""``trainer.vlm`` from end to end: stages, engines, resume and export of models that see images."""

import json

import pytest
from forks import HERE

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]

TINY = ["--data", "mixed.json", "--block-size", "128", "--batch-size", "1", "--max-iters", "4", "--keep", "0"]
TINY += ["--eval-interval", "2", "--eval-iters", "2", "--val", "0.2", "--trackers", "none", "--learning-rate", "1e-3"]
QWEN = ["--init", "qwen"]


@pytest.fixture(scope="module")
def vlm(gpt):
    """The trainer, in a folder with tiny models and data."""
    result = gpt.run(HERE / "vlm_made.py", gpt.folder)
    assert result.returncode == 0, result.stderr[-2000:]
    return gpt


@pytest.fixture(scope="module")
def alone(vlm):
    """Trainings on one rank, by name."""
    both = ["--vision", "siglip", "--init", "text"]
    wanted = {
        "qwen": [*QWEN, "--global-batch", "2"],
        "stage 1": [*both, "--parts", "projector"],
        "stage 2": ["--init", "stage 1/final", "--vision-lr", "1e-4", "--projector-lr", "5e-4"],
        "text": [*QWEN, "--parts", "language", "--data", "only-text.json"],
        "lora": [*QWEN, "--lora-rank", "2"],
        "half": ["--init", "stage 1/final", "--max-iters", "2", "--decay-iters", "4"],
        "continued": ["--resume", "half/latest", "--max-iters", "4"],
        "whole": ["--init", "stage 1/final", "--decay-iters", "4"],
    }
    runs = [
        [*(TINY if name != "continued" else ()), *argv, "--out", "half" if name == "continued" else name]
        for name, argv in wanted.items()
    ]
    found = dict(zip(wanted, vlm.session(runs, tiny=False), strict=True))
    assert not [(name, run.refused) for name, run in found.items() if run.refused]
    return found


@pytest.fixture(scope="module")
def loaded(vlm, alone):
    """What transformers says of the exported models, by name."""
    names = ("qwen", "stage 1", "stage 2", "text", "lora")
    for name in names:
        assert alone[name].losses
        vlm.program("export", f"{name}/final", f"{name} exported")
    result = vlm.run(HERE / "vlm_loads.py", *(f"{name} exported" for name in names))
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line.partition(" ")[2]) for line in result.stdout.splitlines() if line.startswith("LOADED ")]
    return dict(zip(names, rows, strict=True))


def test_losses_fall_and_the_log_names_parts_and_padding(vlm, alone):
    for run in alone.values():
        assert len(run.losses) == 4
    log = (vlm.folder / "stage 2/train.log").read_text()
    assert "part vision:" in log
    assert "highest learning rate 0.0001" in log
    assert "patches in each row" in log
    assert "part language: " in log
    assert "frozen" in (vlm.folder / "stage 1/train.log").read_text()


@pytest.mark.parametrize("engine", ["plain", "fsdp", "zero2"])
def test_ranks_have_the_losses_of_one_rank_although_some_batches_have_no_image(vlm, alone, engine):
    run = vlm.session([[*TINY, *QWEN, "--global-batch", "2", "--engine", engine, "--out", engine]], 2, tiny=False)[0]
    assert run.refused is None
    assert run.losses == pytest.approx(alone["qwen"].losses, rel=1e-5)
    assert run.records("eval_loss") == pytest.approx(alone["qwen"].records("eval_loss"), rel=1e-5)


def test_a_resumed_training_has_the_losses_of_an_uninterrupted_one(alone):
    assert alone["continued"].losses == alone["whole"].losses


def test_transformers_loads_every_export(loaded):
    assert {name: row["class"] for name, row in loaded.items()} == {
        "qwen": "Qwen2_5_VLForConditionalGeneration",
        "stage 1": "LlavaOnevisionForConditionalGeneration",
        "stage 2": "LlavaOnevisionForConditionalGeneration",
        "text": "Qwen2_5_VLForConditionalGeneration",
        "lora": "Qwen2_5_VLForConditionalGeneration",
    }
    assert not [row["missing"] for row in loaded.values() if row["missing"]]


def test_frozen_parts_stay_as_they_were(loaded):
    first, second = (loaded[name]["parts"] for name in ("stage 1", "stage 2"))
    assert all(first[part] != second[part] for part in ("vision", "projector", "language"))
    assert loaded["text"]["parts"]["vision"] == loaded["lora"]["parts"]["vision"] != loaded["qwen"]["parts"]["vision"]


REFUSED = {
    "shards": ([*QWEN, "--data", "first"], "trains on conversations"),
    "images with a text model": (["--init", "text"], "only reads text"),
    "an option for images with a text model": (["--init", "text", "--max-pixels", "9999"], "does not see images"),
    "a tower twice": (["--vision", "siglip", *QWEN], "has a vision tower already"),
    "no decoder": (["--vision", "siglip"], "needs a trained language model"),
    "an unknown tower": (["--vision", "text", "--init", "text"], "siglip"),
    "adapters and a new projector": (["--vision", "siglip", "--init", "text", "--lora-rank", "2"], "no adapter"),
    "a part that is none": ([*QWEN, "--parts", "ears"], "not some of"),
    "a rate of a frozen part": ([*QWEN, "--parts", "language", "--vision-lr", "1e-4"], "freezes"),
    "a part of a text model": (["--init", "text", "--data", "only-text.json", "--parts", "vision"], "no part vision"),
}


@pytest.fixture(scope="module")
def refused(vlm):
    runs = [[*TINY, *argv, "--out", f"no {name}"] for name, (argv, _) in REFUSED.items()]
    return dict(zip(REFUSED, vlm.session(runs, tiny=False), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_a_line(refused, name):
    found = refused[name].refused
    assert found, name
    assert REFUSED[name][1] in found["what"]
    assert found["fix"]
    assert "\n" not in found["what"]
