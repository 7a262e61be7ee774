"""How a script resumes by its ``--help``: what is understood, when it is asked, and that asking does no harm."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

import pytest

from provision.run.resume_args import Resuming, by_usage, derive, notices
from provision.run.script_source import Option, Source
from provision.run.usage import options_of
from trainer.agent.usage import TEXT, usage

FOLDER = Path(__file__).with_name("recorded_usage")  # printed by the library of each name, in 120 columns
BOTH = "--resume{} {{folder}} --resume-step {{step}}"
RECORDED = {
    "argparse-3.11": BOTH.format(""),
    "argparse-3.13": BOTH.format(""),
    "click-8.5": "--resume-from {checkpoint}",
    "typer-0.12": BOTH.format("-from"),
    "typer-0.29": BOTH.format("-from"),
    "tyro-0.8": "--train.resume-from {checkpoint}",
    "tyro-1.0": "--train.resume-from {checkpoint}",
    "fire-0.7": "--resume_from {checkpoint}",
    "absl-2.5": "--resume_from {checkpoint}",
    "hydra-1.3": "trainer.resume_from={checkpoint}",
    "jsonargparse-4.53": "--resume true",
}


def recorded(name):
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "expected"), RECORDED.items())
def test_the_arguments_to_resume(name, expected):
    found = by_usage(recorded(name), Source())
    assert (found.text, found.source.endswith("(its --help)")) == (expected, True)


def test_every_recording_is_read():
    assert {path.stem for path in FOLDER.iterdir()} == RECORDED.keys()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("argparse-3.11", Option("--bool", flag=True)),
        ("argparse-3.11", Option("--fp16", flag=True)),
        ("argparse-3.13", Option("--auto-resume", choices=("none", "auto"))),
        ("argparse-3.13", Option("--load-everything-from-this-directory-of-mine")),
        ("click-8.5", Option("--resume", flag=True)),
        ("click-8.5", Option("--mode", choices=("none", "auto"))),
        ("click-8.5", Option("--step", kind="int")),
        ("typer-0.12", Option("--resume", flag=True)),
        ("typer-0.29", Option("--needed")),
        ("typer-0.29", Option("--resume-step", kind="int")),
        ("tyro-1.0", Option("--train.resume", default=False, flag=True)),
        ("tyro-0.8", Option("--train.auto", choices=("none", "auto"))),
        ("fire-0.7", Option("--resume", default=False)),
        ("fire-0.7", Option("--step", kind="int")),
        ("absl-2.5", Option("--resume", flag=True)),
        ("absl-2.5", Option("--mode", choices=("none", "auto"))),
        ("absl-2.5", Option("--step", kind="int")),
        ("hydra-1.3", Option("resume=", default=False)),
        ("hydra-1.3", Option("trainer.max_steps=", kind="int")),
    ],
)
def test_an_option(name, expected):
    assert expected in options_of(recorded(name)).values()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("  -h, --help  show this\n", None),
        ("  --lr LR     see\n              --resume X\n", None),  # in the help of another option
        ("usage: a.py [--resume RESUME]\n", None),
        ("Traceback\nValueError: --resume X\n", None),
        ("  --wandb.resume STR  go on with the W&B run\n", None),
        ("  --resume_from_checkpoint X, --resume-from-checkpoint X\n", "--resume_from_checkpoint {checkpoint}"),
        ("  --resume [RESUME]\n", "--resume {checkpoint}"),
        ("  --resume {never,always}\n", None),
        ("  --resume {None}|STR  \n", "--resume {checkpoint}"),
        ("\x1b[1m  --resume\x1b[0m \x1b[33mPATH\x1b[0m\n", "--resume {checkpoint}"),
        ("  --load_dir X\n  --ckpt_id X\n", "--load_dir {folder} --ckpt_id {tag}"),
        ("  --resume X\n  --resume_from X\n", "--resume_from {checkpoint}"),
        ("  --" + "resume" * 100_000 + "\n" * 100_000, None),
        ("--\n-\n--1\n  -\n[--x\n{\n", None),
    ],
)
def test_lines_of_a_help(text, expected):
    assert by_usage(text, Source()).text == expected


# --- when a program is asked --------------------------------------------------------------------------------------


def of(tmp_path, text):
    (tmp_path / "train.py").write_text(text)
    return derive(Source.read([tmp_path / "train.py"], tmp_path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import argparse\nfrom mine import add_options", "--help"),
        ("import library\nlibrary.parser().parse_args()", ""),
        ("from absl import app, flags\nimport argparse", "--helpfull"),
        ("from transformers import HfArgumentParser\nprint('get_last_checkpoint')", "--help"),
        ("import argparse\nargparse.ArgumentParser(add_help=False)", ""),
        ("import fire\nfire.Fire(lambda **options: 1)\ndef start(**options): pass", ""),
        ("import fire\nfrom mine import start\nfire.Fire(start)", "--help"),
        ("import hydra", "--help"),
        ("print(1)", ""),
    ],
)
def test_only_a_program_with_a_known_parser_is_asked(tmp_path, text, expected):
    assert of(tmp_path, text) == Resuming(None, help=expected)


def test_a_program_that_is_understood_or_cannot_resume_is_not_asked(tmp_path):
    assert of(tmp_path, "import argparse\nargparse.ArgumentParser().add_argument('--resume')").help == ""
    found = of(tmp_path, "from transformers import TrainingArguments, HfArgumentParser")
    assert (found.help, bool(found.never)) == ("", True)


def test_a_parser_in_an_imported_module_counts(tmp_path):
    (tmp_path / "options.py").write_text("import argparse")
    assert of(tmp_path, "import options").help == "--help"


def test_the_user_is_told_that_it_will_be_asked():
    (text,) = notices(Resuming(None, help="--help"), "a.py", output_known=True, typed=False)
    assert text.endswith("the start of the run asks a.py --help")


# --- the program is run -------------------------------------------------------------------------------------------


def run(folder, text, *words, **options):
    (folder / "train.py").write_text(text)
    return usage(str(folder), ["train.py", *words], **options)


def test_the_text_and_the_status(tmp_path):
    (tmp_path / "options.py").write_text("import argparse\nparser = argparse.ArgumentParser()\n")
    answer = run(
        tmp_path,
        "from options import parser\nfor n in ['resume']: parser.add_argument('--' + n)\nparser.parse_args()",
        "-h",
    )
    assert (by_usage(answer["text"], Source()).text, answer["rc"]) == ("--resume {checkpoint}", 0)
    assert run(tmp_path, "raise SystemExit(3)") == {"text": "", "rc": 3}


def test_it_runs_elsewhere_without_gpus_input_or_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "a.yaml").write_text("x")
    (tmp_path / "large.bin").write_bytes(bytes(2 << 20))
    body = """
import os, sys, pathlib
here = pathlib.Path(__file__).resolve().parent
(here / "out").mkdir(); pathlib.Path("out2").mkdir(); (pathlib.Path.home() / "x").write_text("x")
print(sys.stdin.read() == "", os.environ["CUDA_VISIBLE_DEVICES"] == "")
print("HF_TOKEN" in os.environ, os.getsid(0) == os.getpid())
print(pathlib.Path("conf/a.yaml").exists(), pathlib.Path("large.bin").exists(), here == pathlib.Path.cwd(), here)
"""
    before = sorted(tmp_path.rglob("*"))
    answer = run(tmp_path, body)
    assert answer["text"].split()[:-1] == ["True", "True", "False", "True", "True", "False", "True"], answer
    assert sorted({*tmp_path.rglob("*")} - {*before, tmp_path / "train.py"}) == []
    assert not Path(answer["text"].split()[-1]).exists()


def test_its_modules_are_found_by_the_users_path(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "mine.py").write_text("print('found')")
    assert run(tmp_path, "import mine", path="src")["text"] == "found\n"


def test_a_program_that_trains_instead_is_killed_with_its_processes(tmp_path):
    pids = tmp_path / "pids"
    body = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
print("training", flush=True)
if "--help" in sys.argv: time.sleep(100)
"""
    began = time.monotonic()
    assert run(tmp_path, body, "--help", seconds=2.0) == {"text": "training\n", "rc": None}
    assert time.monotonic() - began < 20
    assert all(map(has_ended, pids.read_text().split()))
    assert run(tmp_path, body)["rc"] == 0  # it ended, but left a process
    assert all(map(has_ended, pids.read_text().split()))


def has_ended(pid):
    """Whether a process ends soon: the kernel takes a moment to end one that was killed."""
    try:
        there = os.pidfd_open(int(pid))
    except ProcessLookupError:
        return True
    with os.fdopen(there):
        return bool(select.select([there], [], [], 10)[0])


def test_output_is_bounded(tmp_path):
    answer = run(tmp_path, "import sys\nwhile True: sys.stdout.write('x' * 65536)")
    assert (len(answer["text"]), answer["rc"] != 0) == (TEXT, True)


def test_a_link_out_of_the_folder_is_copied_and_a_broken_one_skipped(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "other.py").write_text("print(7)")
    (tmp_path / "here" / "other.py").symlink_to(tmp_path / "other.py")
    (tmp_path / "here" / "broken.py").symlink_to("nowhere")
    assert run(tmp_path / "here", "import other")["text"] == "7\n"
