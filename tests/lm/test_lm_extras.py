"""The schedule with a stable part, traces of steps, and refusals of fp8 where it cannot work."""

import gzip
import json

import pytest

RUN = ["--eval-interval", "0", "--save", "false", "--dtype", "float32"]


@pytest.fixture(scope="module")
def extras(gpt):
    wsd = [*RUN, "--schedule", "wsd", "--learning-rate", "1", "--min-lr", "0.1", "--grad-clip", "1e-6"]
    runs = {
        "wsd": [*wsd, "--max-iters", "10", "--warmup-iters", "2", "--decay-share", "0.4"],
        "early": [*wsd, "--max-iters", "10", "--decay-iters", "4", "--decay-share", "0.5"],
        "at once": [*wsd, "--max-iters", "4", "--warmup-iters", "2", "--decay-share", "1"],
        "traced": [*RUN, "--max-iters", "4", "--profile", "--profile-steps", "2:3"],
        "first": [*RUN, "--max-iters", "2", "--profile", "--profile-steps", "1:1"],
        "too late": [*RUN, "--max-iters", "3", "--profile"],
        "much too late": [*RUN, "--max-iters", "1", "--profile"],
        "cut": [*RUN, "--max-iters", "5", "--profile"],
        "fp8": [*RUN[:-2], "--fp8", "auto"],
    }
    found = gpt.session([["--out", f"extra {name}", *argv] for name, argv in runs.items()])
    return dict(zip(runs, found, strict=True))


def test_wsd_rises_stays_and_falls_linearly(extras):
    rates = extras["wsd"].records("lr")
    assert [rates[step] for step in range(1, 11)] == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325])
    rates = extras["early"].records("lr")
    assert [rates[step] for step in range(1, 11)] == pytest.approx([1, 1, 1, 0.55] + 6 * [0.1])


def test_wsd_does_not_fall_before_the_warmup_ends(extras):
    rates = extras["at once"].records("lr")
    assert [rates[step] for step in range(1, 5)] == pytest.approx([0.5, 1, 1, 0.55])


@pytest.mark.parametrize(
    ("name", "steps", "words"), [("traced", 2, "2 to 3"), ("first", 1, "1 to 1"), ("cut", 2, "4 to 5")]
)
def test_a_trace_of_the_steps_opens_and_its_slowest_operations_are_listed(extras, name, steps, words):
    run = extras[name]
    with gzip.open(run.out / "profile/rank0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert names.count("autograd::engine::evaluate_function: EmbeddingBackward0") >= steps
    traced = {each for each in names if each.startswith("ProfilerStep")}
    assert len(traced) == steps + (name == "cut")  # and what came after the last step
    lines = [line for line in (run.out / "train.log").read_text().splitlines() if line.startswith("profile:")]
    assert len(lines) == 12
    assert lines[0].split() == ["profile:", "ms", "share", "calls", "operation"]
    spent = [float(line.split()[1]) for line in lines[1:-1]]
    assert spent == sorted(spent, reverse=True)
    assert lines[-1] == f"profile: steps {words} of this command in {run.out.name}/profile/rank0.json.gz"


@pytest.mark.parametrize("name", ["too late", "much too late"])
def test_a_training_that_ends_before_these_steps_says_so(extras, name):
    run = extras[name]
    assert not list(run.out.glob("profile/*"))
    assert "profile: no trace, because the training ended before step 4" in (run.out / "train.log").read_text()


def test_fp8_is_refused_without_a_gpu(extras):
    refused = extras["fp8"].refused
    assert (refused["what"], refused["fix"]) == ("--fp8 needs a GPU, not cpu", "--fp8 off")
