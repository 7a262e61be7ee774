"""What a job needs in the release and on the nodes, and which nodes lack it."""

import pytest

from provision.model import Node
from provision.run import Facts
from provision.run.needs import Op, Package, judge, needed
from trainer.agent import probe

NODE = Node("node01", "10.0.0.1")
FACTORY = {"llamafactory": "0.9.5", "transformers": "5.6.0", "datasets": "4.0.0", "accelerate": "1.11.0",
           "peft": "0.18.1", "trl": "0.24.0", "deepspeed": "0.19.8", "torch": "2.13.0+cpu"}  # fmt: skip
OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def facts(versions=FACTORY, **more):
    return Facts(packages=tuple(versions), versions={name: each for name, each in versions.items() if each}, **more)


def findings(values=None, configs=None, *, known=None, factory=False, env=None):
    needs = needed(values or {}, configs or {}, factory=factory, env=env or {})
    return list(judge([NODE], {NODE.name: known or facts()}, needs))


@pytest.mark.parametrize(
    ("values", "package"),
    [
        ({"quantization_bit": 4}, "bitsandbytes"),
        ({"quantization_bit": 4, "quantization_method": "hqq"}, "hqq"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"optim": "paged_adamw_8bit"}, "bitsandbytes"),
        ({"optim": "adamw_apex_fused"}, "apex"),
        ({"half_precision_backend": "apex"}, "apex"),
        ({"optim": "galore_adamw"}, "galore-torch"),
        ({"attn_implementation": "flash_attention_2"}, "flash-attn"),
        ({"flash_attn": "fa2"}, "flash-attn"),
        ({"enable_liger_kernel": True}, "liger-kernel"),
        ({"use_liger_kernel": "true"}, "liger-kernel"),
        ({"use_unsloth": True}, "unsloth"),
        ({"use_swanlab": True}, "swanlab"),
        ({"report_to": "wandb"}, "wandb"),
        ({"report_to": ["none", "tensorboard"]}, "tensorboard"),
        ({"report_to": "[swanlab,none]"}, "swanlab"),
    ],
)
def test_a_missing_package_is_named_with_its_key_and_the_command(values, package):
    (found,) = findings(values)
    key = next(iter(values))
    assert (found.check, found.verdict) == ("gate.packages", "WARN" if key == "flash_attn" else "FAIL")
    assert f"no {package}, which {key}" in found.observed
    assert f"pip install '{package}" in found.fix
    assert "clusterctl pack-env; clusterctl deploy" in found.fix
    name = package.replace("-", "_")
    assert findings(values, known=facts({**FACTORY, name: "99"})) == []


def test_ordinary_values_need_no_package():
    values = {
        "optim": "adamw_torch",
        "report_to": "none",
        "flash_attn": "auto",
        "quantization_bit": None,
        "use_unsloth": False,
    }
    assert findings(values, factory=True) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"trl": "0.26.1"}, ["trl 0.26.1", "LLaMA-Factory 0.9.5", ">=0.18.0,<=0.24.0"]),
        ({"transformers": "4.50.3"}, ["transformers 4.50.3", ">=4.55.0,<=5.6.0"]),
        ({"bitsandbytes": "0.45.0"}, ["bitsandbytes 0.45.0", "quantization_bit: 4", ">=0.46.1"]),
    ],
)
def test_a_package_with_the_wrong_version_is_found(changes, says):
    (found,) = findings(
        {"quantization_bit": 4}, known=facts({**FACTORY, "bitsandbytes": "0.48.1", **changes}), factory=True
    )
    assert all(each in found.observed for each in says), found
    assert found.verdict == "FAIL"


def test_the_limits_are_those_of_one_release_of_llamafactory():
    new = facts({**FACTORY, "trl": "0.26.1"})
    assert findings(known=new, factory=False) == []
    assert findings(known=new, factory=True, env={"DISABLE_VERSION_CHECK": "1"}) == []
    assert findings(known=facts({**FACTORY, "trl": "0.26.1", "llamafactory": "0.9.6"}), factory=True) == []
    assert findings(known=facts({**FACTORY, "trl": ""}), factory=True) == []  # its version is not known
    assert (
        findings({"load_in_4bit": True}, known=facts({**FACTORY, "transformers": "4.57.0", "bitsandbytes": "0.45"}))
        == []
    )


@pytest.mark.parametrize(
    ("config", "gpus", "op", "lacks"),
    [
        (OFFLOAD, 8, "cpu_adam", "no C++ compiler and no ninja".replace("no C++", "a C++")),
        ({**OFFLOAD, "optimizer": {"type": "Lion"}}, 8, "cpu_lion", "C++"),
        (ADAM, 8, "fused_adam", "nvcc"),
        ({"optimizer": {"type": "Lamb"}}, 8, "fused_lamb", "nvcc"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, 8, "async_io", "C++"),
        ({}, 0, "deepspeed_shm_comm", "ninja"),
    ],
)
def test_an_op_needs_a_compiler_or_must_be_in_the_release(config, gpus, op, lacks):
    (found,) = findings(configs={"ds.json": config}, known=facts(gpus=gpus))
    assert (found.check, found.verdict) == ("gate.ops", "FAIL")
    assert f"compiles {op} at the start" in found.observed
    assert lacks in found.observed
    assert (
        f"DS_BUILD_{op.upper()}=1 pip install" in found.fix if lacks == "nvcc" else "pack-env --with-ops" in found.fix
    )
    assert findings(configs={"ds.json": config}, known=facts(gpus=gpus, ops=(op,))) == []
    assert findings(configs={"ds.json": config}, known=facts(gpus=gpus, compilers=("c++", "ninja", "nvcc"))) == []


def test_torch_adam_needs_no_op_and_gpus_no_shared_memory_of_processors():
    config = {**OFFLOAD, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    assert findings(configs={"ds.json": config}, known=facts(gpus=8)) == []
    (found,) = findings(configs={"ds.json": ADAM}, known=facts(gpus=8, compilers=("c++", "ninja")))
    assert '"torch_adam": true' in found.fix


def test_a_run_that_names_its_compiler_is_not_refused():
    assert findings(configs={"ds.json": ADAM}, known=facts(gpus=8), env={"CUDA_HOME": "/opt/cuda"}) == []


def test_deepspeed_itself_is_needed():
    (found,) = findings(configs={"ds.json": {}}, known=facts({"torch": "2.13.0"}))
    assert "no deepspeed, which ds.json needs" in found.observed


def test_a_node_whose_packages_are_not_known_is_not_judged():
    assert findings({"report_to": "wandb"}, {"ds.json": ADAM}, known=Facts()) == []


def test_needs_are_named_once():
    needs = needed({"report_to": ["wandb", "wandb"]}, {"a.json": ADAM}, factory=False, env={})
    assert len(needs) == len(set(needs)) == 4
    assert {type(each) for each in needs} == {Package, Op}


def test_the_probe_finds_versions_ops_and_compilers(tmp_path, monkeypatch):
    (tmp_path / "flash_attn-2.8-py3.11.egg-info").mkdir()
    (tmp_path / "torch-2.13.0+cpu.dist-info").mkdir()
    (tmp_path / "my-tool.egg-link").touch()
    for name in ("adam/cpu_adam_op.cpython-311-x86_64-linux-gnu.so", "comm/deepspeed_shm_comm_op.so", "adam/notes.txt"):
        path = tmp_path / "deepspeed/ops" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert probe.versions([str(tmp_path)]) == {"flash_attn": "2.8-py3.11", "torch": "2.13.0+cpu"}
    assert probe.ops([str(tmp_path), str(tmp_path / "none")]) == ["cpu_adam", "deepspeed_shm_comm"]
    for name in ("c++", "ninja"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr("sys.prefix", str(tmp_path / "none"))
    assert probe.compilers() == ["c++", "ninja"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert probe.compilers() == ["ninja"]
