"""The phase of a run, from the words that the frameworks really write."""

from __future__ import annotations

import pytest

from trainer.agent import silence

# Lines as they come, with the prefixes that each framework puts before its words.
LINES = [
    ("[INFO|2026-07-01 10:00:00] llamafactory.data.loader:143 >> Loading dataset identity.json...", "tokenizing"),
    ("Converting format of dataset (num_proc=16): 100%|####| 91/91 [00:00<00:00, 503.67 examples/s]", "tokenizing"),
    ("Running tokenizer on dataset (num_proc=16): 100%|###| 91/91 [00:01<00:00, 48 examples/s]", "tokenizing"),
    ("Tokenizing train dataset: 100%|####| 5/5 [00:00<00:00, 503.67 examples/s]", "tokenizing"),
    (
        "[INFO|configuration_utils.py:763] 2026-07-01 10:00:00,101 >> loading configuration file m/config.json",
        "loading",
    ),
    ("[INFO|modeling_utils.py:1169] 2026-07-01 10:00:00,101 >> loading weights file m/model.safetensors", "loading"),
    ("Loading checkpoint shards: 100%|####| 4/4 [00:06<00:00,  1.6s/it]", "loading"),
    ("Loading weights: 100%|####| 290/290 [00:06<00:00,  1.6s/it]", "loading"),
    (
        "[2026-07-01 10:00:00,101] [INFO] [logging.py:107:log_dist] [Rank 0] [Torch] Begin Load checkpoint from x",
        "loading",
    ),
    ("[INFO|trainer.py:2519] 2026-07-01 10:00:00,101 >> ***** Running training *****", "training"),
    ("[INFO|trainer.py:4643] 2026-07-01 10:00:00,101 >> ***** Running Evaluation *****", "evaluating"),
    ("***** Running Prediction *****", "evaluating"),
    ("[INFO|trainer.py:4309] 2026-07-01 10:00:00,101 >> Saving model checkpoint to out/checkpoint-5", "saving"),
    ("[Rank 0] [Torch] Checkpoint global_step5 is about to be saved!", "saving"),
    ("[Rank 0] Saving model checkpoint: out/global_step5/mp_rank_00_model_states.pt", "saving"),
    ("INFO:accelerate.accelerator:Saving current state to out/step_5", "saving"),
    ("Training completed. Do not forget to share your model on huggingface.co/models =)", "finishing"),
    ("{'train_runtime': '4.1', 'train_samples_per_second': '2.9', 'epoch': '1'}", "finishing"),
    ("***** train metrics *****", "finishing"),
    ("Figure saved at: out/training_loss.png", "finishing"),
    ("clusterctl: phase saving", "saving"),
    ("2026-07-01 INFO my.trainer clusterctl: phase evaluating", "evaluating"),
    ("clusterctl: phase sleeping", None),
    ("{'loss': '5.5', 'num_input_tokens_seen': 448, 'train_runtime': '0.06', 'train_tokens_per_second': '73'}", None),
    ("an ordinary line about training and saving", None),
]


@pytest.mark.parametrize(("text", "phase"), LINES)
def test_phases_announced_by_lines(text, phase):
    assert silence.announced_phase(text) == phase


def message(*texts):
    """The phases after lines, ten seconds apart."""
    known = silence.Phases()
    for number, text in enumerate(texts):
        known.line(text, 10.0 * number)
    return known


def test_nothing_is_known_at_first():
    assert (message().current, message("hello").current, message().announces) == ("starting", "starting", False)


def test_a_whole_run_of_llamafactory():
    known = silence.Phases()
    seen = []
    for number, (text, _) in enumerate(LINES[:-5]):
        known.line(text, 10.0 * number)
        seen.append(known.current)
    assert seen == [phase for _, phase in LINES[:-5]]


def test_reading_the_configuration_again_while_saving_is_not_loading():
    again = "loading configuration file m/config.json"
    assert message("***** Running training *****", "Saving model checkpoint to x", again).current == "saving"
    assert message("***** Running training *****", again).current == "training"
    assert message("Training completed. Do not forget", again).current == "finishing"


def test_script_may_announce_any_phase_at_any_time():
    assert message("clusterctl: phase training", "clusterctl: phase loading").current == "loading"


def test_step_ends_an_evaluation_after_a_delay():
    """The progress of step 10 is written before the evaluation starts, and read after it."""
    for late, phase in [(0.0, "evaluating"), (1.9, "evaluating"), (2.0, "training"), (900.0, "training")]:
        known = message("***** Running training *****", "***** Running Evaluation *****")
        known.progress({"step": 10, "total": 100}, 10.0 + late)
        assert known.current == phase, late


def test_the_end_of_an_evaluation():
    known = message(
        "***** Running training *****", "***** Running Evaluation *****", "{'eval_loss': '1.5', 'epoch': '1'}"
    )
    assert known.current == "training"


def test_step_starts_training_without_an_announcement():
    known = silence.Phases()
    known.progress({"step": 1, "total": 9}, 0.5)
    assert (known.current, known.announces) == ("training", False)


def test_the_last_step_finishes():
    known = message("***** Running training *****")
    known.progress({"step": 99, "total": 100}, 5.0)
    assert (known.current, known.finished) == ("training", False)
    known.progress({"step": 100, "total": 100}, 6.0)
    assert (known.current, known.finished) == ("finishing", True)


def test_step_is_the_last_only_if_the_total_is_known():
    known = silence.Phases()
    known.step(1.0)
    assert (known.current, known.finished) == ("training", False)


def test_the_evaluation_after_the_last_step_ends_in_finishing():
    known = message(
        "***** Running training *****", "Training completed. Do not forget", "***** Running Evaluation *****"
    )
    assert known.current == "evaluating"
    known.line("***** eval metrics *****", 60.0)
    assert known.current == "finishing"


def test_lines_that_announce_training():
    assert message("***** Running training *****").announces
    assert message("clusterctl: phase training").announces
    assert not message("***** Running Evaluation *****").announces


def test_a_second_training_is_not_finished():
    known = message("***** Running training *****", "Training completed. Do not forget", "***** Running training *****")
    assert (known.current, known.finished) == ("training", False)


def test_lines_are_cheap():
    import timeit

    text = "x" * 4096
    assert timeit.timeit(lambda: silence.announced_phase(text), number=200) / 200 < 0.001
