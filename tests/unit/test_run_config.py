"""Training configs: their mistakes, the files that travel with them, and the tar."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

from provision.errors import UsageError
from provision.run import config_files, tar_stream


@pytest.fixture
def project(tmp_path):
    """A config with everything beside it."""
    folder = tmp_path / "my project"
    write(folder / "model" / "config.json", "{}")
    write(folder / "model" / "weights.safetensors", "w" * 100)
    write(folder / "data" / "tiny.json", "[]")
    write(folder / "data" / "unused.json", "[]")
    info = {"tiny": {"file_name": "tiny.json"}, "unused": {"file_name": "unused.json"}}
    write(folder / "data" / "dataset_info.json", json.dumps(info))
    write(folder / "sft.yaml", CONFIG)
    return folder


CONFIG = """\
# A comment stays.
model_name_or_path: model
stage: sft
do_train: true
dataset: tiny
dataset_dir: data
output_dir: out/first
learning_rate: 1e-4   # not a float to PyYAML
"""


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def configure(project, *, drop=(), **values):
    """The config with other values."""
    kept = [line for line in CONFIG.splitlines() if line.split(":")[0] not in {*drop, *values}]
    return write(project / "sft.yaml", "\n".join([*kept, *(f"{key}: {value}" for key, value in values.items())]) + "\n")


def info(project, **datasets):
    write(project / "data" / "dataset_info.json", json.dumps(datasets))


def names(taken):
    return sorted(taken.digests)


def config_of(taken):
    return yaml.safe_load(taken.texts[f"job/{taken.config_name}"])


def refused(config, **options):
    with pytest.raises(UsageError) as caught:
        config_files(config, **options)
    return f"{caught.value} | {caught.value.hint}"


# --- what travels --------------------------------------------------------------------------------


def test_files_beside_the_config_keep_their_paths(project):
    taken = config_files(project / "sft.yaml")
    assert names(taken) == [
        "job/data/dataset_info.json",
        "job/data/tiny.json",
        "job/model/config.json",
        "job/model/weights.safetensors",
        "job/sft.yaml",
    ]
    assert taken.texts == {"job/sft.yaml": CONFIG.encode()}
    assert taken.progress == "job/out/first/trainer_log.jsonl"
    assert taken.digests["job/data/tiny.json"] == hashlib.sha256(b"[]").hexdigest()
    assert taken.size == len(CONFIG) + 2 + 100 + 2 + len((project / "data" / "dataset_info.json").read_bytes())
    assert taken.notices == ()


def test_the_config_may_be_named_from_elsewhere(project, monkeypatch):
    monkeypatch.chdir(project.parent)
    assert names(config_files(Path("my project/sft.yaml"))) == names(config_files(project / "sft.yaml"))


def test_absolute_paths_are_on_the_nodes(project):
    config = configure(
        project,
        model_name_or_path="/shared/Qwen2.5-7B",
        dataset_dir="/shared/data",
        deepspeed="/shared/ds.json",
        adapter_name_or_path="/shared/a, /shared/b",
        output_dir="/shared/out",
    )
    taken = config_files(config)
    assert names(taken) == ["job/sft.yaml"]
    assert taken.texts["job/sft.yaml"] == config.read_bytes()
    assert taken.progress == "/shared/out/trainer_log.jsonl"


def test_files_outside_are_mapped_to_a_safe_place(project):
    write(project.parent / "big" / "model" / "config.json", "{}")
    write(project.parent / "ds" / "z2.json", "{}")
    config = configure(project, model_name_or_path="../big/model  # said why", deepspeed="data/../../ds/z2.json")
    taken = config_files(config)
    assert "job/outside-0/model/config.json" in names(taken)
    assert "job/outside-1/z2.json" in names(taken)
    text = taken.texts["job/sft.yaml"].decode()
    assert "model_name_or_path: outside-0/model  # said why\n" in text
    assert "deepspeed: outside-1/z2.json\n" in text
    assert text.startswith("# A comment stays.\n")
    assert "learning_rate: 1e-4   # not a float" in text


def test_a_folder_that_has_the_safe_places_name(project):
    write(project / "outside-0" / "x", "")
    write(project.parent / "model" / "config.json", "{}")
    taken = config_files(configure(project, model_name_or_path="../model"))
    assert config_of(taken)["model_name_or_path"] == "outside-1/model"


def test_a_path_through_the_config_folder_and_out_and_in(project):
    taken = config_files(configure(project, model_name_or_path="data/../model"))
    assert config_of(taken)["model_name_or_path"] == "model"


def test_every_key_that_names_files(project):
    for name in ("a1", "a2", "reward", "media"):
        write(project / name / "f", name)
    write(project / "ds.json", "{}")
    write(project / "fsdp.json", "{}")
    config = configure(
        project,
        adapter_name_or_path="a1, a2",
        reward_model="reward",
        media_dir="media",
        deepspeed="./ds.json",
        fsdp_config="fsdp.json",
        tokenized_path="not/yet",
        resume_from_checkpoint="true",
    )
    taken = config_files(config)
    assert set(names(taken)) > {
        "job/a1/f",
        "job/a2/f",
        "job/reward/f",
        "job/media/f",
        "job/ds.json",
        "job/fsdp.json",
    }
    assert config_of(taken)["deepspeed"] == "./ds.json"


@pytest.mark.parametrize("value", ["{stage: 2}", "null", "${oc.env:DS}"])
def test_values_that_are_not_local_paths(project, value):
    assert len(names(config_files(configure(project, deepspeed=value)))) == 5


def test_existing_tokenized_dataset_is_sent(project):
    write(project / "tokens" / "state.json", "{}")
    assert "job/tokens/state.json" in names(config_files(configure(project, tokenized_path="tokens")))


def test_links_are_followed(project, tmp_path):
    blob = write(tmp_path / "blobs" / "abc", "weights")
    (project / "model" / "weights.safetensors").unlink()
    (project / "model" / "weights.safetensors").symlink_to(blob)
    assert (
        config_files(project / "sft.yaml").digests["job/model/weights.safetensors"]
        == hashlib.sha256(b"weights").hexdigest()
    )


def test_git_folder_and_caches_are_not_sent(project):
    write(project / "model" / ".git" / "HEAD", "")
    write(project / "model" / "__pycache__" / "x.pyc", "")
    assert len(names(config_files(project / "sft.yaml"))) == 5


@pytest.mark.parametrize(
    ("name", "there"), [("-sft run.yml", "sft-run.yaml"), ("配置.yaml", "train.yaml"), ("a.conf", "a.yaml")]
)
def test_the_configs_name_is_safe_on_the_nodes(project, name, there):
    taken = config_files((project / "sft.yaml").rename(project / name))
    assert taken.config_name == there
    assert f"job/{there}" in taken.texts


def test_missing_do_train_gives_a_notice(project):
    (notice,) = config_files(configure(project, drop=["do_train"])).notices
    assert "do_train" in notice


# --- datasets ------------------------------------------------------------------------------------


def test_a_dataset_may_be_a_folder(project):
    write(project / "data" / "many" / "1.json", "[]")
    write(project / "data" / "many" / "2.json", "[]")
    info(project, many={"file_name": "many"})
    assert "job/data/many/2.json" in names(config_files(configure(project, dataset="many")))


def test_several_datasets(project):
    taken = config_files(configure(project, dataset="[tiny]", eval_dataset="unused , tiny"))
    assert {"job/data/tiny.json", "job/data/unused.json"} <= set(names(taken))


def test_the_default_dataset_dir(project):
    assert "job/data/tiny.json" in names(config_files(configure(project, drop=["dataset_dir"])))


def test_the_default_dataset_dir_without_a_dataset(project):
    shutil.rmtree(project / "data")
    config_files(configure(project, drop=["dataset_dir", "dataset"]))


def test_a_dataset_file_outside(project):
    write(project.parent / "lake" / "big.json", "[]")
    info(project, big={"file_name": "../../lake/big.json", "columns": {"prompt": "p"}}, other={"file_name": "o"})
    taken = config_files(configure(project, dataset="big"))
    assert "job/outside-0/big.json" in names(taken)
    assert json.loads(taken.texts["job/data/dataset_info.json"]) == {
        "big": {"file_name": "../outside-0/big.json", "columns": {"prompt": "p"}},
        "other": {"file_name": "o"},
    }


def test_a_dataset_dir_outside(project):
    (project / "data").rename(project.parent / "data")
    taken = config_files(configure(project, dataset_dir="../data"))
    assert {"job/outside-0/data/tiny.json", "job/outside-0/data/dataset_info.json"} <= set(names(taken))
    assert config_of(taken)["dataset_dir"] == "outside-0/data"


def test_an_absolute_dataset_file_is_on_the_nodes(project):
    info(project, tiny={"file_name": "/shared/tiny.json"})
    assert len(names(config_files(project / "sft.yaml"))) == 4


def test_hub_is_not_used_if_there_is_a_file(project):
    info(project, tiny={"hf_hub_url": "x/y", "file_name": "tiny.json"})
    taken = config_files(project / "sft.yaml")
    assert json.loads(taken.texts["job/data/dataset_info.json"]) == {"tiny": {"file_name": "tiny.json"}}


def test_media_beside_the_data_are_sent(project):
    write(project / "data" / "images" / "1.jpg", "")
    info(project, tiny={"file_name": "tiny.json", "columns": {"images": "images"}})
    assert "job/data/images/1.jpg" in names(config_files(project / "sft.yaml"))


# --- mistakes ------------------------------------------------------------------------------------


def test_missing_config(tmp_path):
    assert "does not exist" in refused(tmp_path / "sft.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1\nb: 2", "sft.yaml:2: not YAML"),
        (b"\x00", "not YAML"),
        (b"a: 1\n---\nb: 2", "not YAML"),
        (b"\xff", "not UTF-8"),
        (b"- a\n- b", "not a LLaMA-Factory config"),
        (b"", "not a LLaMA-Factory config"),
        (b"a: 1", "neither stage nor model_name_or_path"),
        (b"stage: sft", "model_name_or_path is missing"),
        (
            b"# x\nmodel_name_or_path: /m\nstage: stf",
            "sft.yaml:3: stage: unknown stage 'stf'; it must be one of pt, sft",
        ),
        (b"stage: sft\nmodel_name_or_path: /m\nstage: pt", "sft.yaml:3: stage: duplicate key, first given in line 1"),
        (b"model_name_or_path: 7", "sft.yaml:1: model_name_or_path: 7 is not a path"),
        (b"model_name_or_path: ~/m", "sft.yaml:1: model_name_or_path: LLaMA-Factory does not expand ~/m"),
        (b"model_name_or_path: /m\noutput_dir: ../out", "sft.yaml:2: output_dir: ../out is outside"),
        (b"model_name_or_path: /m\ndataset: x\ndataset_dir: ONLINE", "sft.yaml:3: dataset_dir: ONLINE would download"),
        (b"model_name_or_path: /m\ndataset: {a: 1}", "sft.yaml:2: dataset: {'a': 1} is not the name"),
    ],
)
def test_invalid_configs(tmp_path, content, message):
    config = tmp_path / "sft.yaml"
    config.write_bytes(content)
    assert message in refused(config)


def test_a_hub_id(project):
    message = refused(configure(project, model_name_or_path="Qwen/Qwen2.5-7B"))
    assert "sft.yaml:8: model_name_or_path: Qwen/Qwen2.5-7B" in message
    assert "no internet" in message


def test_a_missing_file(project):
    assert "sft.yaml:9: deepspeed: ds/z3.json does not exist in" in refused(configure(project, deepspeed="ds/z3.json"))


def test_a_file_that_is_relative_to_something_else(project, tmp_path, monkeypatch):
    write(tmp_path / "ds" / "z3.json", "{}")
    monkeypatch.chdir(tmp_path)
    assert f"but it exists in {tmp_path}" in refused(configure(project, deepspeed="ds/z3.json"))


def test_an_unknown_dataset(project):
    message = refused(configure(project, dataset="tiny,tyni"))
    assert "sft.yaml:8: dataset: tyni is not in" in message
    assert "it has tiny, unused" in message


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"hf_hub_url": "org/set"}, "comes from a hub (org/set)"),
        ({"columns": {}}, "has no file_name"),
        ({"cloud_file_name": "s3://x"}, "has no file_name"),
        ({"file_name": "gone.json"}, "does not exist"),
        (["x"], "is not a JSON object"),
    ],
)
def test_datasets_that_cannot_be_sent(project, entry, message):
    info(project, tiny=entry)
    assert message in refused(project / "sft.yaml")


@pytest.mark.parametrize(("text", "message"), [("{\n,", "dataset_info.json:2: not JSON"), ("[]", "not a JSON object")])
def test_a_broken_dataset_info(project, text, message):
    write(project / "data" / "dataset_info.json", text)
    assert message in refused(project / "sft.yaml")


def test_no_dataset_info(project):
    (project / "data" / "dataset_info.json").unlink()
    assert "data/dataset_info.json does not exist" in refused(project / "sft.yaml")


def test_too_many_bytes_are_refused(project):
    message = refused(project / "sft.yaml", limit=100)
    assert "sft.yaml:2: model_name_or_path: 102 bytes of the" in message
    assert "the limit is 100 bytes" in message
    assert "absolute path" in message


def test_a_link_in_a_circle(project):
    (project / "model" / "loop").symlink_to("..", target_is_directory=True)
    assert "is a link to a folder above it" in refused(project / "sft.yaml")


def test_a_link_to_nothing(project):
    (project / "model" / "gone").symlink_to("nowhere")
    assert "model/gone cannot be read: No such file" in refused(project / "sft.yaml")


def test_socket_cannot_be_sent(project):
    os.mkfifo(project / "model" / "pipe")
    assert "neither a file nor a folder" in refused(project / "sft.yaml")


# --- the text ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "model_name_or_path: '../the model'",
        'model_name_or_path: "../the model"   # why',
        "model_name_or_path: ../the model",
        "model_name_or_path: >-\n  ../the\n  model",
        "x_: &m ../the model\nmodel_name_or_path: *m",
        "? model_name_or_path\n: ../the model",
    ],
)
def test_value_is_replaced_in_every_spelling(project, line):
    write(project.parent / "the model" / "config.json", "{}")
    write(project / "sft.yaml", f"stage: sft\n{line}\nlearning_rate: 1.0e-4\n")
    data = config_of(config_files(project / "sft.yaml"))
    assert data["model_name_or_path"] == "outside-0/the model"
    assert data["learning_rate"] == 1e-4
    assert data.get("x_", "../the model") == "../the model"


def test_a_config_in_braces(project):
    write(project.parent / "m" / "config.json", "{}")
    write(project / "sft.yaml", '{"stage": "sft", "model_name_or_path": "../m", "seed": 3}')
    assert config_of(config_files(project / "sft.yaml")) == {
        "stage": "sft",
        "model_name_or_path": "outside-0/m",
        "seed": 3,
    }


# --- the tar -------------------------------------------------------------------------------------


def unpacked(data, folder):
    folder.mkdir()
    subprocess.run(["tar", "-x", "-f", "-", "-C", folder], input=data, check=True)
    return {os.fsencode(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_tar_contains_the_collected_files(project, tmp_path):
    odd = os.fsdecode(b"new\nline \xff " + "ü".encode() + b"x" * 120)
    write(project / "model" / odd, "odd")
    write(project / "model" / "empty", "")
    write(project / "model" / "tool.sh", "#!/bin/sh\n").chmod(0o700)
    taken = config_files(project / "sft.yaml")
    data = b"".join(tar_stream(taken, {"plan-0.json": b"{}"}))
    found = unpacked(data, tmp_path / "there")
    assert {os.fsdecode(name): hashlib.sha256(content).hexdigest() for name, content in found.items()} == {
        **taken.digests,
        "plan-0.json": hashlib.sha256(b"{}").hexdigest(),
    }
    assert os.fsencode(f"job/model/{odd}") in found
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as tar:
        members = tar.getmembers()
    assert {(each.uid, each.gid, each.uname, each.gname) for each in members} == {(0, 0, "", "")}
    assert {each.mode for each in members if each.name.endswith("tool.sh")} == {0o700}
    assert {each.mode for each in members if not each.name.endswith("tool.sh")} == {0o600}


def test_the_tar_is_the_same_every_time(project):
    first, second = (b"".join(tar_stream(config_files(project / "sft.yaml"), {"b": b"1", "a": b"2"})) for _ in range(2))
    assert first == second
    assert len(first) % 512 == 0


@pytest.mark.parametrize("now", ["w" * 99, "w" * 101, "x" * 100, None])
def test_file_changed_while_it_is_sent(project, now):
    taken = config_files(project / "sft.yaml")
    weights = project / "model" / "weights.safetensors"
    if now is None:
        weights.unlink()
    else:
        weights.write_text(now)
    with pytest.raises(UsageError, match=r"weights\.safetensors"):
        list(tar_stream(taken))


def test_a_repeated_name_in_a_tar_is_a_bug(project):
    taken = config_files(project / "sft.yaml")
    with pytest.raises(ValueError, match="twice"):
        list(tar_stream(taken, {"job/model/config.json": b""}))
