"""Where a script saves and how it resumes, by its arguments, its configuration files and its source."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import PurePosixPath
from types import SimpleNamespace

import pytest

from provision.errors import ClusterctlError, UsageError
from provision.launchers import pack
from provision.run import Job
from provision.run.outputs import output_of
from provision.run.resume_args import Resuming, derive, notices
from provision.run.script_source import Source
from provision.tasks.resume_arg import Place, choose_resume_arg, learn_resume_arg, with_resume_arg
from trainer.agent.contract.plan import Plan, Resume, from_json

NANOGPT = """
out_dir = 'out'
init_from = 'scratch' # 'scratch' or 'resume' or 'gpt2*'
exec(open('configurator.py').read())
if init_from == 'scratch':
    pass
elif init_from == 'resume':
    ckpt_path = os.path.join(out_dir, 'ckpt.pt')
"""
ARGPARSE = "import argparse\nparser = argparse.ArgumentParser()\n"


def argparse(*calls):
    return ARGPARSE + "".join(f"parser.add_argument({call})\n" for call in calls)


def source(tmp_path, text, name="train.py", **modules):
    for module, body in {name.removesuffix(".py"): text, **modules}.items():
        (tmp_path / f"{module}.py").write_text(body)
    return Source.read([tmp_path / name], tmp_path)


DEEPSPEED = "import deepspeed\n" + argparse('"--resume", default=None')
SCRIPTS = {
    NANOGPT: "--init_from=resume",
    argparse('"--resume_from_checkpoint", type=str, default=None'): "--resume_from_checkpoint {checkpoint}",
    argparse('"-r", "--resume", type=str, default=""'): "--resume {checkpoint}",
    argparse('"--resume", action="store_true"'): "--resume",
    argparse('"--resume", action=argparse.BooleanOptionalAction'): "--resume",
    argparse('"--resume", type=str2bool, default=False'): "--resume True",
    argparse('"--resume", choices=["none", "auto"]'): "--resume auto",
    argparse('"--resume_step", type=int', '"--lr", type=float'): None,
    argparse('"--resume", type=int, default=0'): "--resume {step}",
    argparse('"--load_dir"', '"--ckpt_id"'): "--load_dir {folder} --ckpt_id {tag}",
    argparse('"--resume-from"', '"--resume"'): "--resume-from {checkpoint}",
    argparse('"--load-from"'): None,  # weights alone, in mmdetection
    DEEPSPEED + "engine.load_checkpoint(args.resume)": "--resume {folder}",
    DEEPSPEED + "engine.load_checkpoint(args.resume, tag=args.tag)": "--resume {checkpoint}",
    "import megatron\n" + argparse('"--load"'): "--load {folder}",
    "from transformers import HfArgumentParser, TrainingArguments\n"
    "trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)": "--resume_from_checkpoint {checkpoint}",
    "from transformers import Trainer, TrainingArguments\ntrainer.train()": None,
    "from lightning.pytorch.cli import LightningCLI\nLightningCLI()": "--ckpt_path {checkpoint}",
    "import tyro\nfrom dataclasses import dataclass\n@dataclass\nclass Args:\n    resume: str | None = None\n"
    "args = tyro.cli(Args)": "--resume {checkpoint}",
    "import tyro\nfrom dataclasses import dataclass\n@dataclass\nclass Inner:\n    resume: str = ''\n"
    "@dataclass\nclass Args:\n    inner: Inner\ntyro.cli(Args)": None,  # --inner.resume, as its --help tells
    "import typer\ndef main(resume_from: str = ''): pass\ntyper.run(main)": "--resume-from {checkpoint}",
    "import fire\ndef main(lr=1, resume_from=''):\n    pass\nfire.Fire(main)": "--resume_from {checkpoint}",
    "import click\n@click.command()\n@click.option('--resume', is_flag=True)\ndef main(resume): pass": "--resume",
    "from absl import flags\nflags.DEFINE_string('resume', None, 'checkpoint')": "--resume {checkpoint}",
    "import os\nfolder = os.environ.get('CLUSTERCTL_CHECKPOINT')": "",
    "from transformers.trainer_utils import get_last_checkpoint\nlast = get_last_checkpoint('out')": "",
    "print('hello')": None,
    "def broken(": None,
}


@pytest.mark.parametrize(("text", "expected"), SCRIPTS.items(), ids=range(len(SCRIPTS)))
def test_the_arguments_to_resume(tmp_path, text, expected):
    assert derive(source(tmp_path, text)).text == expected


def test_options_of_an_imported_module_count_after_the_scripts_own(tmp_path):
    options = argparse('"--resume_from_checkpoint"')
    found = source(tmp_path, "from options import parser\nimport sys", options=options)
    assert derive(found).text == "--resume_from_checkpoint {checkpoint}"
    found = source(tmp_path, "from options import parser\n" + argparse('"--load_dir"'), options=options)
    assert derive(found).text == "--load_dir {folder}"


def test_reading_the_source_runs_nothing(tmp_path):
    source(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')", other="raise SystemExit")
    assert derive(source(tmp_path, f"import other\nopen({str(tmp_path / 'ran')!r}, 'w')")) == Resuming(None)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [b"\0\0", b"\xff\xfe", b"(" * 10_000, b"x = 1\n" * 300_000])
def test_a_source_that_cannot_be_parsed_has_no_options(tmp_path, data):
    (tmp_path / "train.py").write_bytes(data)
    assert derive(Source.read([tmp_path / "train.py"], tmp_path)).text is None


def test_what_the_user_reads_before_the_start():
    known = Resuming("--resume {checkpoint}", "its option --resume")
    assert notices(known, "a.py", output_known=True, typed=True) == []
    assert "to resume, a.py gets --resume {checkpoint}" in notices(known, "a.py", output_known=True, typed=False)[0]
    assert "--output DIR" in notices(known, "a.py", output_known=False, typed=True)[0]
    assert "--resume-arg" in notices(Resuming(None), "a.py", output_known=True, typed=False)[0]
    assert "cannot resume: x" in notices(Resuming(None, never="x"), "a.py", output_known=True, typed=False)[0]
    assert notices(Resuming(""), "a.py", output_known=True, typed=False) == []


def chosen(tmp_path, monkeypatch, job, answer="--go {checkpoint}"):
    """The job with its arguments to resume, and what the user was asked."""
    monkeypatch.chdir(tmp_path)
    asked = []
    found = choose_resume_arg(job, pack(job), lambda name: asked.append(name) or answer)
    return found.resume_arg, asked


def test_the_user_is_asked_only_if_nothing_is_known(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("print(1)")
    (tmp_path / "b.py").write_text(argparse('"--resume"'))
    job = Job("script", "a.py", ("--out_dir", "x"))
    assert chosen(tmp_path, monkeypatch, job) == ("--go {checkpoint}", ["a.py"])
    assert chosen(tmp_path, monkeypatch, replace(job, resume_arg="")) == ("", [])
    assert chosen(tmp_path, monkeypatch, replace(job, target="b.py")) == ("--resume {checkpoint}", [])
    assert chosen(tmp_path, monkeypatch, replace(job, args=())) == (None, [])


class Session:
    """Answers for rank 0's node, and keeps what was asked and said."""

    def __init__(self, answer):
        self.answer, self.asked, self.said = answer, [], []
        self.inventory = SimpleNamespace(train=SimpleNamespace(env={"PYTHONPATH": "src"}))

    def stage(self, key, title, total):
        return nullcontext()

    def output(self, node, script, *, deadline):
        self.asked.append(script)
        if isinstance(self.answer, Exception):
            raise self.answer
        return json.dumps(self.answer)

    def emit(self, notice):
        self.said.append(notice.text)


def learned(tmp_path, monkeypatch, answer, text, job, ask=None):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(text)
    session, place = Session(answer), Place(None, PurePosixPath("/runs/r 1"), PurePosixPath("/env"))
    return learn_resume_arg(session, job, pack(job), place, ask).resume_arg, session


HIDDEN = "import argparse\nfrom mine import add_options"
HELP = {"text": "options:\n  --resume_from PATH  a checkpoint\n", "rc": 0}
SAVES = Job("script", "a.py", ("fit", "--out_dir", "x"))


def test_a_program_is_asked_on_the_node_and_the_answer_is_told(tmp_path, monkeypatch):
    text, session = learned(tmp_path, monkeypatch, HELP, HIDDEN, SAVES)
    assert text == "--resume_from {checkpoint}"
    assert session.asked == [
        "exec /env/bin/python -I '/runs/r 1'/agent usage --path=src -- '/runs/r 1'/job a.py fit --help\n"
    ]
    assert [each.partition(",")[0] for each in session.said] == ["to resume"]
    job = Job("module", "a", ("--out_dir", "x"), env={"PYTHONPATH": "lib"})
    _, session = learned(tmp_path, monkeypatch, HELP, HIDDEN, job)
    assert "--path=lib -- '/runs/r 1'/job -m a --help" in session.asked[0]


@pytest.mark.parametrize(
    "answer",
    [
        *({**HELP, "rc": rc} for rc in (None, 1, 2, "0")),
        *({"text": 1, "rc": 0}, {"rc": 0}, {"text": "", "rc": 0}, []),
        {"text": "a\nImportError: x\n", "rc": 1},
        ClusterctlError("no answer"),
    ],
)
def test_without_an_answer_the_user_is_asked(tmp_path, monkeypatch, answer):
    text, session = learned(tmp_path, monkeypatch, answer, HIDDEN, SAVES, lambda name: f"--go-on {name}")
    assert text == "--go-on a.py"
    assert "is not known" in session.said[-1]
    assert learned(tmp_path, monkeypatch, answer, HIDDEN, SAVES)[0] is None


def test_the_reason_is_told(tmp_path, monkeypatch):
    for answer, reason in (
        (
            {"text": "Traceback …\n  File\nImportError: no torch\n", "rc": 1},
            "it ended with status 1: ImportError: no torch",
        ),
        ({"text": "step 1\n", "rc": None}, "no answer in time: step 1"),
        (ClusterctlError("no connection"), "no connection"),
    ):
        assert learned(tmp_path, monkeypatch, answer, HIDDEN, SAVES)[1].said[0] == f"a.py --help: {reason}"


@pytest.mark.parametrize(
    ("text", "job"),
    [
        (HIDDEN, Job("script", "a.py")),  # it is not known to save anything
        (HIDDEN, replace(SAVES, resume_arg="")),
        (argparse('"--resume"'), SAVES),
        ("print(1)", SAVES),
    ],
)
def test_no_other_program_is_asked(tmp_path, monkeypatch, text, job):
    assert learned(tmp_path, monkeypatch, HELP, text, job)[1].asked == []


def test_a_resume_takes_other_arguments_and_keeps_them_in_the_plans():
    plan = Plan("r", "node01", ("x",), {}, launcher="torchrun", resume=Resume("job/out", known=False))
    (new,) = with_resume_arg([plan], "--load_dir {folder} --ckpt_id {tag}")
    assert new.resume == Resume("job/out", ("--load_dir", "{folder}", "--ckpt_id", "{tag}"), known=True)
    assert from_json(new.to_json()) == new
    for launcher, text, message in (
        ("torchrun", "--resume {path}", "is not one of"),
        ("torchrun", "--hf_token hf_x", "every user"),
        ("llamafactory", "--resume", "is for scripts"),
    ):
        with pytest.raises(UsageError, match=message):
            with_resume_arg([plan._replace(launcher=launcher)], text)


def test_places_are_filled_by_the_agent():
    resume = Resume("out", ("--a={folder}", "{tag}", "{name}", "{step}", "{checkpoint}"), {"X": "{checkpoint}"})
    filled = resume.filled("/r/out/{step}/iter_10", 10)
    assert filled.argv == ("--a=/r/out/{step}", "iter_10", "iter_10", "10", "/r/out/{step}/iter_10")
    assert filled.env == {"X": "/r/out/{step}/iter_10"}
    with pytest.raises(ValueError, match="has no step"):
        resume.filled("/r/out/best", None)
    assert Resume("out", ("{tag}",)).filled("/r/out/best", None).argv == ("best",)


# --- where it saves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--out_dir=out-x"], "out-x"),
        (["--out-dir", "out-x"], "out-x"),
        (["--output_dir", "a", "--output_dir", "b"], "b"),
        (["--save-dir", "s", "--logdir", "l"], "s"),
        (["--logdir", "l"], "l"),
        (["--checkpoint_dir", "model", "--output_dir", "out"], "out"),
        (["--default_root_dir", "/data/run"], "/data/run"),
        (["trainer.default_root_dir=x"], "x"),
        (["--save", "out/model.pt"], "out"),
        (["--save", "model.pt"], None),
        (["--save"], None),
        (["--save", "--lr", "1"], None),
        (["--output_dir", "."], None),
        (["--output_dir", ""], None),
        (["--output_dir", "$HOME/x"], None),
        (["--output_dir", "s3://bucket/x"], None),
        (["--save_steps", "10"], None),
        ([], None),
    ],
)
def test_the_folder_in_the_arguments(tmp_path, args, expected):
    assert output_of(Job("script", "train.py", tuple(args)), tmp_path, Source()) == expected


def test_typed_folder_has_precedence_then_arguments_then_configuration_then_source(tmp_path):
    (tmp_path / "a.yaml").write_text("training:\n  output_dir: from-yaml\n  lr: 1\n")
    (tmp_path / "b.json").write_text(json.dumps({"model": {"checkpoint_dir": "in"}, "save_dir": "from-json"}))
    (tmp_path / "c.py").write_text("out_dir = 'from-py'\n")
    (tmp_path / "bad.yaml").write_text("a: [")
    script = source(tmp_path, argparse('"--output-dir", default="from-source"'))

    def found(*args, **more):
        return output_of(replace(Job("script", "train.py", args), **more), tmp_path, script)

    assert found("--config", "a.yaml", "--output_dir", "typed", output="x") == "x"
    assert found("--config", "a.yaml", "--output_dir", "typed") == "typed"
    assert found("--config=a.yaml") == "from-yaml"
    assert found("b.json") == "from-json"
    assert found("c.py") == "from-py"
    assert found("--config", "bad.yaml", "--config2", "none.yaml") == "from-source"


def test_nanogpts_default_folder_and_option(tmp_path):
    script = source(tmp_path, NANOGPT)
    assert output_of(Job("script", "train.py"), tmp_path, script) == "out"
    assert output_of(Job("script", "train.py", ("--out_dir=out-x",)), tmp_path, script) == "out-x"


def test_files_of_a_run_have_both(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(NANOGPT)
    files = pack(Job("script", "train.py"))
    assert (files.output, files.resuming.text) == ("job/out", "--init_from=resume")
