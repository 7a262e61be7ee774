"""``clusterctl plan CONFIG.yaml``: the lengths of samples, what is slow, and the faster configuration."""

import json
import random

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from provision.errors import UsageError
from provision.run.config_text import commented, read
from provision.tasks.data_lengths import measure, read_records
from trainer.ds_config import find
from trainer.plan import MODELS, Cluster, PlanError
from trainer.plan.factory import Job, Settings, estimate, rows_of, settings_of
from trainer.plan.faster import NEAR, ROOM, alternatives, faster
from trainer.plan.findings import keys
from trainer.plan.lengths import Lengths, packed, padded

QWEN = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008,
    "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}  # fmt: skip
CONFIG = """\
### model
model_name_or_path: model
stage: sft
do_train: true
finetuning_type: full
dataset: d   # mine
template: qwen
cutoff_len: 2048
output_dir: out
per_device_train_batch_size: 1   # small
gradient_accumulation_steps: 8
learning_rate: 1.0e-5
bf16: true
"""
ONE = ["--gpus", "1", "--gpu", "H200"]


def short(count=3000):
    """Lengths of short instructions, as in the measurement that the estimates are compared with."""
    drawn = random.Random(0)
    tokens = (
        int(2.0 * (min(400, drawn.lognormvariate(3.5, 0.8)) + min(1200, drawn.lognormvariate(4.6, 0.9)))) + 20
        for _ in range(count)
    )
    return Lengths(tuple(min(2047, each) for each in tokens), count, exact=True)


def job(model="qwen2.5-3b", lengths=None, gpus=1, **more):
    card = find("H200")
    return Job(MODELS[model], lengths or short(), Cluster(1, gpus, card, card.memory), **more)


BASE = Settings(method="full", batch=1, accumulation=8, precision="bf16")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a configuration, a model's shape and data."""
    drawn = random.Random(0)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(QWEN))
    (tmp_path / "data").mkdir()
    rows = [{"instruction": "do it", "input": "", "output": "word " * drawn.randint(20, 600)} for _ in range(300)]
    (tmp_path / "data/d.json").write_text(json.dumps(rows))
    (tmp_path / "data/dataset_info.json").write_text(json.dumps({"d": {"file_name": "d.json"}}))
    (tmp_path / "sft.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- lengths -------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=300), st.integers(1, 16))
def test_rows_hold_every_token(tokens, batch):
    lengths = Lengths(tuple(tokens), len(tokens), exact=True)
    rows = padded(lengths, batch)
    assert 0 <= rows.padding < 1
    assert rows.widest >= lengths.longest
    one = packed(lengths, 4096)
    assert one.width == 4096
    assert one.useful <= 4095
    assert one.useful / one.samples == pytest.approx(lengths.mean)


def test_a_larger_batch_has_more_padding_and_groups_have_less():
    lengths = short()
    alone, many, grouped = padded(lengths, 1), padded(lengths, 8), padded(lengths, 8, grouped=True)
    assert alone.padding < 0.05 < grouped.padding + 0.05 < many.padding
    assert many.padding > 0.5


def test_packing_is_llama_factorys_own():
    assert packed(Lengths((5, 3, 2, 7), 4, exact=True), 11).samples == 2  # 7 + 3 and 5 + 2, of 10 tokens


RECORDS = {
    "alpaca": ({}, {"instruction": "a" * 40, "input": "", "output": "b" * 40}, 2, 80),
    "history": (
        {"columns": {"prompt": "q", "response": "a", "history": "h"}},
        {"q": "a" * 40, "a": "b" * 40, "h": [["c" * 40, "d" * 40]]}, 4, 160,
    ),
    "sharegpt": (
        {"formatting": "sharegpt"},
        {"conversations": [{"from": "human", "value": "a" * 40}, {"from": "gpt", "value": "b" * 80}]}, 2, 120,
    ),
    "openai": (
        {"formatting": "openai", "columns": {"messages": "messages"}},
        {"messages": [{"role": "user", "content": "a" * 40}, {"role": "assistant", "content": "b" * 80}]}, 2, 120,
    ),
    "broken": ({"formatting": "sharegpt"}, {"conversations": "no list"}, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_each_format_is_counted(project, name):
    entry, record, messages, size = RECORDS[name]
    (project / "data/d.json").write_text(json.dumps([record] * 3))
    (project / "data/dataset_info.json").write_text(json.dumps({"d": {"file_name": "d.json", **entry}}))
    lengths, media = measure(read(project / "sft.yaml"), None)
    assert not lengths.exact
    system = 17 + 5 if messages else 0  # qwen's, of 70 bytes
    assert set(lengths.tokens) == {max(1, messages * 5 + size // 4 + system)}
    assert (lengths.total, media) == (3, False)


def test_only_a_bounded_part_is_read_and_the_rest_is_scaled(project, monkeypatch):
    file = project / "data/d.jsonl"
    file.write_text('{"instruction": "x", "output": "y"}\n' * 1000)
    records, used = read_records(file, 3600)
    assert len(records) == 100
    assert used == 3600
    (project / "data/dataset_info.json").write_text(json.dumps({"d": {"file_name": "d.jsonl"}}))
    monkeypatch.setattr("provision.tasks.data_lengths.PART", 3600)
    lengths, _ = measure(read(project / "sft.yaml"), None, samples=10)
    assert len(lengths.tokens) == 10
    assert lengths.total == 1000


def test_media_are_noticed(project):
    info = {"d": {"file_name": "d.json", "columns": {"prompt": "instruction", "images": "images"}}}
    (project / "data/dataset_info.json").write_text(json.dumps(info))
    assert measure(read(project / "sft.yaml"), None)[1] is True


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("data/dataset_info.json", None, "is not on this machine"),
        ("data/dataset_info.json", "{}", "d has no file_name"),
        ("data/dataset_info.json", '{"d": {"hf_hub_url": "a/b"}}', "d has no file_name"),
        ("data/dataset_info.json", '{"d": {"file_name": "d.parquet"}}', "plan reads .json, .jsonl and .txt"),
        ("data/d.json", "[]", "has no records"),
        ("data/d.json", None, "No such file"),
        ("model/config.json", None, "--model-config FILE"),
        ("sft.yaml", CONFIG.replace("stage: sft", "stage: dpo"), "stages sft and pt"),
        ("sft.yaml", CONFIG.replace("cutoff_len", "cutof_len"), "did you mean cutoff_len"),
        ("sft.yaml", CONFIG.replace("_size: 1", "_size: -1"), "is not a whole number from 1"),
    ],
)
def test_what_cannot_be_read_is_said(run, project, file, content, says):
    if content is None:
        (project / file).unlink()
    else:
        (project / "data/d.parquet").write_text("x")
        (project / file).write_text(content)
    code, _, err = run("plan", "sft.yaml", *ONE)
    assert code == 2
    assert says in err
    assert not (project / "sft.faster.yaml").exists()


# --- estimates and findings ----------------------------------------------------------------------------


def test_estimates_keep_the_order_of_the_measured_points():
    """LLaMA-Factory 0.9.5 on one H200, full training of a 3.09 B Qwen2.5 shape: useful tokens/s."""
    fast = {"packing": True, "neat": True, "liger": True, "accumulation": 1, "cutoff": 8192}
    points = [
        (1729, BASE),
        (5333, BASE.with_(batch=8, accumulation=2)),
        (10014, BASE.with_(**fast, batch=4)),
        (11756, BASE.with_(**fast, batch=2, checkpointing=False)),
    ]
    found = [estimate(job(), settings).tokens for _, settings in points]
    assert found == sorted(found)
    for (real, _), each in zip(points, found, strict=True):
        assert 1 < each / real < 1.6


def test_what_ran_out_of_memory_does_not_fit():
    """140 GB: 16 samples, and 4 packed sequences of 8,192 tokens, both without checkpointing."""
    large = BASE.with_(batch=16, accumulation=1, liger=True, checkpointing=False)
    packed_ones = large.with_(batch=4, cutoff=8192, packing=True, neat=True)
    for settings in (large, packed_ones):
        assert estimate(job(), settings).memory > 140
    assert estimate(job(), packed_ones.with_(batch=2)).memory < 140


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize(
    "base",
    [
        BASE,
        BASE.with_(accumulation=16),
        BASE.with_(batch=4, accumulation=4, attention="disabled"),
        BASE.with_(batch=2, zero=3),
        BASE.with_(method="lora", batch=2, cutoff=1024),
        BASE.with_(packing=True, cutoff=1024),
        BASE.with_(accumulation=1),
    ],
)
def test_faster_settings_keep_the_samples_per_step_and_fit(base, gpus):
    one = job(gpus=gpus)
    found = faster(one, base)
    assert found.then.tokens >= found.now.tokens
    assert found.then.samples == pytest.approx(found.now.samples, rel=1.001 * NEAR)
    assert found.best == base or found.then.memory <= ROOM * one.cluster.usable
    for settings in alternatives(one, base, liger=True, fa2=False):
        assert estimate(one, settings).samples == pytest.approx(found.now.samples, rel=1.001 * NEAR)


def test_no_sample_is_cut_that_was_not_cut_before():
    longest = Lengths((*short().tokens, 1900), 3001, exact=True)
    for settings in alternatives(job(lengths=longest), BASE.with_(accumulation=16), liger=True, fa2=False):
        assert settings.cutoff > 1900, settings
    unknown = Lengths(short().tokens, 3000, exact=False)
    for settings in alternatives(job(lengths=unknown), BASE.with_(accumulation=16), liger=True, fa2=False):
        assert settings.cutoff >= BASE.cutoff


def test_rare_long_samples_do_not_prevent_longer_sequences():
    """One of 3,000 samples is cut: sequences of 2 x 2,048 tokens would hold too many samples, one longer does not."""
    lengths = Lengths((*short().tokens, 3000), 3001, exact=True)
    found = faster(job(lengths=lengths), BASE)
    assert found.best.packing
    assert found.best.cutoff > BASE.cutoff
    many = Lengths((*short(300).tokens, *(3000,) * 30), 330, exact=True)
    assert {each.cutoff for each in alternatives(job(lengths=many), BASE, liger=True, fa2=False)} == {BASE.cutoff}


def test_the_data_decides_whether_samples_are_packed():
    base = BASE.with_(accumulation=16)
    assert faster(job(), base).best.packing
    for other in (job(media=True), job("gemma-2-2b")):
        assert not faster(other, base).best.packing
    long = Lengths((2000,) * 500, 500, exact=True)
    assert not faster(job(lengths=long), base).best.packing


def test_liger_and_flash_attention_are_only_used_if_they_are_there():
    base = BASE.with_(attention="disabled")
    found = faster(job(), base, liger=False)
    assert not found.best.liger
    assert found.best.attention == found.changes["flash_attn"] == "sdpa"
    assert any("liger-kernel is not in the release" in each.why for each in found.findings)
    assert faster(job(), BASE, fa2=True).best.attention == "fa2"
    assert faster(job("gemma-2-2b"), base).best.attention == "disabled"  # sdpa has no soft caps


def test_zero_3_becomes_a_lower_stage_only_if_that_fits():
    small, large = job("qwen2.5-1.5b", gpus=4), job("qwen2.5-72b", gpus=8)
    base = BASE.with_(zero=3)
    assert faster(small, base).best.zero == 1
    assert faster(large, base).best.zero == 3
    assert faster(small, base.with_(offload=True)).best.zero == 3


def test_what_may_change_the_loss_is_only_a_remark():
    for base in (BASE, BASE.with_(precision="pure_bf16"), BASE.with_(precision="fp32"), BASE.with_(eight_bit=True)):
        changed = faster(job(), base).changes
        assert not {"optim", "bf16", "pure_bf16"} & set(changed)


def test_frequent_checkpoints_are_named_but_not_changed():
    def saves(base):
        found = faster(job(), base)
        assert not {"save_steps", "save_only_model"} & set(found.changes)
        return any(each.what == "save_steps" for each in found.findings)

    assert saves(BASE.with_(save_steps=10))
    assert not saves(BASE.with_(save_steps=100_000))
    assert not saves(BASE.with_(save_steps=None))
    assert settings_of({"save_strategy": "epoch"}).save_steps is None
    assert settings_of({"save_steps": 0.1}).save_steps is None


def test_keys_lead_from_one_setting_to_the_other():
    base = BASE.with_(accumulation=16)
    best = faster(job(), base).best
    values = {"finetuning_type": "full", "bf16": True, "per_device_train_batch_size": 1,
              "gradient_accumulation_steps": 16, "cutoff_len": 2048}  # fmt: skip
    assert settings_of(values) == base
    assert settings_of({**values, **keys(base, best)}) == best


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"method": "lora", "batch": 8, "checkpointing": True, "precision": "fp32", "cutoff": 2048}),
        ({"quantization_bit": 4, "bf16": True}, {"method": "qlora", "precision": "bf16"}),
        ({"stage": "pt"}, {"packing": True, "neat": False}),
        ({"neat_packing": True}, {"packing": True, "neat": True}),
        ({"group_by_length": True}, {"grouped": True}),
        ({"optim": "paged_adamw_8bit"}, {"eight_bit": True}),
    ],
)
def test_settings_have_llama_factorys_defaults(config, expected):
    found = settings_of(config)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("deepspeed", "stage", "offload"),
    [
        ({"zero_optimization": {"stage": 2}}, 2, False),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, 3, True),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}}, 3, False),
        ({}, 0, False),
        ({"zero_optimization": "odd"}, 0, False),
    ],
)
def test_the_stage_is_deepspeeds(deepspeed, stage, offload):
    found = settings_of({}, deepspeed)
    assert (found.zero, found.offload) == (stage, offload)


@pytest.mark.parametrize("value", [0, -1, True, "8", 1.5, 10**9])
def test_a_number_that_is_none_is_refused(value):
    with pytest.raises(PlanError, match="cutoff_len"):
        settings_of({"cutoff_len": value})


# --- the written file ----------------------------------------------------------------------------------


def test_the_faster_configuration_keeps_order_and_comments(run, project):
    code, out, err = run("plan", "sft.yaml", *ONE)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    text = (project / "sft.faster.yaml").read_text()
    before, after = yaml.safe_load(CONFIG), yaml.safe_load(text)
    changed = {key for key in after if after[key] != before.get(key)}
    assert {"enable_liger_kernel", "disable_gradient_checkpointing", "dataloader_num_workers"} <= changed
    assert list(after)[: len(before)] == list(before)
    assert "### model" in text
    assert "dataset: d   # mine" in text
    rows = text.splitlines()
    for key in changed:
        assert rows[next(at for at, row in enumerate(rows) if row.startswith(f"{key}:")) - 1].startswith("# ")


def test_an_existing_file_is_only_overwritten_with_force(run, project):
    (project / "sft.faster.yaml").write_text("mine: true\n")
    code, _, err = run("plan", "sft.yaml", *ONE)
    assert code == 2
    assert "exists" in err
    assert (project / "sft.faster.yaml").read_text() == "mine: true\n"
    assert run("plan", "sft.yaml", *ONE, "--force")[0] == 0
    assert "mine: true" not in (project / "sft.faster.yaml").read_text()
    code, _, err = run("plan", "sft.yaml", *ONE, "--out", "sft.yaml", "--force")
    assert code == 2
    assert (project / "sft.yaml").read_text() == CONFIG


def test_a_new_stage_gets_its_file(run, project):
    (project / "z3.json").write_text('{"zero_optimization": {"stage": 3}}')
    (project / "sft.yaml").write_text(CONFIG + "deepspeed: z3.json\n")
    code, out, err = run("plan", "sft.yaml", "--gpus", "8", "--gpu", "H200", "--out", "fast.yaml", "--json")
    assert code == 0, err
    assert json.loads(out)["written"] == ["fast.yaml", "fast.ds.json"]
    assert yaml.safe_load((project / "fast.yaml").read_text())["deepspeed"] == "fast.ds.json"
    assert json.loads((project / "fast.ds.json").read_text())["zero_optimization"]["stage"] in {1, 2}


def test_the_model_may_be_only_on_the_nodes(run, project):
    (project / "sft.yaml").write_text(CONFIG.replace(": model", ": /data/models/mine"))
    code, _, err = run("plan", "sft.yaml", *ONE)
    assert code == 2
    assert "/data/models/mine/config.json on the nodes" in err
    code, out, _ = run("plan", "sft.yaml", *ONE, "--model-config", "model/config.json", "--json")
    assert code == 0
    assert json.loads(out)["model"]["parameters"] == 3_085_938_688


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sft.yaml", "--seq", "1024"], "a configuration has this itself"),
        (["qwen2.5-3b", "-n", "1", "--tune"], "only with a LLaMA-Factory configuration"),
        (["qwen2.5-3b"], "--nodes is missing"),
        (["qwen2.5-3b", "-n", "1", "--limit", "a"], "only with --tune"),
        (["sft.yaml", "--inventory", "inventory.yaml"], "only with --tune"),
        (["sft.yaml", "--link", "bench.json"], "it is a number"),
    ],
)
def test_options_of_the_other_form_are_refused(run, project, words, says):
    code, _, err = run("plan", *words)
    assert code == 2
    assert says in err


@pytest.mark.parametrize("text", ["{a: 1, b: 2}\n", "a: &x 1\nb: *x\n"])
def test_a_form_that_cannot_be_changed_is_refused(tmp_path, text):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match="cannot be changed in this form"):
        commented(read(file), {"b": (5, "because"), "c": ("no", "new")}, "plan")


@given(
    st.dictionaries(
        st.sampled_from("abcdef"), st.one_of(st.integers(), st.booleans(), st.text(max_size=8)), min_size=1
    ),
    st.dictionaries(st.sampled_from("abcxyz"), st.one_of(st.integers(), st.booleans(), st.sampled_from(["no", "x.y"]))),
)
def test_a_written_configuration_has_exactly_the_changes(tmp_path_factory, config, changes):
    file = tmp_path_factory.mktemp("written") / "c.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    written = commented(read(file), {key: (value, "why") for key, value in changes.items()}, "plan")
    assert yaml.safe_load(written) == {**config, **changes}
    assert list(yaml.safe_load(written))[: len(config)] == list(config)


def test_rows_are_cut_as_the_configuration_cuts_them():
    settings = BASE.with_(cutoff=512)
    assert rows_of(job(), settings).widest == 512
