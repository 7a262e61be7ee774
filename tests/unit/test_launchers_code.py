"""Files sent with a script or a module, a config's overrides, and what Python loads automatically on the nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from provision.errors import UsageError
from provision.launchers import from_words, pack
from provision.run import Job

HOOK = Path(__file__).parents[2] / "trainer/hooks/sitecustomize.py"


@pytest.fixture
def here(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return folder


def put(path, text="x\n", mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def names(travel):
    return sorted(entry.arcname for entry in travel.entries)


# --- scripts -------------------------------------------------------------------------------------


def test_script_is_sent_with_its_folder(here):
    for name in ("train.py", "model/net.py", "ds.json", "__pycache__/net.pyc", ".git/config", "env.ccb"):
        put(here / name)
    travel = pack(from_words(["train.py", "--deepspeed", "ds.json"]))
    assert names(travel) == ["job/ds.json", "job/model/net.py", "job/train.py"]
    assert travel.config_name == "train.py"
    assert list(travel.texts) == ["hooks/sitecustomize.py"]
    assert travel.texts["hooks/sitecustomize.py"] == HOOK.read_bytes()


def test_ignored_files_are_not_sent(here):
    subprocess.run(["git", "init", "-q", "."], check=True)
    for name in ("train.py", "data/big.bin", "pkg/__init__.py", "new.py"):
        put(here / name)
    put(here / ".gitignore", "data/\n")
    assert names(pack(from_words(["train.py"]))) == [
        "job/.gitignore",
        "job/new.py",
        "job/pkg/__init__.py",
        "job/train.py",
    ]


def test_records_of_runs_and_private_keys_are_not_sent(here):
    put(here / "train.py")
    put(here / "runs/20261121-071500-sft-3f2a/run.json", "{}")
    put(here / "runs/20261121-071500-sft-3f2a/gpu01/rank0.log")
    put(here / "runs/mine.txt")
    put(here / "id_ed25519", "-----BEGIN OPENSSH PRIVATE KEY-----\n", 0o600)
    put(here / "notes", mode=0o600)
    travel = pack(from_words(["train.py"]))
    assert names(travel) == ["job/notes", "job/runs/mine.txt", "job/train.py"]
    assert [notice for notice in travel.notices if "id_ed25519" in notice]


def test_files_written_by_the_command_are_not_sent(here, monkeypatch):
    put(here / "train.py")
    put(here / "train.log")
    written = (here / "train.log").stat()
    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda number: written if number == 1 else real(number))
    assert names(pack(from_words(["train.py"]))) == ["job/train.py"]


def test_given_folder_is_sent(here):
    put(here / "scripts/train.py")
    put(here / "configs/a.yaml")
    travel = pack(from_words(["scripts/train.py", "--config", "configs/a.yaml"], code=Path()))
    assert names(travel) == ["job/configs/a.yaml", "job/scripts/train.py"]
    assert travel.config_name == "scripts/train.py"


@pytest.mark.parametrize("args", [["--config", "configs/a.yaml"], ["--config=configs/a.yaml"], ["configs/a.yaml"]])
def test_argument_that_names_a_missing_file(here, args):
    put(here / "scripts/train.py")
    put(here / "configs/a.yaml")
    with pytest.raises(UsageError, match=r"configs/a\.yaml is in") as caught:
        pack(from_words(["scripts/train.py", *args]))
    assert "--code ." in caught.value.hint


def test_arguments_that_name_no_local_file(here):
    put(here / "scripts/train.py")
    put(here / "scripts/ds.json")
    put(here / "train")
    pack(from_words(["scripts/train.py", "ds.json", "train", "--stage=train", "out/x", "/data/x", "--lr=1e-5", "\0"]))


def test_a_script_on_the_nodes(here):
    travel = pack(from_words(["/data/code/train.py", "--x"]))
    assert travel.config_name == "/data/code/train.py"
    assert names(travel) == []
    assert sorted(travel.texts) == ["hooks/sitecustomize.py", "job/.clusterctl"]  # the folder they start in
    assert "not on this machine" in travel.notices[0]


@pytest.mark.parametrize(
    ("words", "options", "text", "hint"),
    [
        (["gone.py"], {}, "gone.py does not exist", "absolute path"),
        (["train.py"], {"code": Path("other")}, "is not in the folder of --code, other", "--code ."),
        (["folder.py"], {}, "is not a file", "SCRIPT.py"),
    ],
)
def test_scripts_that_cannot_be_sent(here, words, options, text, hint):
    put(here / "train.py")
    (here / "other").mkdir()
    (here / "folder.py").mkdir()
    with pytest.raises(UsageError, match=text) as caught:
        pack(from_words(words, **options))
    assert hint in caught.value.hint


def test_home_folder_is_not_sent(here, monkeypatch):
    put(here / "train.py")
    monkeypatch.setenv("HOME", str(here))
    with pytest.raises(UsageError, match="is a home folder or contains one") as caught:
        pack(from_words(["train.py"]))
    assert "--code" in caught.value.hint


def test_too_large_folder_is_named(here):
    put(here / "train.py")
    put(here / "data.bin", "x" * 5000)
    with pytest.raises(UsageError, match="limit is 4 KiB") as caught:
        pack(from_words(["train.py"]), limit=4096)
    assert "absolute path" in caught.value.hint


# --- modules -------------------------------------------------------------------------------------


def test_a_local_module_is_sent_with_the_run(here):
    put(here / "pkg/__init__.py")
    put(here / "pkg/train.py")
    travel = pack(from_words([], module="pkg.train"))
    assert names(travel) == ["job/pkg/__init__.py", "job/pkg/train.py"]
    assert travel.config_name == "pkg.train"


def test_a_module_of_the_environment(here):
    put(here / "other.py")
    travel = pack(from_words([], module="llamafactory.cli"))
    assert names(travel) == []
    assert "packed environment" in travel.notices[0]


# --- what the launcher must know -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "options", "output"),
    [
        ([], {}, None),
        (["--output_dir", "out/a"], {}, "job/out/a"),
        (["--output-dir=/data/out"], {}, "/data/out"),
        (["--output_dir", "out"], {"output": "ckpt/"}, "job/ckpt"),
    ],
)
def test_where_checkpoints_are(here, args, options, output):
    put(here / "train.py")
    assert pack(from_words(["train.py", *args], **options)).output == output


def test_accelerate_config_is_sent(here):
    put(here / "train.py")
    put(here / "conf/a.yaml", "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n")
    travel = pack(from_words(["train.py"], accelerate_config=Path("conf/a.yaml")))
    assert travel.settings == {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP"}
    assert travel.texts["accelerate.yaml"] == (here / "conf/a.yaml").read_bytes()


@pytest.mark.parametrize(
    ("text", "message"), [("a: 1", "not an accelerate config"), ("a: [", "not YAML"), (None, "a.yaml does not exist")]
)
def test_invalid_accelerate_configs(here, text, message):
    put(here / "train.py")
    if text:
        put(here / "a.yaml", text)
    with pytest.raises(UsageError, match=message):
        pack(from_words(["train.py"], accelerate_config=Path("a.yaml")))


# --- a config's overrides ------------------------------------------------------------------------

CONFIG = """\
model_name_or_path: /data/model  # theirs
stage: sft
do_train: true
learning_rate: 1.0e-4
lora_target:
  - q_proj
  - v_proj
deepspeed:
output_dir: out"""


def config(here, *overrides):
    put(here / "our sft.yaml", CONFIG)
    travel = pack(Job("config", "our sft.yaml", overrides))
    return travel, travel.texts["job/our-sft.yaml"].decode()


def test_overrides_are_written_into_the_config(here):
    travel, text = config(here, "learning_rate=2e-5", "lora_target=[k_proj]", "max_steps=3", "output_dir=/data/out")
    assert "learning_rate: 2e-5\n" in text  # as typed: PyYAML and OmegaConf disagree on what number that is
    assert "model_name_or_path: /data/model  # theirs\n" in text
    assert travel.settings["lora_target"] == ["k_proj"]
    assert (travel.settings["max_steps"], travel.output) == (3, "/data/out")
    assert travel.progress == "/data/out/trainer_log.jsonl"
    put(here / "ds.json", "{}")
    travel, text = config(here, "deepspeed=ds.json")
    assert "deepspeed: ds.json\n" in text
    assert names(travel) == ["job/ds.json"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--lr", "KEY=VALUE"),
        ("a.b=1", "KEY=VALUE"),
        ("x=[", "not valid YAML"),
        ("x={a: 1}", "only be set in the config"),
        ("x=a #b", "only be set in the config"),
        ("stage=dance", "one of pt, sft"),
    ],
)
def test_overrides_that_cannot_be_written(here, override, message):
    with pytest.raises(UsageError, match=message):
        config(here, override)


def test_an_alias_is_not_overridden(here):
    put(here / "c.yaml", "a: &x 1\nstage: sft\nmodel_name_or_path: /m\nb: *x\n")
    with pytest.raises(UsageError, match="alias"):
        pack(Job("config", "c.yaml", ("b=2",)))


def test_accelerate_config_is_not_mistaken_for_a_llamafactory_config(here):
    put(here / "a.yaml", "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n")
    with pytest.raises(UsageError, match="an accelerate config") as caught:
        pack(from_words(["a.yaml"]))
    assert "--accelerate-config a.yaml" in caught.value.hint


# --- hooks/sitecustomize.py ----------------------------------------------------------------------

TORCH = """\
rules = []
def register_package(priority, tagger, deserializer):
    rules.append((priority, tagger, deserializer))
"""


def python(tmp_path, code, *folders):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (HOOK.parent, *folders)))}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout


def test_hook_registers_cpu_0_when_torch_is_imported(tmp_path):
    put(tmp_path / "torch/__init__.py", "")
    put(tmp_path / "torch/serialization.py", TORCH)
    message = python(
        tmp_path,
        "import sys; print('torch' in sys.modules)\n"
        "from torch.serialization import rules; (priority, tagger, load), = rules\n"
        "print(priority, tagger(1), load(1, 'cpu:0'), load(1, 'cpu'), load(1, 'cuda:0'))",
        tmp_path,
    )
    assert message == "False\n5 None 1 None None\n"


def test_a_program_without_torch_is_left_alone(tmp_path):
    assert python(tmp_path, "import json; print(json.dumps(1))") == "1\n"
    missing = (
        "import importlib.util as u\ntry: print(u.find_spec('torch.serialization'))\nexcept ImportError: print('none')"
    )
    put(tmp_path / "torch/__init__.py", "")
    assert python(tmp_path, missing, tmp_path) == "None\n"


def test_sitecustomize_of_the_environment_still_runs(tmp_path):
    put(tmp_path / "sitecustomize.py", "print('own')\n")
    assert python(tmp_path, "print('program')", tmp_path) == "own\nprogram\n"


JIT = """\
class JITCheckpointCallback:
    def on_step_begin(self, args, state, control): raise SystemExit("alone")
    on_pre_optimizer_step = on_epoch_end = on_step_end = on_step_begin
"""
RANKS = """\
class ReduceOp: MAX = "max"
def is_available(): return True
def is_initialized(): return True
def get_world_size(): return 2
def all_reduce(flag, op): flag.value = max(flag.value, others.pop(0))
others = []
"""
TENSOR = """\
from . import distributed
class tensor:
    def __init__(self, values, device): self.value = values[0]
    def item(self): return self.value
"""
STEPS = """\
from types import SimpleNamespace as Name
import torch
from transformers.trainer_jit_checkpoint import JITCheckpointCallback as Callback
saved = []
one = Callback()
one.jit_manager = Name(is_checkpoint_requested=False, execute_jit_checkpoint=lambda: saved.append(control.step))
args = Name(device="cpu")
for control, mine, other in [(Name(step=1), 0, 0), (Name(step=2), 0, 1), (Name(step=3), 1, 0)]:
    one.jit_manager.is_checkpoint_requested = bool(mine)
    torch.distributed.others.append(other)
    for when in (one.on_step_begin, one.on_pre_optimizer_step, one.on_epoch_end, one.on_step_end):
        when(args, None, control)
    print(control.step, saved, getattr(control, "should_training_stop", None))
"""


def test_all_ranks_save_after_the_same_step(tmp_path):
    put(tmp_path / "torch/__init__.py", TENSOR)
    put(tmp_path / "torch/distributed.py", RANKS)
    put(tmp_path / "transformers/__init__.py", "")
    put(tmp_path / "transformers/trainer_jit_checkpoint.py", JIT)
    message = python(tmp_path, STEPS, tmp_path)
    assert message == "1 [] None\n2 [2] True\n3 [2, 3] True\n"
