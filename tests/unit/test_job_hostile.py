"""Configurations and names that other people wrote: a run, or an error that names file, line and key."""

from __future__ import annotations

import ast
import json
import os
import re
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from provision.errors import UsageError
from provision.inventory import load as load_inventory
from provision.launchers import accelerate, from_words
from provision.run import Job, code, config_text, new_run_id
from provision.run import config as llamafactory
from provision.run.code import pack
from provision.run.config import config_files
from provision.tasks.train import Training, find_config, run_id, takes_any_key

GOOD = "stage: sft\nmodel_name_or_path: /m\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def refused(path, content, *overrides):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError) as caught:
        config_files(path, overrides=overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{path.parent}/", "")


@pytest.fixture
def config(tmp_path):
    return tmp_path / "sft.yaml"


# --- what YAML can hold --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + BOMB, "sft.yaml:7: e: more than 20,000 values"),
        (GOOD + "x: &x [*x]", "sft.yaml:3: x: an alias refers to the value that contains it"),
        (GOOD + "x: " + "[" * 60 + "]" * 60, "sft.yaml:3: x: nested more than 32 levels deep"),
        (GOOD + "x: " + "[" * 1500, "sft.yaml: lists or mappings are nested too deeply"),
        (GOOD + "x: *gone", "sft.yaml:3: not YAML: found undefined alias"),
        (GOOD + "seed: 1\nseed: 2", "sft.yaml:4: seed: duplicate key, first given in line 3"),
        (GOOD + "rope_scaling: {a: 1, a: 2}", "sft.yaml:3: a: duplicate key, first given in line 3"),
        (GOOD + "\tseed: 1", "sft.yaml:3: not YAML: found character '\\t'"),
        (GOOD + "7: x", "sft.yaml:3: 7: a key must be text"),
        (GOOD + "? [a]\n: x", "sft.yaml:3: a key must be text, not a list or a mapping"),
        (GOOD + "seed: !!python/object/apply:os.system [touch owned]", "sft.yaml:3: seed: the tag !!python/object"),
        (GOOD + "seed: !!timestamp foo", "sft.yaml:3: seed: foo cannot be read as timestamp"),
        (GOOD + "seed: !!int ''", "sft.yaml:3: seed:  cannot be read as int"),
        (GOOD + "seed: !!bool foo", "sft.yaml:3: seed: foo cannot be read as bool"),
        (GOOD + "seed: 2024-13-45", "sft.yaml:3: seed: 2024-13-45 cannot be read as timestamp"),
        (GOOD + "seed: " + "9" * 5000, "sft.yaml:3: seed: 9999"),
        (GOOD + 'run_name: "\\ud800"', "sft.yaml:3: run_name: half of a surrogate pair"),
        (GOOD + 'run_name: "\\UFFFFFFFF"', "sft.yaml: not YAML"),
        (GOOD + "run_name: a\x07b", "sft.yaml:3: not YAML: \\x07 is a control character"),
        (GOOD + "run_name: a\0b", "sft.yaml:3: not YAML: \\x00 is a control character"),
        (GOOD.encode() + b"x: \xff", "sft.yaml:3 is not UTF-8: byte"),
        (GOOD.encode("utf-16"), "sft.yaml is UTF-16, not UTF-8"),
        (b"#" * 300_000, "sft.yaml is larger than 256 KiB"),
    ],
)
def test_yaml_that_is_not_a_configuration(config, content, message):
    assert message in refused(config, content)


def test_large_file_is_not_read_completely(config):
    with config.open("wb") as file:
        file.truncate(100 << 30)  # sparse
    with pytest.raises(UsageError, match="larger than 256 KiB"):
        config_files(config)


def test_a_pipe_is_not_waited_for(config):
    os.mkfifo(config)
    with pytest.raises(UsageError, match="is not a file"):
        config_files(config)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_ends_and_a_byte_order_mark_of_windows_are_read(config, end, mark):
    text = GOOD + 'do_train: true\noutput_dir: out  # ours\nrun_name: $(touch owned) "it\'s"\n'
    config.write_bytes(mark + text.replace("\n", end).encode())
    taken = config_files(config, overrides=("max_steps=3",))
    assert yaml.safe_load(taken.texts["job/sft.yaml"])["run_name"] == '$(touch owned) "it\'s"'
    assert (taken.settings["max_steps"], taken.output) == (3, "job/out")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("output_dir: ../out", "sft.yaml:3: output_dir: ../out is outside"),
        ("output_dir: a/../../out", "is outside"),
        ("output_dir: ~/out", "does not expand ~/out"),
        ("output_dir: [a]", "sft.yaml:3: output_dir: ['a'] is not a path"),
        ("output_dir: true", "sft.yaml:3: output_dir: True is not a path"),
        ("output_dir: ${oc.env:HOME}/out", "only the nodes can expand"),
        ('output_dir: "a\\nb"', "output_dir: a\\nb contains a line break"),
        ('output_dir: "/a\\x1b[2J"', "contains a line break or a control character"),
        ("output_dir: " + "x" * 300, "is too long for a path"),
        ("deepspeed: " + "x/" * 3000, "is too long for a path"),
        ('deepspeed: "a\\0b"', "contains a line break or a control character"),
        ("dataset: x\ndataset_dir: [1]", "dataset_dir"),
        ("stage: [" + "x, " * 500 + "]", "duplicate key"),
    ],
)
def test_values_that_cannot_be_paths(config, line, message):
    if "dataset_dir" in line:
        config.write_text(GOOD + line)
        config_files(config)  # not a path of this machine's
        return
    assert message in refused(config, GOOD + line)


def test_a_long_value_is_cut_in_a_message(config):
    text = refused(config, "model_name_or_path: [" + "x, " * 500 + "]\n")
    assert len(text) < 200
    assert "sft.yaml:1: model_name_or_path: ['x'" in text


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ("[" * 5000 + "]" * 5000, "dataset_info.json is nested more than 32 levels deep"),
        ("{\n,", "dataset_info.json:2: not JSON"),
        ('{"d": {"file_name": "a\\u0000b"}}', "contains a line break or a control character"),
        ('{"d": {"file_name": "' + "x" * 300 + '"}}', "is too long for a path"),
        ('{"d": {"file_name": "' + "9" * 50 + '", "n": ' + "9" * 50 + "}}", "has a number of 50 digits"),
        ('{"\\u001b[2J": 1}', "it has \\x1b[2J"),
    ],
)
def test_a_hostile_dataset_info(config, info, message):
    (config.parent / "data").mkdir()
    (config.parent / "data/dataset_info.json").write_text(info)
    assert message in refused(config, GOOD + "dataset: d\n")


@pytest.mark.parametrize("name", ["null", ".5", "off", "a: b", "it's", "$(id)", "#x"])
def test_a_path_that_yaml_would_read_as_something_else_is_quoted(config, name):
    model = config.parent / "job" / name
    model.mkdir(parents=True)
    inner = config.parent / "job/conf/sft.yaml"
    inner.parent.mkdir()
    inner.write_text(f"stage: sft\nmodel_name_or_path: {json.dumps('../' + name)}\n")
    (model / "config.json").touch()
    taken = config_files(inner)
    named = yaml.safe_load(taken.texts["job/sft.yaml"])["model_name_or_path"]
    assert f"job/{named}/config.json" in taken.digests
    document = config_text.read(inner)
    assert yaml.safe_load(document.rewritten({"model_name_or_path": name}))["model_name_or_path"] == name


# --- overrides -----------------------------------------------------------------------------------


def test_a_line_in_a_message_is_one_of_the_users_file(config):
    text = "stage: sft\nlora_target:\n  - q_proj\n  - v_proj\nmodel_name_or_path: ./gone/model\n"
    message = refused(config, text, "lora_target=[a]", "max_steps=3")  # the sent file has two lines less before it
    assert message.startswith("sft.yaml:5: model_name_or_path: ./gone/model does not exist")
    message = refused(config, GOOD, "deepspeed=gone.json")
    assert message.startswith("deepspeed= (typed after --): gone.json does not exist")


@pytest.mark.parametrize(
    "override",
    ["x=*gone", "x=&a 1", "x=- a", "x='a", "x=a: b", "x=\ta", "x=%TAG", "x=a\u2028b", "x=\udcff", "x=!!bool q"],
)
def test_an_override_that_would_change_something_else_is_refused_as_it_was_typed(config, override):
    try:
        config.write_text(GOOD)
        taken = config_files(config, overrides=(override,))
    except UsageError as error:
        message = str(error)
    else:
        message = override.partition("=")[0] + "="
        assert list(taken.settings) == ["stage", "model_name_or_path", "x"]
    assert message.startswith("x=")


def test_an_override_of_an_anchor_that_others_use_is_refused(config):
    text = GOOD + "seed: &s 1\ndata_seed: *s\n"
    assert "seed=2: this value can only be set in the config" in refused(config, text, "seed=2")
    assert "max_steps=3: this value can only be set in the config" in refused(config, GOOD + "...\n", "max_steps=3")


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("max_stesp", "max_steps"),
        ("learning-rate", "learning_rate"),
        ("Output_Dir", "output_dir"),
        ("per_device_train_batchsize", "per_device_train_batch_size"),
        ("cutof_len", "cutoff_len"),
    ],
)
def test_a_misspelled_key_is_refused_with_a_suggestion(config, key, meant):
    message = refused(config, GOOD + f"{key}: 3\n")
    assert message.startswith(f"sft.yaml:3: {key}: LLaMA-Factory 0.9.5 has no such key; did you mean {meant}?")
    if key.isidentifier():
        config.write_text(GOOD)
        with pytest.raises(UsageError, match=f"did you mean {meant}") as caught:
            config_files(config, overrides=(f"{key}=3",))
        assert f"write {meant}" in caught.value.hint


def test_unknown_key_without_a_similar_one_is_a_notice(config):
    config.write_text(GOOD + "do_train: true\nmy_own_option: 3\n")
    (notice,) = config_files(config).notices
    assert notice.endswith("sft.yaml:4: my_own_option: LLaMA-Factory 0.9.5 has no such key and may refuse it")
    config.write_text(GOOD + "do_train: true\nmy_own_option: 3\nanother_one: 4\n")
    (notice,) = config_files(config).notices
    assert notice.endswith("sft.yaml:5: another_one: LLaMA-Factory 0.9.5 has no such keys and may refuse them")


def test_force_and_the_switch_of_llamafactory_allow_any_key(config, tmp_path):
    config.write_text(GOOD + "do_train: true\nmax_stesp: 3\n")
    (notice,) = config_files(config, any_key=True).notices
    assert "max_stesp" in notice
    (tmp_path / "inventory.yaml").write_text("prefix: /x/current\nnodes: {a: 10.0.0.1}\n")
    inventory = load_inventory(tmp_path / "inventory.yaml")
    assert not takes_any_key(inventory, Training(Job()))
    assert takes_any_key(inventory, Training(Job(env={"ALLOW_EXTRA_ARGS": "1"})))


def test_the_keys_are_those_of_the_installed_release(lab_env):
    """Read from the sources of LLaMA-Factory and transformers: importing them takes ten seconds."""
    (packages,) = lab_env.glob("lib/python3*/site-packages")
    (origin,) = (json.loads(path.read_text())["url"] for path in packages.glob("llamafactory-*/direct_url.json"))
    folder = Path(origin.removeprefix("file://")) / "src/llamafactory"
    assert f'VERSION = "{llamafactory.VERSION}' in (folder / "extras/env.py").read_text()
    files = [path for path in (folder / "hparams").glob("*_args.py") if path.name != "evaluation_args.py"]
    files += (packages / "transformers").glob("training_args*.py")
    found = set()
    for path in files:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in node.decorator_list):
                found |= {each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and _given(each)}
    assert found == llamafactory.KEYS


def _given(field):
    inner = "" if field.value is None else ast.unparse(field.value)
    return "ClassVar" not in ast.unparse(field.annotation) and "init=False" not in inner


# --- names ---------------------------------------------------------------------------------------

NASTY = [
    "a/b",
    "..",
    ".",
    "-x",
    "",
    "a\nb",
    "a\x1b[2J",
    "名前",
    "x" * 300,
    "$(touch owned)",
    "`id`",
    "a;b",
    "a b",
    "\udcff",
]


@pytest.mark.parametrize("name", NASTY)
def test_a_hostile_name_is_refused_with_one_that_works(name):
    with pytest.raises(UsageError, match="--name") as caught:
        run_id(Training(Job(target="t.py"), name=name))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200
    (better,) = re.fullmatch(r"--name ([A-Za-z0-9._-]+)", caught.value.hint).groups()
    run_id(Training(Job(target="t.py"), name=better))


@given(st.text(max_size=400))
@example("../../etc/passwd")
@example("x.yaml\n")
def test_every_run_id_is_safe_in_paths_and_shells(name):
    from datetime import datetime, timezone

    run = new_run_id(datetime(2026, 11, 21, tzinfo=timezone.utc), name)
    assert re.fullmatch(r"20261121-000000-[a-z0-9-]{1,24}-[0-9a-f]{4}", run)


def test_a_missing_configuration_is_reported_with_the_next_command(tmp_path, monkeypatch):
    from provision.inventory import local_inventory

    monkeypatch.chdir(tmp_path)
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/python").touch()
    with pytest.raises(UsageError) as caught:
        find_config(local_inventory(tmp_path / "env"))
    assert "inventory" not in str(caught.value)
    for way in ("CONFIG.yaml", "SCRIPT.py", "-m MODULE", "-- torchrun"):
        assert way in caught.value.hint


# --- whatever a file holds -----------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        ["/m", "data", "..", "~", "${x}", "a,b", "x\0y", "ONLINE", "sft", "x" * 300, "http://h", "[a", "*a"]
    ),
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))
KEYS = st.sampled_from(sorted(llamafactory.KEYS)) | st.text(max_size=12) | st.integers()
FREQUENT = st.sampled_from(
    ["model_name_or_path", "stage", "dataset", "dataset_dir", "output_dir", "deepspeed", "adapter_name_or_path"]
)
FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(
    st.dictionaries(FREQUENT | KEYS, VALUES, max_size=6),
    st.lists(st.tuples(FREQUENT, st.text(max_size=12)).map("=".join) | st.text(max_size=12), max_size=2),
)
def test_any_configuration_is_a_job_or_a_usage_error(config, data, overrides):
    try:
        config.write_text(yaml.safe_dump({"model_name_or_path": "/m", "stage": "sft", **data}), encoding="utf-8")
    except UnicodeEncodeError:
        return
    check(config, overrides)


@FUZZ
@given(st.binary(max_size=60) | st.text("[]{}&*!|>'\"%@`:,?- \n\tab1~\\x<=#", max_size=60).map(str.encode))
@example(b"!!binary x")
@example(b"=")
@example(b"<<: 1")
@example(b"<<: *a")
@example(b"? {a: b}\n: c")
@example(b"!!map [a]")
@example(b"!!seq {a: 1}")
@example(b"!!str {a: 1}")
def test_any_bytes_are_a_job_or_a_usage_error(config, data):
    config.write_bytes(b"stage: sft\nmodel_name_or_path: /m\n" + data)
    check(config, [])
    config.write_bytes(data)
    check(config, [])


def check(config, overrides):
    try:
        taken = pack(from_words([str(config), *overrides]))
    except UsageError:
        return
    assert yaml.safe_load(taken.texts[f"job/{taken.config_name}"])["stage"] == taken.settings.get("stage")


@FUZZ
@given(st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()), st.sampled_from(["json", "yaml"]))
def test_any_configuration_of_the_own_trainer_and_of_accelerate_is_a_job_or_a_usage_error(tmp_path, data, kind):
    path = tmp_path / f"c.{kind}"
    path.write_bytes(data)
    for read in (
        lambda: code.read_options(["--config", str(path)]),
        lambda: accelerate.read_settings(path),
    ):
        with suppress(UsageError):
            read()
