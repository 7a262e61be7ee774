"""Fine-tuning on conversations from a folder of Hugging Face: one rank or two, in epochs, resumed, exported."""

import json
import random
import shutil

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


def test_a_checkpoint_and_its_export_write_the_same_text(gpt, tuned):
    gpt.program("export", "tuned-whole/final", "tuned-written")
    words = ("--prompt", "the king", "--tokens", "5", "--temperature", "0")
    assert gpt.program("sample", "tuned-whole/final", *words) == gpt.program("sample", "tuned-written", *words)


@pytest.fixture(scope="module")
def refused(gpt, base, tuned):
    """What refuses each of many wrong command lines, and how to fix it."""
    folder = gpt.folder
    (folder / "untold.jsonl").write_text('{"messages": [{"role": "user"}]}\n')
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (folder / "fields.jsonl").write_text(f'{json.dumps(good)}\n{{"question": "a", "answer": "b"}}\n')
    (folder / "shards").mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        (folder / "shards" / name).write_bytes((base / name).read_bytes())
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "shards/model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "rich.txt").write_text((folder / "first.txt").read_text() + "Zebras and foxes. " * 50)
    gpt.program("prepare", "rich.txt", "--out", "rich", "--tokens", "bpe", "--vocab-size", 700)
    for name, file, text in (
        ("alien", "tokenizer.json", (folder / "rich/tokenizer.json").read_text()),
        ("unknown", "config.json", (base / "config.json").read_text().replace('"llama"', '"mamba"')),
    ):
        shutil.copytree(base, folder / name)
        (folder / name / file).write_text(text)
    new = ["--trackers", "none", "--data", "words", "--model"]
    runs = {
        "content": [*ARGV, "--data", "untold.jsonl"],
        "fields": [*ARGV, "--data", "fields.jsonl"],
        "tokenizer": ["--data", "chats.jsonl", "--trackers", "none"],
        "shard": [*ARGV, "--init", "shards"],
        "kinds": [*ARGV, "--data", "chats.jsonl", "words"],
        "vocabulary": [*ARGV, "--init", "alien"],
        "vocabulary of shards": ["--trackers", "none", "--data", "rich", "--init", "base"],
        "architecture": [*ARGV, "--init", "unknown"],
        "new architecture": [*new, "unknown"],
        "size": [*new, "gpt3"],
        "block": [*ARGV, "--block-size", 512],
        "block of new": [*new, "base", "--block-size", 512],
        "replacement": [*ARGV, "--sampling", "with-replacement"],
        "targets": [*ARGV, "--lora-rank", 2, "--lora-targets", "q_proj,c_attn"],
        "default block": [*new, "base"],
    }
    more = ["--max-iters", 1, "--eval-interval", 0, "--save", "false"]
    found = gpt.session([[*argv, *more, "--out", f"wrong-{name}"] for name, argv in runs.items()], tiny=False)
    return {name: run.refused for name, run in zip(runs, found, strict=True)}


SKIP = "--skip-wrong leaves out such records"


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("content", "untold.jsonl: line 1: messages[0] has no field 'content'; it has 'role'", SKIP),
        (
            "fields",
            "fields.jsonl: line 2 has none of the fields 'instruction', 'conversations', 'messages'; it has",
            SKIP,
        ),
        ("tokenizer", "conversations need a model with tokenizer.json", "--init FOLDER"),
        (
            "shard",
            "shards/model.safetensors.index.json names 1 files, but model-00001-of-00002.safetensors",
            "to shards",
        ),
        ("kinds", "--data names shards of tokens and conversations (chats.jsonl)", "one kind at a time"),
        ("vocabulary", "the data has the token ", "copy the tokenizer.json that came with the model to alien"),
        ("vocabulary of shards", "the vocabularies of rich and base differ", "TEXT --vocabulary base --out DIR"),
        ("architecture", "unknown/config.json: a model of type mamba; known are gpt2, llama, qwen2, qwen3", "these"),
        (
            "new architecture",
            "unknown/config.json: a model of type mamba; known are gpt2, llama, qwen2, qwen3",
            "these",
        ),
        ("size", "--model gpt3: no such size, and no folder with config.json", "sizes: custom, gpt2, gpt2-medium, "),
        ("block", "--block-size 512: base has 256 positions", "--block-size 256"),
        ("block of new", "--block-size 512: base has 256 positions", "--block-size 256"),
        ("replacement", "--sampling with-replacement: conversations are sampled without", "--sampling auto"),
        ("targets", "--lora-targets q_proj,c_attn: a llama model has no c_attn", "some of q_proj,k_proj,v_proj,"),
    ],
)
def test_what_cannot_be_trained_is_refused(refused, name, what, fix):
    assert refused[name] is not None, f"{name} was not refused"
    assert refused[name]["what"].startswith(what)
    assert fix in refused[name]["fix"]
    assert refused[name]["code"] == 2
    assert "\n" not in refused[name]["what"]


def test_a_new_model_has_blocks_that_fit_its_positions(refused):
    """The default block would be longer."""
    assert refused["default block"] is None
