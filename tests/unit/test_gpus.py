"""A card's name from nvidia-smi becomes that card and its memory, or is refused: never a faster card."""

from __future__ import annotations

import json

import pytest

from trainer.ds_config import GPUS, ConfigError, find, with_memory

NAMES = {
    # name: card, memory in GiB, GB/s of its memory
    "NVIDIA A100-SXM4-40GB": ("A100", 40, 1555),
    "NVIDIA A100-PCIE-40GB": ("A100 PCIe", 40, 1555),
    "NVIDIA A100-SXM4-80GB": ("A100", 80, 2039),
    "a100 40 gb": ("A100", 40, 1555),
    "NVIDIA A800 80GB PCIe": ("A800 PCIe", 80, 1935),
    "NVIDIA H800": ("H800", 80, 3350),
    "NVIDIA H800 PCIe": ("H800 PCIe", 80, 2000),
    "NVIDIA H100 80GB HBM3": ("H100", 80, 3350),
    "NVIDIA H200 NVL": ("H200 NVL", 141, 4800),
    "NVIDIA GH200 480GB": ("GH200", 96, 4000),  # 480 GB are its processor's
    "NVIDIA GH200 144G HBM3e": ("GH200", 144, 4000),
    "Tesla V100-SXM2-16GB": ("V100", 16, 900),
    "Tesla V100S-PCIE-32GB": ("V100S", 32, 1134),
    "Tesla P100-PCIE-12GB": ("P100 PCIe", 12, 549),
    "NVIDIA GeForce RTX 4090": ("RTX4090", 24, 1008),
    "NVIDIA GeForce RTX 4090 D": ("RTX4090 D", 24, 1008),
    "NVIDIA GeForce RTX 5090": ("RTX5090", 32, 1792),
    "NVIDIA RTX 6000 Ada Generation": ("RTX 6000 Ada", 48, 960),
    "NVIDIA RTX A5000": ("RTX A5000", 24, 768),
    "A5000": ("RTX A5000", 24, 768),
    "NVIDIA L20": ("L20", 45, 864),
    "L40 48GB": ("L40", 45, 864),  # with ECC nvidia-smi shows a sixteenth less than the name
    "NVIDIA A10G": ("A10G", 22.5, 600),
    "NVIDIA B300 SXM6 AC": ("B300", 268, 8000),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_its_card_with_its_memory(name):
    card = find(name)
    assert (card.name, card.memory, card.bandwidth) == NAMES[name]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 5090 D", "Quadro RTX 6000", "NVIDIA A10-24Q",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "A100X", "L40G", "",
        "NVIDIA H20 PCIe",
    ],
)  # fmt: skip
def test_unknown_card_is_refused(name):
    with pytest.raises(ConfigError, match="not in the table"):
        find(name)


def test_the_slower_of_two_boards_is_slower():
    for slow, fast in (("H800 PCIe", "H800"), ("RTX4090 D", "RTX4090"), ("P100 PCIe", "P100"), ("L20", "L40")):
        assert GPUS[slow].tflops < GPUS[fast].tflops


def test_given_memory_selects_the_variant_of_a_card():
    assert with_memory(find("A100"), 40) == find("A100 40GB")
    assert with_memory(find("A100"), 79.3) == find("A100")


@pytest.mark.parametrize(
    ("words", "memory"),
    [
        (["--gpu", "NVIDIA A100-SXM4-40GB"], 40),
        (["--gpu", "A100"], 80),
        (["--gpu", "A100", "--gpu-memory", "39.5"], 39.5),
        (["--gpu", "NVIDIA A100-SXM4-40GB", "--gpu-memory", "39.5"], 39.5),
    ],
)
def test_plan_takes_the_memory_from_the_name(run, words, memory):
    code, out, _ = run("plan", "gpt2", "-n", 1, *words, "--json")
    cluster = json.loads(out)["cluster"]
    assert code == 0
    assert cluster["memory"] == memory
    assert cluster["gpu"]["bandwidth"] == (2039 if memory == 80 else 1555)
