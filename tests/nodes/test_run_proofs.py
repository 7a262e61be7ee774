"""DeepSpeed's sharded checkpoints on nodes that share no disk."""

import json
import re
import subprocess

import pytest
from training import RUNS

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(600)]

OUT = RUNS + "/{run}/job/out"
# By name, how far the weights of two sets lie apart.
COMPARE = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
def read(folder):
    files = sorted(Path(folder).glob("*.safetensors")) or sorted(Path(folder).glob("*.bin"))
    load = load_file if files[0].suffix == ".safetensors" else torch.load
    return {name: value for file in files for name, value in load(str(file)).items()}
exact, saved = read(sys.argv[1]), read(sys.argv[2])
assert {str(value.dtype) for value in exact.values()} == {"torch.float32"}, exact
apart = {name: float((exact[name] - saved[name].float()).abs().max()) for name in saved}
print(json.dumps(apart))
"""


@pytest.fixture(scope="module")
def training(training_nodes, tmp_path_factory):
    """A new folder; the runs that tests leave are stopped."""
    own = training_nodes.own(tmp_path_factory.mktemp("proofs") / "job")
    yield own
    for folder in (own.folder / "runs").glob("*"):
        own.run("stop", folder.name)


def test_zero_2_saves_a_part_on_each_node_and_is_exported_as_fp32(training, lab_env, tmp_path):
    """That such a training resumes is tested with two of the programs in test_programs.py."""
    config = training.config("zero.yaml", save_steps=3, max_steps=3, bf16="true")
    trained = training.run("train", "--nodes", "2", "--copies", "0", "--zero", "2", config)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    run = training.last_run().name
    out = OUT.format(run=run)
    log = training.on("node01", "cat", f"{out}/trainer_log.jsonl").splitlines()
    assert [json.loads(line)["current_steps"] for line in log if "loss" in json.loads(line)] == [1, 2, 3]
    parts = {node: shards(training, node, f"{out}/checkpoint-3") for node in training.nodes}
    assert [len(found) for found in parts.values()] == [1, 1], parts
    collected = training.run("collect", run, "--fp32", "--to", tmp_path)
    assert collected.returncode == 0, collected.stderr
    (exact,) = {path.parent for path in tmp_path.rglob("*") if "fp32" in path.parent.name and path.is_file()}
    (saved,) = {path.parent for path in tmp_path.rglob("checkpoint-3/model*.safetensors")}
    argv = [lab_env / "bin/python", "-c", COMPARE, exact, saved]
    compared = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert compared.returncode == 0, compared.stderr
    apart = json.loads(compared.stdout)
    assert len(apart) > 10
    assert max(apart.values()) < 0.01  # bf16 keeps 8 bits


def shards(training, node, folder):
    return re.findall(r"\S*optim_states\.pt", training.on(node, "sh", "-c", f"cd {folder} && find . -type f"))
