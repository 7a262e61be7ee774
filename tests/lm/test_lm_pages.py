"""Every command of the documentation that starts a program of the trainer runs, with small files under its names.

``pages.py`` says what is made smaller. Commands of a page run in its order, in one folder, as a reader types them.
"""

import json
import shutil

import pages
import pytest
from trainings import HERE

# Names that the pages use for what a reader has: models, published sizes, texts and conversations.
STANDINS = (
    *("Qwen2.5-3B", "Qwen2.5-7B", "Qwen3-8B", "llama-7b", "gpt2-folder"),
    *("sizes/gpt2-xl", "sizes/gpt2-medium", "sizes/qwen3-0.6b"),
    *("book.txt", "more.txt", "corpus-00.jsonl.gz", "corpus-01.jsonl.gz", "wikitext/train-00000-of-00001.parquet"),
    *("chats.jsonl", "rare.jsonl", "quiz.jsonl"),
    *("Qwen2.5-VL-3B", "siglip", "Qwen2.5-1.5B", "mixed.jsonl", "captions.jsonl", "chats"),
)
NAMES = ("training", "pretraining", "fine-tuning", "vision", "guides")
LONGEST = 120  # seconds of a command


@pytest.fixture(scope="module")
def standins(forks, tmp_path_factory):
    """A folder with small models and data under the names that the pages use."""
    folder = tmp_path_factory.mktemp("standins")
    done = forks.run(HERE / "standins.py", folder, *STANDINS, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_pages_of_the_trainer_have_commands():
    wanted = {"README.md"} | {f"docs/{name}.md" for name in NAMES}
    assert wanted <= set(pages.pages())


@pytest.mark.parametrize("page", pages.pages())
def test_every_command_of_the_page_runs(forks, standins, tmp_path, page):
    folder = tmp_path / "here"
    shutil.copytree(standins, folder)
    for name, text in pages.files(page).items():
        (folder / name).write_text(text)
    for command in pages.commands(page):
        words = ("-m", command.program, *_globbed(folder, command.argv))
        done = forks.run(*words, cwd=folder, ranks=command.ranks, timeout=LONGEST)
        shown = f"{page}: {command.line}\n{' '.join(command.argv)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        if command.refusal:
            assert done.returncode == 2, shown
            assert command.refusal in done.stderr, shown
        else:
            assert done.returncode == 0, shown


def test_warmup_decay_differs_from_ours_as_the_guides_page_says(forks, tmp_path):
    done = forks.run(HERE / "warmup_decay.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rates = json.loads(done.stdout.splitlines()[-1])
    ours, default, linear = rates["ours"], rates["default"], rates["linear"]
    assert default[0] == linear[0] == 0 < ours[0]
    assert default[5] > 1.3 * linear[5]  # logarithmic
    assert linear[20:] == pytest.approx(ours[19:-1])  # one step later
    assert default[20:] == linear[20:]


def _globbed(folder, argv):
    """The words after the shell's expansion of ``*``."""
    for word in argv:
        found = sorted(folder.glob(word)) if "*" in word else []
        yield from [path.relative_to(folder) for path in found] or [word]
