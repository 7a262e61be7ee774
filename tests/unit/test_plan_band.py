"""The plan's estimate as a band: measured runs are within it, and what cannot be estimated has a reason."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from provision.errors import UsageError
from provision.model import Result
from provision.run import Job
from provision.tasks import expected as task
from provision.tasks.expected import expect
from trainer.ds_config import find
from trainer.plan import Cluster, PlanError, load
from trainer.plan.band import of_factory, of_lm
from trainer.plan.factory import Job as FactoryJob
from trainer.plan.factory import Settings
from trainer.plan.lengths import Lengths

H200 = Cluster(1, 1, find("H200"), 140.4)
TWO_H200 = Cluster(1, 2, find("H200"), 140.4)
H100 = Cluster(1, 1, find("H100"), 79.6)
XL = "--model gpt2-xl --data d --batch-size 32 --accumulation 2"
LLAMA = "--model llama-3.2-1b --data d --batch-size 4 --block-size 2048"
GUIDE = "--model gpt2-xl --data d --batch-size 1 --accumulation 32 --compile off --dtype float16 --engine"

# docs/benchmarks.md: the options, the GPUs, tokens per second, GB of torch
MEASURED = [
    (XL, TWO_H200, 103_316, 103.6),
    (XL, H200, 52_461, None),
    (f"{XL} --engine zero2", TWO_H200, 98_672, 98.9),
    (LLAMA, H100, 66_702, 32.2),
    (f"{LLAMA} --optimizer adamw8bit", H100, 58_553, 25.8),
    (f"{LLAMA} --fp8 auto", H100, 70_432, 31.7),
    (f"{LLAMA} --lora-rank 16 --init llama-3.2-1b", H100, 79_156, 14.8),
    (f"{LLAMA} --lora-rank 16 --init llama-3.2-1b --quantize nf4", H100, 76_486, 13.4),
    ("--model qwen2.5-3b --data d --batch-size 2 --block-size 8192", H200, 26_145, 118),
    (f"{GUIDE} zero2", TWO_H200, 24_187, 18.8),
    (f"{GUIDE} zero3", TWO_H200, 3_755, 18.1),
    (f"{GUIDE} zero0", TWO_H200, 42_114, 31.2),
    (f"{GUIDE} zero2", H100, 5_926, 34.3),
]


@pytest.mark.parametrize(("words", "cluster", "tokens", "gigabytes"), MEASURED)
def test_measured_runs_are_within_the_band(words, cluster, tokens, gigabytes):
    band = of_lm(words.split(), cluster)
    low, high = band.tokens_per_second
    assert low <= tokens <= high
    assert band.step_seconds[1] / band.step_seconds[0] < 7
    if gigabytes:  # nvidia-smi shows CUDA's context too
        assert band.memory_bytes[0] <= gigabytes * 1e9 + 1.4e9 <= band.memory_bytes[1]
    assert band.basis == f"the plan's estimate for {cluster.world} {cluster.gpu.name}"


# docs/planning.md: batch, accumulation, cutoff, packing, Liger, checkpointing; useful tokens per second
FACTORY = [
    ((1, 8, 2048, False, False, True), 1_729),
    ((8, 2, 2048, False, False, True), 5_333),
    ((4, 1, 8192, True, True, True), 10_014),
    ((2, 1, 8192, True, True, False), 11_756),
]


@pytest.mark.parametrize(("values", "tokens"), FACTORY)
def test_measured_llamafactory_runs_are_within_the_band(values, tokens):
    batch, passes, cutoff, packing, liger, checkpointing = values
    settings = Settings(
        method="full", batch=batch, accumulation=passes, cutoff=cutoff, packing=packing, neat=packing, liger=liger,
        checkpointing=checkpointing, precision="bf16",
    )  # fmt: skip
    lengths = Lengths(tuple([200, 300, 400, 500, 600] * 100), 500, exact=True)
    job = FactoryJob(load("qwen2.5-3b"), lengths, H200)
    low, high = of_factory(job, settings).tokens_per_second
    assert low <= tokens <= high
    guessed = replace(job, lengths=replace(lengths, exact=False))
    assert of_factory(guessed, settings).tokens_per_second == pytest.approx((low / 1.5, high))
    with pytest.raises(PlanError, match="sizes of the images"):
        of_factory(replace(job, media=True), settings)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--model custom --data d", "vocabulary"),
        ("--model gpt2 --data d --optimizer muon", "no figures for --optimizer muon"),
        ("--model gpt2 --data d --resume latest", "--resume"),
        ("--model no-such-model --data d", "no-such-model"),
        ("--no-such-option", "no-such-option"),
    ],
)
def test_what_cannot_be_estimated_has_a_reason(words, text):
    with pytest.raises(PlanError, match=text):
        of_lm(words.split(), H100)


# --- at the launch -------------------------------------------------------------------------------


def launching(job, *, gpus=1, nodes=1, smi="NVIDIA H100 80GB HBM3, 81559\n"):
    node = SimpleNamespace(name="node01")
    worker = SimpleNamespace(node=node, facts=SimpleNamespace(gpus=gpus), processes=max(1, gpus))
    session = SimpleNamespace(
        run=lambda *_, **__: Result(0, smi), inventory=SimpleNamespace(nodes=(node,)), nodes=(node,)
    )
    return session, SimpleNamespace(job=job, workers=(worker,) * nodes)


LM = Job("module", "trainer.lm", tuple(LLAMA.split()))


def test_the_estimate_of_trainer_lm():
    band = expect(*launching(LM), None)
    assert band.basis == "the plan's estimate for 1 H100"
    assert band.step_seconds[0] < 8192 / 66_702 < band.step_seconds[1]


@pytest.mark.parametrize(
    ("job", "more", "text"),
    [
        (Job("script", "train.py"), {}, "the plan knows only LLaMA-Factory's configurations and trainer.lm"),
        (LM, {"gpus": 0}, "node01 has no GPU"),
        (LM, {"nodes": 2}, "the speed of the network between the nodes is not known"),
        (LM, {"smi": ""}, "the plan does not know the GPUs of node01"),
        (Job("module", "trainer.lm", ("--model", "custom", "--data", "d")), {}, "the vocabulary of --model custom"),
        (Job("config", "no-such.yaml"), {}, "no-such.yaml"),
    ],
)
def test_no_estimate_is_no_error(job, more, text):
    band = expect(*launching(job, **more), None)
    assert band.basis.startswith("no estimate: ")
    assert text in band.basis
    assert not band.known


def test_the_users_own_band(monkeypatch):
    launched = launching(Job("script", "train.py"))
    assert not expect(*launched, "none").known
    assert expect(*launched, "0.4-0.6").step_seconds == (0.4, 0.6)
    fields = {"measured": {"step_seconds": [0.4, 0.5, 0.52]}}
    run = SimpleNamespace(id="sft-a", head=SimpleNamespace(fields=fields))
    monkeypatch.setattr(task, "find", lambda *_, **__: (run, None))
    assert expect(*launched, "sft").basis == "measured in sft-a"
    fields.clear()
    with pytest.raises(UsageError, match="sft-a: this run has no measured step time"):
        expect(*launched, "sft")
