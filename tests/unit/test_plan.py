"""``clusterctl plan`` and ``clusterctl ds-config`` on the command line."""

import json
import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from case_table import every_case
from hypothesis import given, settings
from hypothesis import strategies as st

from provision.run.config_text import read
from trainer.ds_config import GPUS, ConfigError, find
from trainer.lm.options import from_arguments
from trainer.plan import MODELS, Cluster, PlanError, Setup, Training, accumulation, ds_config, lines, load, parse, plan
from trainer.plan import yaml as written_yaml
from trainer.plan.ladder import ladder
from trainer.plan.memory import gpu_memory

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "plan"
COMMANDS = {
    "llama-2-7b": ["llama-2-7b", "--nodes", "2"],
    "gpt2-xl": ["gpt2-xl", "-n", "1", "--gpus", "4", "--gpu", "H200", "--method", "pretrain", "--for", "own"],
    "qlora": ["qwen2.5-32b", "-n", "1", "--gpus", "2", "--gpu", "RTX4090", "--method", "qlora", "--global-batch", "16"],
    "too-large": ["llama-3-70b", "-n", "1", "--gpus", "1", "--gpu", "V100", "--host-memory", "64", "--cores", "64"],
}
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "vocab_size": 50257, "n_positions": 1024}
BENCH = {
    "rows": [
        {"op": "all_reduce", "bytes": 1 << 23, "busbw": 9e9},
        {"op": "all_reduce", "bytes": 1 << 29, "busbw": 18.9e9},
        {"op": "broadcast", "bytes": 1 << 30, "busbw": 1e9},
    ]
}


@pytest.fixture
def model(tmp_path):
    """Writes a config.json; its folder."""

    def write(config, name="my model"):
        folder = tmp_path / name
        folder.mkdir()
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "config.json").write_text(text)
        return folder

    return write


@pytest.mark.parametrize("name", COMMANDS)
def test_the_output_is_the_recorded_one_in_80_columns(run, name):
    code, out, err = run("plan", *COMMANDS[name])
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("CLUSTERCTL_UPDATE_GOLDEN") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(out, encoding="utf-8")
    assert out == file.read_text(encoding="utf-8"), "CLUSTERCTL_UPDATE_GOLDEN=1 writes it again"


@pytest.mark.parametrize(
    ("words", "same", "differs"),
    [
        (["gpt2-xl", "-n", 1, "--gpu", "H200"], {"model": "gpt2-xl", "engine": "plain"}, {}),
        (["gpt2", "-n", 1, "--gpus", 1], {"n_layer": 12, "global_batch": 256, "offload": "none"}, {}),
        (["gpt2-xl", "-n", 1, "--gpus", 1, "--gpu", "RTX3090"], {"engine": "zero2", "offload": "optimizer"}, {}),
        (["gpt2-xl", "-n", 1, "--gpus", 1, "--gpu", "T4", "--seq", 512], {"block_size": 512}, {"offload": "none"}),
    ],
)
def test_recommended_options_are_accepted_by_the_trainer(run, words, same, differs):
    code, out, _ = run("plan", *words, "--for", "own", "--method", "pretrain", "--json")
    message = json.loads(out)
    options = from_arguments(["--data", "x", *message["trainer_lm"]])
    best = message["best"]["setup"]
    assert code == 0
    checkpointing = "full" if best["checkpointing"] else "off"
    assert (options.batch_size, options.checkpointing) == (best["micro_batch"], checkpointing)
    assert {name: getattr(options, name) for name in same} == same
    assert all(getattr(options, name) != value for name, value in differs.items())
    shown = " ".join(run("plan", *words, "--for", "own", "--method", "pretrain")[1].split())
    assert f"for trainer.lm: {' '.join(message['trainer_lm'])}" in shown


def test_trainer_options_are_empty_for_other_programs_and_models(run):
    for words in (["gpt2-xl", "-n", 1], ["llama-3-8b", "-n", 1, "--for", "own"]):
        assert json.loads(run("plan", *words, "--json")[1])["trainer_lm"] == []


def test_json_has_all_fields_and_nothing_else_is_printed(run):
    code, out, _ = run("plan", "llama-3-8b", "-n", 2, "--json")
    message = json.loads(out)
    assert code == 0
    assert message["model"]["parameters"] == 8_030_261_248
    assert message["cluster"]["world"] == 16
    assert message["best"] in message["options"]
    assert message["best"]["fits"]
    assert message["best"]["setup"]["accumulation"] * message["best"]["setup"]["micro_batch"] * 16 == 256
    for option in message["options"]:
        assert option["fits"] or option["why_not"]
        assert option["memory"]["total"] > option["memory"]["allocated"] > 0
    needs = [message["ladder"]["needs"], *(rung["needs"] for rung in message["ladder"]["rungs"])]
    assert needs == sorted(needs, reverse=True)


@pytest.mark.parametrize(
    ("words", "message", "way_out"),
    [
        (["nothing-7b", "-n", "1"], "unknown model nothing-7b", "llama-3-8b"),
        (["Qwen/Qwen3-235B-A22B", "-n", "1"], "is a mixture of experts whose shape is not in the table", "config.json"),
        (["./nothing", "-n", "1"], "nothing does not exist", ""),
        ([".", "-n", "1"], "has no config.json", "save_pretrained"),
        (["gpt2", "-n", "0"], "--nodes: must be at least 1", ""),
        (["gpt2", "-n", "1", "--gpus", "0"], "--gpus: must be at least 1", ""),
        (["gpt2", "-n", "1", "--gpu-memory", "nan"], "--gpu-memory: must be at least 1", ""),
        (["gpt2", "-n", "1", "--gpu", "Voodoo"], "--gpu Voodoo: not in the table", "A100"),
        (["gpt2", "-n", "3"], "256 is not divisible by 24 GPUs", "try: --global-batch 240 or --global-batch 264"),
        (["gpt2", "-n", "64"], "--global-batch 256 is not divisible by 512 GPUs", "try: --global-batch 512"),
        (["gpt2", "-n", "1", "--seq", "2048"], "has 1024 learned positions", "--seq 1024"),
        (["gpt2", "-n", "1", "--seq", "0"], "--seq: must be at least 1", ""),
        (["gpt2", "-n", "1", "--efficiency", "2"], "--efficiency: must be at least 0.01 and at most 1, not 2", ""),
        (["gpt2", "-n", "1", "--host-memory", "nan"], "--host-memory: must be at least 0", ""),
        (["gpt2", "-n", "2", "--link", "fast"], "neither a number nor a readable file", "bench nccl --json"),
        (["gpt2", "-n", "2", "--link", "0"], "--link must be at least 0.001", ""),
        (["gpt2", "-n", "1", "--write", "plan.txt"], "neither .yaml nor .json", "plan.txt.yaml"),
        (["gpt2", "-n", "1", "--write", "no/plan.yaml", "--model-path", "/m"], "cannot use no/plan.ds.json", ""),
        (
            ["gpt2", "-n", "1", "--write", "a.yaml"],
            "model_name_or_path needs the model's directory",
            "--model-path models/gpt2",
        ),
        (["gpt2", "-n", "1", "--liger"], "--liger: Liger cannot compute the loss of gpt2 in chunks", "remove --liger"),
        (["llama-3-70b", "-n", "1", "--gpu", "T4", "--host-memory", "1", "--write", "a.yaml"], "nothing fits", "-n"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_a_hint(run, words, message, way_out):
    code, out, err = run("plan", *words)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert way_out in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ({"model_type": "mamba"}, "unknown model_type 'mamba'"),
        ({key: value for key, value in LLAMA.items() if key != "hidden_size"}, "hidden_size is missing"),
        ({"model_type": "gpt2"}, "n_layer, n_embd, n_head, vocab_size, n_positions are missing"),
        ({**LLAMA, "vocab_size": "many"}, "vocab_size: 'many' is not a positive whole number"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers: 0 is not a positive whole number"),
        ({**LLAMA, "num_key_value_heads": "eight"}, "num_key_value_heads: 'eight' is not a positive whole number"),
        ({**LLAMA, "head_dim": -1}, "head_dim: -1 is not a positive whole number"),
        ({**GPT2, "n_head": 7}, "a width of 1600 is not divisible by 7 heads"),
    ],
)
def test_unusable_config_is_refused_with_the_reason(run, model, config, message):
    code, _, err = run("plan", model(config), "-n", 1)
    assert code == 2
    assert message in " ".join(err.split())


def test_a_config_is_the_model_of_the_table(model):
    for config, name in ((LLAMA, "llama-3-8b"), (GPT2, "gpt2-xl")):
        found = load(str(model(config, name)))
        assert replace(found, template=MODELS[name].template) == MODELS[name]
        assert load(str(Path(model(config, f"{name} again"), "config.json"))).parameters == found.parameters
    qwen = {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True}
    assert parse(qwen, "x", "x").qkv_bias
    assert parse({**LLAMA, "head_dim": 256}, "x", "x").attention_width == 32 * 256


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("openai-community/gpt2-medium", "gpt2-medium"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b"),
        ("gpt2", "gpt2"),
        ("huggyllama/llama-7b", "llama-7b"),
        ("llama-7b-hf", "llama-7b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Llama-3.1-70B", "llama-3.1-70b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("qwen3-0.6b", "qwen3-0.6b"),
    ],
)
def test_names_of_model_hubs_are_accepted(words, name):
    assert load(words).name == name


def test_the_link_may_be_measured(run, tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps(BENCH))
    _, out, _ = run("plan", "llama-2-7b", "-n", 2, "--link", "bench.json", "--json")
    assert json.loads(out)["cluster"]["link"] == pytest.approx(18.9)
    for bad in ("{}", "[", '{"rows": []}', '{"rows": [{"op": "all_reduce"}]}'):
        (tmp_path / "bad.json").write_text(bad)
        code, _, err = run("plan", "gpt2", "-n", 2, "--link", "bad.json")
        assert code == 2
        assert "--link bad.json" in err


def test_the_yaml_is_one_that_train_reads(run, tmp_path, model):
    folder = model(LLAMA)
    code, out, _ = run("plan", folder, "-n", 2, "--cores", 64, "--method", "lora", "--write", "train.yaml")
    assert code == 0
    assert "wrote train.yaml\nwrote train.ds.json" in out
    text = (tmp_path / "train.yaml").read_text()
    message = yaml.safe_load(text)
    assert message["model_name_or_path"] == str(folder)
    assert message["deepspeed"] == "train.ds.json"
    assert message["preprocessing_num_workers"] == 32
    assert message["per_device_train_batch_size"] * message["gradient_accumulation_steps"] * 16 == 256
    assert (message["finetuning_type"], message["lora_rank"], message["bf16"]) == ("lora", 8, True)
    assert isinstance(message["learning_rate"], float)
    config = json.loads((tmp_path / "train.ds.json").read_text())
    assert config["train_micro_batch_size_per_gpu"] == "auto"
    assert read(tmp_path / "train.yaml", ()).data == message


def test_adapters_are_put_where_the_trainer_finds_matrices(run, tmp_path):
    """LLaMA-Factory's "all" finds every Linear; GPT-2 has none in its blocks."""
    for name, target in (("gpt2", "c_attn,c_proj,c_fc"), ("qwen2.5-0.5b", "all")):
        assert run("plan", name, "-n", 1, "--method", "lora", "--model-path", "m", "--write", "lora.yaml")[0] == 0
        assert yaml.safe_load((tmp_path / "lora.yaml").read_text())["lora_target"] == target


def test_own_script_gets_numbers_instead_of_options(run, tmp_path):
    words = ["-n", 1, "--gpus", 4, "--for", "own", "--method", "pretrain", "--write", "ds.json"]
    assert run("plan", "gpt2-xl", *words)[0] == 0
    config = json.loads((tmp_path / "ds.json").read_text())
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 4 == 256
    assert config["bf16"] == {"enabled": True}
    assert "auto" not in json.dumps(config)


def test_nvme_needs_a_path_only_if_it_is_recommended(run):
    words = ("llama-2-13b", "-n", 1, "--gpus", 1, "--gpu", "A10", "--host-memory", 60, "--global-batch", 8)
    assert json.loads(run("plan", *words, "--json")[1])["best"]["setup"]["optimizer_at"] == "nvme"
    code, _, err = run("plan", *words, "--write", "a.json")
    assert code == 2
    assert "offload to nvme needs a path" in err
    assert run("plan", *words, "--write", "a.json", "--nvme-path", "/scratch")[0] == 0


def test_ds_config_prints_writes_and_refuses(run, tmp_path):
    code, out, err = run("ds-config", "--like", "z3-offload", "--gpu", "V100")
    assert code == 0
    assert json.loads(out)["fp16"]["enabled"] is True
    assert "--with-ops" in err
    assert json.loads(run("ds-config", "--json")[1])["zero_optimization"]["stage"] == 2
    assert run("ds-config", "--no-pin-memory", "--offload-optimizer", "cpu", "-o", "ds.json")[0] == 0
    zero = json.loads((tmp_path / "ds.json").read_text())["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    code, out, err = run("ds-config", "--stage", 2, "--offload-param", "cpu")
    assert (code, out) == (2, "")
    assert re.search(r"only stage 3 shards parameters[\s\S]*try: --stage 3", err)
    code, _, err = run("ds-config", "-o", "no/such/folder.json")
    assert code == 2
    assert "cannot use no/such/folder.json" in err


def test_one_gpu_trains_without_offload_if_that_is_as_fast():
    cluster = Cluster(1, 1, find("P100"), find("P100").memory)
    picked = plan(Training(MODELS["llama-13b"], "qlora", 1024, 1, "trainer"), cluster).best
    assert (picked.setup.stage, picked.setup.optimizer_at) == (0, "gpu")


@settings(deadline=None)
@given(
    st.sampled_from(list(MODELS)),
    st.sampled_from(["full", "lora", "qlora", "pretrain"]),
    st.sampled_from(list(GPUS)),
    st.integers(1, 8),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 40),
    st.sampled_from(["trainer", "own"]),
)
def test_every_plan_is_complete(name, method, gpu, nodes, gpus, share, program):
    cluster = Cluster(nodes, gpus, find(gpu), find(gpu).memory)
    training = Training(MODELS[name], method, 1024, share * cluster.world, program)
    made = plan(training, cluster)
    assert all(len(text) <= 80 for text, _ in lines(made))
    fitting = [each for each in made.options if each.fits]
    assert (made.best is None) == (not fitting)
    for each in fitting:
        assert each.memory.total / (1 << 30) <= cluster.usable
        assert each.speed.tokens <= made.best.speed.tokens * 1.0102
        assert accumulation(training, cluster, each.setup) >= 1
    if made.best is None:
        with pytest.raises(PlanError, match="nothing fits"):
            ds_config(made)
        return
    message = yaml.safe_load(written_yaml(made, name, "x.ds.json"))
    assert message["cutoff_len"] == 1024
    assert message.get("enable_liger_kernel", False) == made.best.setup.chunked_loss
    assert (made.ladder.tokens, made.ladder.needs) == (made.best.speed.tokens, made.best.memory.total / (1 << 30))
    if program == "trainer":
        # Half the sequence length is another training, and a faster one.
        same = [rung for rung in made.ladder.rungs if not rung.what.startswith("half the sequence")]
        assert all(rung.tokens <= made.best.speed.tokens * 1.0102 for rung in same)
    if cluster.world == 1:
        assert made.best.setup.stage == 0 or made.best.setup.optimizer_at != "gpu"
    if made.best.setup.optimizer_at == "nvme":
        with pytest.raises(ConfigError, match="offload to nvme needs a path"):
            ds_config(made)
    config = ds_config(made, nvme_path="/scratch")
    assert config["zero_optimization"]["stage"] == made.best.setup.stage


@every_case("name", MODELS)
@every_case("gpus", [1, 8])
def test_ladder_reduces_memory_and_starts_with_free_steps(name, gpus):
    program = "own" if MODELS[name].family == "gpt2" else "trainer"  # whose loss may be in pieces
    training = Training(MODELS[name], "full", 1024, 64, program)
    found = ladder(training, Cluster(1, gpus, GPUS["A100"], 80), Setup(0, micro_batch=8, flash=False))
    needs = [found.needs, *(rung.needs for rung in found.rungs)]
    assert all(above > below for above, below in pairwise(needs))
    assert sum(rung.saves for rung in found.rungs) == pytest.approx(found.needs - needs[-1])
    words = [rung.what.partition(" (ZeRO")[0] for rung in found.rungs]
    assert words.index("FlashAttention (sdpa or fa2)") < words.index("gradient checkpointing")
    assert words.index("Adam on the CPU") < words.index("parameters on the CPU")
    assert "half the sequence length" not in words[:-1]  # it is another training
    assert needs[-1] < found.needs / 3


def test_remedy_is_named_only_if_it_works():
    """LLaMA-Factory's Liger kernels (model_utils/liger_kernel.py of 0.9.5) do not support GPT-2."""
    for name, program, named in (
        ("gpt2-medium", "trainer", False),
        ("gpt2-medium", "own", False),
        ("llama-3-8b", "trainer", True),
    ):
        training = Training(MODELS[name], "full", 1024, 64, program)
        found = ladder(training, Cluster(1, 8, GPUS["A100"], 80), Setup(0, micro_batch=8, flash=False))
        words = [rung.what for rung in found.rungs]
        assert any("enable_liger_kernel" in each for each in words) == named
        assert any("loss in chunks" in each for each in words) == (named or program == "own")


def test_ineffective_remedies_save_no_memory():
    """The guides' recommendations, on the guides' model."""
    training, cluster = Training(MODELS["llama-2-7b"], "full", 2048, 64), Cluster(1, 4, GPUS["A100"], 40)
    for setup in (Setup(2, overlap=True), Setup(3)):
        before = gpu_memory(training, cluster, setup.with_(bucket=200_000_000)).allocated
        assert gpu_memory(training, cluster, setup.with_(bucket=500_000_000)).allocated >= before
    assert gpu_memory(training, cluster, Setup(3, live=1_000_000_000)) == gpu_memory(training, cluster, Setup(3))


def planned(run, *words):
    code, out, _ = run("plan", *words, "--json")
    assert code == 0
    return json.loads(out)


def test_no_step_of_the_ladder_is_faster_than_the_recommendation(run):
    """Of llama-3-8b on 8 H100 the ladder once started with a rung that was faster than the pick."""
    for words in (["llama-3-8b", "-n", 1, "--gpu", "H100"], ["qwen2.5-7b", "-n", 2], ["gpt2", "-n", 1]):
        message = planned(run, *words)
        best = message["best"]["speed"]["tokens"]
        assert all(rung["tokens"] <= best for rung in message["ladder"]["rungs"]), words
    with_liger = planned(run, "llama-3-8b", "-n", 1, "--gpu", "H100", "--seq", 8192)["best"]
    without = planned(run, "llama-3-8b", "-n", 1, "--gpu", "H100", "--seq", 8192, "--no-liger")["best"]
    assert (with_liger["setup"]["chunked_loss"], without["setup"]["chunked_loss"]) == (True, False)
    assert with_liger["speed"]["tokens"] > 1.1 * without["speed"]["tokens"]


@pytest.mark.parametrize("words", [["llama-3-8b", "-n", 1], ["llama-3-70b", "-n", 1, "--host-memory", 10]])
def test_ladder_starts_at_the_recommendation_and_matches_the_table(run, words):
    """Where nothing fits, it starts at the option that lacks least."""
    message = planned(run, *words)
    start = message["best"] or min((each for each in message["options"] if not each["fits"]), key=lacks)
    assert message["ladder"]["tokens"] == start["speed"]["tokens"]
    assert message["ladder"]["needs"] == start["memory"]["total"] / (1 << 30)
    word = "the pick" if message["best"] else "the closest to fitting"
    assert message["ladder"]["start"] == f"{word}: {start['name']}, batch {start['setup']['micro_batch']}"


def lacks(option):
    return float(re.search(r"lacks ([\d.]+)", option["why_not"])[1])


@pytest.mark.parametrize("name", ["gpt2", "qwen2.5-0.5b"])
@pytest.mark.parametrize("program", ["own", "trainer"])
def test_one_gpu_gets_zero_0(run, name, program):
    message = planned(run, name, "-n", 1, "--gpus", 1, "--for", program)
    assert message["best"]["setup"]["stage"] == 0
    sharding = [
        each for each in message["options"] if each["setup"]["stage"] and each["setup"]["optimizer_at"] == "gpu"
    ]
    assert [each["why_not"] for each in sharding] == ["with one GPU it equals ZeRO-0"] * 3
    assert planned(run, name, "-n", 1, "--gpus", 2, "--for", program)["best"]["setup"]["stage"] > 0


def test_the_yaml_names_the_folder_of_the_model(run, tmp_path, model):
    folder = model(LLAMA)
    for words, path in (
        ([folder], str(folder)),
        ([folder / "config.json"], str(folder)),
        (["llama-3.1-8b", "--model-path", "models/llama"], "models/llama"),
    ):
        assert run("plan", *words, "-n", 1, "--write", "train.yaml")[0] == 0
        message = yaml.safe_load((tmp_path / "train.yaml").read_text())
        assert message["model_name_or_path"] == path
        assert message["enable_liger_kernel"] is True
    assert run("plan", "gpt2", "-n", 1, "--write", "ds.json")[0] == 0  # names no model


def test_a_name_of_the_table_is_no_path_of_a_model(run, tmp_path):
    code, _, err = run("plan", "llama-3.1-8b", "-n", 1, "--write", "train.yaml")
    assert code == 2
    assert "model_name_or_path needs the model's directory" in err
    assert "try: --model-path models/llama-3.1-8b" in err
    assert not (tmp_path / "train.yaml").exists()
