"""Git-ignored files: which of them a run sends, what stays behind, and how a failed run's missing file is explained."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from provision.errors import UsageError
from provision.launchers import from_words, pack
from provision.run.ignored import Unsent, find_unsent, unsent_text

IGNORE = "*.bin\n*.pkl\ndata/big/\n/out*/\nwandb/\nmodel/\n.env\n*.npz\n"
# nanoGPT's way: the script's defaults are replaced by a configuration in Python, and that by the command line.
SCRIPT = """\
\"\"\"Trains. Data: data/big\"\"\"
import os, sys
out_dir = 'out'
dataset = 'openwebtext'
exec(open('configurator.py').read())
data_dir = os.path.join('data', dataset)
print("reading .env")
open(os.path.join(data_dir, 'train.bin'))
"""
CONFIG = "out_dir = 'out-shakespeare'\ndataset = 'shakespeare_char'\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A repository with data sets, results of earlier runs, and a program that names them."""
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q", "."], check=True)
    for name, text in {
        ".gitignore": IGNORE,
        "train.py": SCRIPT,
        "config/train_shakespeare_char.py": CONFIG,
        "data/shakespeare_char/prepare.py": "",
        "data/shakespeare_char/train.bin": "x" * 100,
        "data/shakespeare_char/meta.pkl": "x",
        "data/openwebtext/prepare.py": "",
        "data/openwebtext/train.bin": "x" * 5000,
        "data/big/part.npz": "x" * 3000,
        "data/vlm.npz": "x" * 10,
        "out/ckpt.pt": "x" * 900,
        "out-shakespeare/ckpt.pt": "x" * 800,
        "wandb/run-1/files/a.log": "x" * 700,
        "model/model.safetensors": "x" * 600,
        ".env": "TOKEN=x",
        "__pycache__/train.cpython-311.pyc": "x",
    }.items():
        put(tmp_path / name, text)
    return tmp_path


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def sent(files) -> set[str]:
    """The git-ignored files that are sent."""
    names = {entry.arcname.removeprefix("job/") for entry in files.entries}
    ignored = subprocess.run(["git", "check-ignore", *names], capture_output=True, text=True, check=False).stdout
    return set(ignored.splitlines())


CHAR = {"data/shakespeare_char/train.bin", "data/shakespeare_char/meta.pkl"}
WEB = {"data/openwebtext/train.bin"}
MODEL = {"model/model.safetensors"}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], WEB),
        (["config/train_shakespeare_char.py"], CHAR),
        (["config/train_shakespeare_char.py", "--dataset=openwebtext"], WEB),
        (["--dataset", "shakespeare_char"], CHAR),
        (["dataset=shakespeare_char"], CHAR),
        (["--dataset=none", "--data_dir", "data/shakespeare_char/"], CHAR),
        (["--dataset=none", "--data=data/vlm.npz,data/shakespeare_char/meta.pkl"], {"data/vlm.npz", *CHAR} - WEB - {
            "data/shakespeare_char/train.bin"}),
        (["--dataset=none", "--files", "data/vlm.npz", "data/big"], {"data/vlm.npz", "data/big/part.npz"}),
        (["--dataset=none", "--model_name_or_path", "./model"], MODEL),
        (["--dataset=none", "--out_dir", "out", "--log-dir=wandb", "--output_dir=model"], set()),
        (["--dataset=none", "--init_from", "out/ckpt.pt"], {"out/ckpt.pt"}),
        (["--dataset=none", "/data/big", "../x", "~", "", ".", "https://h/data/big", "x" * 5000, "\0"], set()),
    ],
)  # fmt: skip
def test_ignored_data_that_is_named_is_sent(here, args, expected):
    files = pack(from_words(["train.py", *args]))
    assert sent(files) == expected
    assert not any("__pycache__" in entry.arcname for entry in files.entries)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "data:\n  train:\n  - path: data/vlm.npz\n  output_dir: out\n"),
        ("a.json", '{"data": {"train": [{"path": "data/vlm.npz"}]}, "out_dir": "out"}'),
        ("a.py", "config = dict(train={'path': 'data/vlm.npz'}, save_dir='out')\n"),
        ("a.py", "import x\nclass C:\n    path: str = 'data/vlm.npz'\n    log_path = 'wandb'\n"),
    ],
)
def test_configuration_that_is_named_names_data(here, name, text):
    put(here / name, text)
    files = pack(from_words(["train.py", "--dataset=none", "--config", name]))
    assert sent(files) == {"data/vlm.npz"}
    assert f"sent although git ignores it, because {name} names it: data/vlm.npz (10 B)" in files.notices


@pytest.mark.parametrize("text", ["a: [", "'''", "\0", "a: &a [*a]", "x = " + "(" * 5000])
@pytest.mark.parametrize("name", ["a.yaml", "a.json", "a.py"])
def test_faulty_configuration_names_nothing(here, name, text):
    put(here / name, text)
    assert sent(pack(from_words(["train.py", "--dataset=none", name]))) == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("load('data/vlm.npz')", {"data/vlm.npz"}),
        ("parser.add_argument('-d', '--data', default='data/vlm.npz', help='data/big')", {"data/vlm.npz"}),
        ("parser.add_argument('--output_dir', default='data/big')", set()),
        ("load_from_disk('data')", CHAR | WEB | {"data/vlm.npz", "data/big/part.npz"}),
        # Results of earlier runs, weights and private files are not sent because a text contains their names.
        ("load('out'); load('model'); load('wandb'); load_dotenv('.env')", set()),
        ('"""data/vlm.npz"""', set()),
    ],
)
def test_text_of_the_script_names_data_but_no_results(here, text, expected):
    put(here / "train.py", text)
    assert sent(pack(from_words(["train.py"]))) == expected


def test_module_of_the_folder_names_data_too(here):
    put(here / "pkg/__init__.py", "")
    put(here / "pkg/run.py", "load('data/vlm.npz')")
    put(here / "pkg/__main__.py", "load('data/big')")
    assert sent(pack(from_words([], module="pkg.run"))) == {"data/vlm.npz"}
    assert sent(pack(from_words([], module="pkg"))) == {"data/big/part.npz"}


def test_what_stays_behind_is_listed_with_its_size(here):
    files = pack(from_words(["train.py", "config/train_shakespeare_char.py"]))
    assert files.unsent == (
        Unsent("data/openwebtext/train.bin", 5000),
        Unsent("data/big/", 3000),
        Unsent("out/", 900),
        Unsent("out-shakespeare/", 800),
        Unsent("wandb/", 700),
        Unsent("model/", 600),
        Unsent("data/vlm.npz", 10),
        Unsent(".env", 7),
    )
    assert unsent_text(files.unsent) == (
        "not sent, git-ignored: data/openwebtext/train.bin (5.0 kB), data/big/ (3.0 kB), out/ (900 B), "
        "out-shakespeare/ (800 B) and 4 more (1.3 kB); --include PATTERN sends more; --dry-run lists all"
    )
    complete = unsent_text(files.unsent, complete=True)
    assert all(each.path in complete for each in files.unsent)
    assert "more (" not in complete


def test_many_unsent_files_of_a_folder_are_one_entry(here):
    for number in range(30):
        put(here / f"data/shakespeare_char/{number}.npz", "xx")
    files = pack(from_words(["train.py", "--dataset=none"]))
    assert Unsent("data/shakespeare_char/*", 161) in files.unsent


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["out/ckpt.pt"], {"out/ckpt.pt"}),
        (["./out/"], {"out/ckpt.pt"}),
        (["out*"], {"out/ckpt.pt", "out-shakespeare/ckpt.pt"}),
        (["*.safetensors", "/wandb"], MODEL | {"wandb/run-1/files/a.log"}),
        (["train.py"], set()),
    ],
)
def test_include_sends_more(here, patterns, expected):
    files = pack(from_words(["train.py", "--dataset=none"], send=tuple(patterns)))
    assert sent(files) == expected
    assert not {each.path for each in files.unsent} & expected


@pytest.mark.parametrize(
    ("words", "options", "error", "hint"),
    [
        (["train.py"], {"send": ("dta/big",)}, "--include dta/big: matches no file in", "--include data/big"),
        (["train.py"], {"send": ("model/weights.bin",)}, "matches no file", "--include model"),
        (["train.py"], {"send": ("zzz",)}, "matches no file", "--dry-run"),
        (["train.py"], {"send": ("",)}, "matches no file", "gitignore"),
        (["a.yaml"], {"send": ("data",)}, "--include goes with a script", "in the config"),
        (["/nodes/train.py"], {"send": ("data",)}, "sends no files", "--code DIR"),
    ],
)
def test_include_that_cannot_work_is_refused(here, words, options, error, hint):
    put(here / "a.yaml", "stage: sft\nmodel_name_or_path: /m\noutput_dir: out\n")
    with pytest.raises(UsageError) as caught:
        pack(from_words(words, **options))
    assert error in str(caught.value)
    assert hint in caught.value.hint


def test_too_much_data_is_refused_if_named_and_left_out_if_only_the_script_mentions_it(here):
    with pytest.raises(UsageError, match="the limit is") as caught:
        pack(from_words(["train.py", "--data_dir", "data/openwebtext"]), limit=4500)
    assert "clusterctl push" in caught.value.hint
    files = pack(from_words(["train.py"]), limit=4500)
    assert sent(files) == set()
    (notice,) = [text for text in files.notices if "too large" in text]
    assert notice.startswith("data/openwebtext (5.0 kB) is git-ignored and too large to send, but train.py names it")


def test_private_key_is_not_sent(here):
    put(here / "out/key", "-----BEGIN OPENSSH PRIVATE KEY-----\n")
    (here / "out/key").chmod(0o600)
    files = pack(from_words(["train.py", "--dataset=none"], send=("out/",)))
    assert sent(files) == {"out/ckpt.pt"}
    assert "out/key: a private key is not sent" in files.notices


def test_without_a_repository_everything_is_sent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "train.py", "load('data/x.bin')")
    put(tmp_path / "data/x.bin", "x")
    files = pack(from_words(["train.py"]))
    assert files.unsent == ()
    assert "job/data/x.bin" in {entry.arcname for entry in files.entries}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("data/train.bin", "data/train.bin"),
        ("./data/train.bin", "data/train.bin"),
        ("/opt/runs/r/job/data/train.bin", "data/train.bin"),
        ("big/sub/x.npz", "big/sub/x.npz"),
        ("big", "big"),
        ("many/7.npz", "many/7.npz"),
        ("data", "data"),
        ("data/val.bin", None),
        ("bigger/x", None),
        ("/data/train.bin", None),
        ("", None),
        ("\0", None),
    ],
)
def test_missing_file_is_found_among_unsent_ones(path, found):
    assert find_unsent(path, ["data/train.bin", "big/", "many/*"]) == found
