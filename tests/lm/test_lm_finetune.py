"""Fine-tuning on conversations from a folder of Hugging Face: one rank or two, in epochs, resumed, exported."""

import json
import random

import pytest

SIZES = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
COLOURS = {"apple": "red", "river": "blue", "cloud": "white", "stone": "grey"}
ARGV = ["--init", "base", "--data", "chats.jsonl", "--block-size", 128, "--learning-rate", "1e-2", "--trackers", "none"]
ARGV += ["--val", 0.2, "--eval-interval", 4, "--keep", 0, "--workers", 1]


@pytest.fixture(scope="module")
def base(gpt):
    """A random Llama with a vocabulary, a template and conversations."""
    argv = ("--tokens", "bpe", "--vocab-size", 320)
    gpt.program("prepare", "first.txt", "--out", "words", *argv)
    meta = json.loads((gpt.folder / "words/meta.json").read_text())
    folder = gpt.folder / "architecture"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SIZES, "vocab_size": meta["vocab_size"]}))
    argv = ["--data", "words", "--model", "architecture", "--block-size", 64, "--max-iters", 1, "--eval-interval", 0]
    (run,) = gpt.session([[*argv, "--trackers", "none", "--out", "fresh"]], tiny=False)
    assert run.refused is None
    gpt.program("export", "fresh/latest", "base")
    (gpt.folder / "base/chat_template.jinja").write_text(TEMPLATE)
    drawn = random.Random(0)
    rows = []
    for _ in range(60):
        thing = drawn.choice(sorted(COLOURS))
        asked = {"role": "user", "content": f"colour of the {thing}"}
        rows.append({"messages": [asked, {"role": "assistant", "content": COLOURS[thing]}]})
    (gpt.folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return gpt.folder / "base"


@pytest.fixture(scope="module")
def tuned(gpt, base):
    runs = {
        "whole": ["--batch-size", 4, "--epochs", 3],
        "halves": ["--batch-size", 2, "--accumulation", 2, "--epochs", 3],
        "resumed": ["--batch-size", 4, "--resume", "tuned-whole/iter_4"],
        "template": ["--batch-size", 4, "--epochs", 1, "--template", "chatml"],
    }
    found = gpt.session([[*ARGV, *argv, "--out", f"tuned-{name}"] for name, argv in runs.items()], tiny=False)
    two = [*ARGV, "--batch-size", 2, "--epochs", 3, "--out", "tuned-two"]
    runs["two"] = []
    return dict(zip(runs, [*found, *gpt.session([two], ranks=2, tiny=False)], strict=True))


def test_answers_are_learned(tuned):
    losses = tuned["whole"].losses
    held_back = tuned["whole"].records("eval_loss")
    assert max(losses) >= 6
    assert losses[max(losses)] < losses[1] - 1
    assert held_back[max(held_back)] < held_back[4]


@pytest.mark.parametrize("name", ["halves", "two"])
def test_every_split_of_a_step_has_the_same_loss(tuned, name):
    """Rows have different numbers of answers, so a mean of the means of ranks would differ."""
    assert tuned[name].losses == pytest.approx(tuned["whole"].losses, abs=2e-4)
    assert tuned[name].records("eval_loss") == pytest.approx(tuned["whole"].records("eval_loss"), abs=2e-4)


def test_a_resumed_fine_tuning_has_the_same_losses(tuned):
    after = {step: loss for step, loss in tuned["whole"].losses.items() if step > 4}
    assert tuned["resumed"].losses == after


def test_the_template_decides_what_is_read(tuned):
    assert tuned["template"].losses[1] != tuned["whole"].losses[1]


def test_the_export_keeps_the_template_and_the_vocabulary(gpt, base, tuned):
    gpt.program("export", "tuned-whole/final", "tuned-hf", "--dtype", "bfloat16")
    for name in ("chat_template.jinja", "tokenizer.json"):
        assert (gpt.folder / "tuned-hf" / name).read_bytes() == (base / name).read_bytes()
    kept, before = (json.loads((path / "config.json").read_text()) for path in (gpt.folder / "tuned-hf", base))
    assert kept["torch_dtype"] == "bfloat16"
    assert kept["hidden_size"] == before["hidden_size"]


def test_what_cannot_be_read_is_refused(gpt, base, tuned):
    """A record without its field, conversations for a model without tokens, and a model without one of its files."""
    (gpt.folder / "torn.jsonl").write_text('{"messages": [{"role": "user"}]}\n')
    shards = gpt.folder / "shards"
    shards.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        (shards / name).write_bytes((base / name).read_bytes())
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    more = ["--max-iters", 1, "--eval-interval", 0, "--save", "false"]
    runs = [
        [*ARGV, *more, "--data", "torn.jsonl", "--out", "refused-1"],
        ["--data", "chats.jsonl", "--trackers", "none", *more, "--out", "refused-2"],
        [*ARGV, *more, "--init", "shards", "--out", "refused-3"],
        [*ARGV, *more, "--data", "chats.jsonl", "words", "--out", "refused-4"],
    ]
    found = [run.refused for run in gpt.session(runs, tiny=False)]
    assert all(found), found
    assert "torn.jsonl" in found[0]["what"]
    assert "content" in found[0]["what"]
    assert "conversations need a model with tokenizer.json" in found[1]["what"]
    assert "model-00001-of-00002.safetensors is missing" in found[2]["what"]
    assert "shards of tokens and conversations" in found[3]["what"]
