"""The DeepSpeed files of a job: which are checked, against which arguments, and what the commands print."""

import json
from pathlib import Path

import pytest

from provision.errors import ListedError
from provision.launchers import from_words, pack
from provision.run import RunFiles
from provision.run.program import read_program
from provision.run.script_source import Source
from provision.tasks.ds_files import check_job, context_of, refuse, world_of

DS = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}}}
TRAINER = "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
OWN = "import deepspeed\nfrom transformers import GPT2LMHeadModel\nconfig = 'ds.json'\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(DS))
    return tmp_path


def checked(words, settings=None, texts=None):
    job = from_words(tuple(words.split()))
    source = None if job.kind == "config" else Source.read([Path(job.target)], Path())
    files = RunFiles(Path("x"), "x", texts or {}, (), settings=settings or {}, source=source)
    return check_job(job, files, world=2, env={})


def levels(words, **more):
    return {each.file: [(one.level, one.key) for one in each.findings] for each in checked(words, **more)[0]}


def test_the_arguments_of_a_trainer_are_compared(here):
    Path("train.py").write_text(TRAINER)
    typed = "train.py --deepspeed ds.json --per_device_train_batch_size 2"
    assert levels(typed) == {"ds.json": [("error", "optimizer.params.lr")]}
    assert levels(f"{typed} --learning_rate 2e-5") == {"ds.json": []}
    assert levels(f"deepspeed --num_gpus 2 {typed}") == {"ds.json": [("error", "optimizer.params.lr")]}


def test_arguments_in_the_script_count_and_unknown_ones_do_not(here):
    script = Path("train.py")
    script.write_text(
        TRAINER + "TrainingArguments(learning_rate=1e-4, per_device_train_batch_size=n, deepspeed='ds.json')"
    )
    assert levels("train.py") == {"ds.json": [("error", "optimizer.params.lr")]}
    script.write_text(TRAINER + "TrainingArguments(**made, deepspeed='ds.json')")
    assert levels("train.py") == {"ds.json": []}
    script.write_text("from transformers import Trainer\n")  # where its arguments come from is not known
    assert levels("train.py --deepspeed ds.json") == {"ds.json": []}
    script.write_text("from trl import SFTConfig, TrlParser\n")  # with other defaults
    assert levels("train.py --deepspeed ds.json") == {"ds.json": []}
    assert levels("train.py --deepspeed ds.json --learning_rate 1e-4") == {
        "ds.json": [("error", "optimizer.params.lr")]
    }
    script.write_text(TRAINER + "class Mine(TrainingArguments):\n    learning_rate: float = 2e-5\n")
    assert levels("train.py --deepspeed ds.json --per_device_train_batch_size 2") == {"ds.json": []}


def test_a_script_that_calls_deepspeed_reads_the_file_itself(here):
    Path("train.py").write_text(OWN)
    Path("ds.json").write_text('{"train_micro_batch_size_per_gpu": "auto", // all\n "zero_optimization": {"stage": 2}}')
    (found,) = checked("train.py")[0]  # the script names the file
    assert [(each.level, each.line) for each in found.findings] == [("error", 1), ("warning", 1)]
    Path("train.py").write_text(OWN + "import json\njson.load(open(config))\n")
    assert [each.level for each in checked("train.py")[0][0].findings] == ["error", "error"]


def test_a_trainer_in_a_module_of_the_folder_is_found(here):
    Path("train.py").write_text("import deepspeed\nfrom parts import made\n")
    Path("parts").mkdir()
    Path("parts/__init__.py").write_text("from parts.made import made")
    Path("parts/made.py").write_text(TRAINER)
    assert read_program(Source.read([Path("train.py")], Path())).kind == "trainer"
    Path("parts/made.py").write_text("from accelerate import Accelerator")
    assert read_program(Source.read([Path("train.py")], Path())).kind == "accelerate"
    Path("train.py").write_text("def (")
    assert read_program(Source.read([Path("train.py")], Path())) is None
    assert read_program(Source.read([Path("none.py")], Path())) is None


def test_a_config_of_llamafactory_and_one_of_accelerate_name_files_too(here):
    Path("sft.yaml").write_text("model_name_or_path: m\ndeepspeed: ds.json\nlearning_rate: 1e-4\n")
    settings = {"deepspeed": "ds.json", "learning_rate": "1e-4", "per_device_train_batch_size": 2}
    (found,) = checked("sft.yaml", settings=settings)[0]
    assert [each.fix for each in found.findings] == ['learning_rate: 2.0e-5; or write "auto"']
    made = {"job/ds_zero2.json": b'{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'}
    findings, files = checked("sft.yaml", settings={"deepspeed": "ds_zero2.json"}, texts=made)
    assert [each.file for each in findings] == ["ds_zero2.json"]
    assert "cpu_adam" in {getattr(each, "name", "") for each in files.needs}
    Path("train.py").write_text("from accelerate import Accelerator\n")
    Path("acc.yaml").write_text("distributed_type: DEEPSPEED\n")
    words = "accelerate launch --config_file acc.yaml train.py"
    assert levels(words, settings={"deepspeed_config": {"deepspeed_config_file": "ds.json"}}) == {"ds.json": []}


def test_a_script_on_the_nodes_is_known_by_its_arguments(here):
    job = from_words(("/data/run_clm.py", "--deepspeed", "ds.json", "--output_dir", "out"))
    assert context_of(job, {}).program == "trainer"
    assert context_of(from_words(("/data/x.py", "--deepspeed_config", "ds.json")), {}).program == "unknown"


def test_files_that_cannot_be_read_are_findings(here):
    Path("train.py").write_text(TRAINER)
    for data, what in ((b'{"a": "\xd6\xd0"}', "not UTF-8"), ('{"a": 1}'.encode("utf-16"), "UTF-16"), (b"", "empty")):
        Path("ds.json").write_bytes(data)
        assert what in checked("train.py --deepspeed ds.json")[0][0].findings[0].what


def test_the_world_is_known_from_the_command_or_the_inventory(here):
    Path("train.py").write_text(TRAINER)
    node = type("N", (), {"gpus": 8})()
    assert world_of(from_words(("train.py",)), [node, node]) == 16
    assert world_of(from_words(("train.py",), per_node=4), [node, node]) == 8
    assert world_of(from_words(("train.py",)), [type("N", (), {"gpus": None})()]) is None


def test_errors_refuse_the_run_with_all_of_them_and_force_shows_them(here):
    Path("train.py").write_text(TRAINER)
    Path("ds.json").write_text('{"zero_optimization": {"stage": 7,}, "x": 1}')
    found, _ = checked("train.py --deepspeed ds.json")
    with pytest.raises(ListedError, match="nothing was started") as refused:
        refuse(found, forced=False, again="clusterctl train --force")
    assert len(refused.value.problems) == 3
    assert all(each.startswith("ds.json:1:") for each in refused.value.problems)
    assert refused.value.hint.endswith("clusterctl train --force")
    assert refuse(found, forced=True, again="") == [each.replace(" warning: ", " ") for each in refused.value.problems]


def test_the_command_lists_findings_and_exits_with_2(here, run):
    Path("train.py").write_text(TRAINER)
    typed = ("--", "deepspeed", "train.py", "--deepspeed", "ds.json", "--per_device_train_batch_size", "2")
    code, out, err = run("ds-config", "--check", "ds.json", *typed)
    assert code == 2
    assert out.startswith("ds.json:1:")
    assert "--learning_rate 2e-5" in out
    assert "a problem prevents the run" in err
    assert run("ds-config", "--check", "ds.json", *typed, "--learning_rate", "2e-5")[:2] == (
        0,
        "ds.json: no problem found\n",
    )
    code, out, _ = run("ds-config", "--check", "ds.json", "--json", "--", "--output_dir", "o", "--deepspeed", "ds.json")
    data = json.loads(out)
    assert (code, data["program"], data["deepspeed"]) == (2, "trainer", "0.19.8")
    assert {(each["line"], each["level"]) for each in data["findings"]} == {(1, "error")}
    code, _, err = run("ds-config", "--check", "ds.json", "--like", "z2", "--stage", 3)
    assert (code, "--like" in err, "--stage" in err) == (2, True, True)
    code, _, err = run("ds-config", "--", "deepspeed", "train.py")
    assert (code, "--check FILE -- deepspeed train.py" in err) == (2, True)


def test_a_preset_shows_the_arguments_that_match(run):
    code, out, err = run("ds-config", "--like", "llama-7b")
    assert code == 0
    assert json.loads(out)["fp16"]["enabled"] is True
    assert "--learning_rate 2e-5 --weight_decay 0 --warmup_steps 1000 --fp16" in err
    assert "learning_rate: 2.0e-5" in err
    data = json.loads(run("ds-config", "--like", "llama-7b", "--json")[1])
    assert "--learning_rate 2e-5" in data["arguments"]
    assert "warmup_steps: 1000" in data["llamafactory"]


def test_a_script_is_read_once(here):
    Path("train.py").write_text(TRAINER)
    job = from_words(("train.py", "--deepspeed", "ds.json", "--per_device_train_batch_size", "2"))
    files = pack(job)
    Path("train.py").write_text(OWN)  # is not read again: pack gave its source on
    ((found,),) = [each.findings for each in check_job(job, files, world=2, env={})[0]]
    assert found.key == "optimizer.params.lr"
