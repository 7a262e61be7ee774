"""What travels with clusterctl's own trainer."""

import ast
from pathlib import Path

import pytest

from provision.errors import UsageError
from provision.launchers import from_words
from provision.run import code

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with data, a configuration, and files that must not be sent."""
    for name in ("data/one/train.bin", "data/two/train.bin", "gpt2/model.safetensors", "bundles/env.tar"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pack(*args, module="trainer.lm", **options):
    return code.pack(from_words(args, module=module, **options))


def data(travel):
    return {entry.arcname.removeprefix("job/") for entry in travel.entries}


def test_source_and_files_in_its_arguments_are_sent(here):
    travel = pack("--data", "data/one:0.3", "data/two", "--init=gpt2", "--max-iters", "10")
    assert data(travel) == {"data/one/train.bin", "data/two/train.bin", "gpt2/model.safetensors"}
    program = {name for name in travel.texts if name.startswith("job/trainer/")}
    assert {"job/trainer/__init__.py", "job/trainer/lm/__main__.py", "job/trainer/ds_config/__init__.py"} <= program
    assert not any("agent" in name for name in program)
    assert (travel.output, travel.progress) == ("job/out", "job/out/trainer_log.jsonl")


def test_the_vision_trainer_is_sent_with_the_folders_of_its_options(here):
    for name in ("siglip/config.json", "pictures/1.png"):
        (here / name).parent.mkdir()
        (here / name).write_bytes(b"x")
    words = ("--data", "data/one", "--vision", "siglip", "--init", "gpt2", "--image-folder", "pictures")
    travel = pack(*words, module="trainer.vlm")
    assert data(travel) == {"data/one/train.bin", "siglip/config.json", "gpt2/model.safetensors", "pictures/1.png"}
    assert {"job/trainer/vlm/__main__.py", "job/trainer/lm/engine.py"} <= set(travel.texts)
    with pytest.raises(UsageError, match="--vision clip: there is no such file or folder"):
        pack("--data", "data/one", "--vision", "clip", module="trainer.vlm")


def test_all_imports_of_the_source_are_sent(here):
    texts = {name: data for name, data in pack("--data", "data/one").texts.items() if name.startswith("job/trainer/")}
    nodes = (node for data in texts.values() for node in ast.walk(ast.parse(data)) if isinstance(node, ast.ImportFrom))
    ours = [node for node in nodes if node.module and node.module.partition(".")[0] == "trainer"]
    imported = {f"{node.module}.{each.name}" for node in ours for each in node.names}
    wanted = {name for name in imported if (ROOT / name.replace(".", "/")).is_dir()} | {node.module for node in ours}
    assert {"trainer.ds_config", "trainer.lm.errors"} <= wanted
    files = {f"job/{name.replace('.', '/')}" for name in wanted}
    assert {name for name in files if not {f"{name}.py", f"{name}/__init__.py"} & set(texts)} == set()


@pytest.mark.parametrize("args", [("--out", "run/one"), ("--out=run/one",)])
def test_checkpoints_are_in_the_folder_of_the_out_option(here, args):
    assert pack("--data", "data/one", *args).output == "job/run/one"


def test_a_configuration_is_read(here):
    Path("gpt.yaml").write_text("data: [data/two]\nout: elsewhere\nmax_iters: 3\n")
    travel = pack("--config", "gpt.yaml")
    assert data(travel) == {"data/two/train.bin", "gpt.yaml"}
    assert travel.output == "job/elsewhere"


@pytest.mark.parametrize(("text", "message"), [("a: [", "gpt.yaml:1: not YAML"), (None, "gpt.yaml does not exist")])
def test_a_configuration_that_cannot_be_read_is_refused(here, text, message):
    if text is not None:
        Path("gpt.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        pack("--config", "gpt.yaml")


def test_files_on_the_nodes_are_not_sent(here):
    travel = pack("--data", "/data/shards")
    assert data(travel) == set()


@pytest.mark.parametrize(
    "args",
    [
        ("--data", "data/one", "data/thre"),
        ("--data=gone:0.5",),
        ("--data", "../x"),
        ("--data", "data/one", "--init", "gpt3"),
        ("--data", "data/one", "--deepspeed-config=missing.json"),
        ("--config", "gpt.yaml"),
    ],
)
def test_missing_file_of_an_option_is_refused_before_the_start(here, args):
    Path("gpt.yaml").write_text("data: [data/one, data/gone]\n")
    with pytest.raises(UsageError, match=r"there is no such file or folder") as caught:
        pack(*args)
    assert "absolute" in caught.value.hint


def test_local_package_of_the_same_name_is_used_first(here):
    (here / "trainer").mkdir()
    (here / "trainer/lm.py").write_text("")
    travel = pack("--data", "data/one")
    assert "trainer/lm.py" in data(travel)
    assert "job/trainer/lm/__main__.py" not in travel.texts


def test_other_modules_come_from_the_environment(here):
    assert pack(module="transformers.cli").config_name == "transformers.cli"
    assert data(pack(module="transformers.cli")) == set()
