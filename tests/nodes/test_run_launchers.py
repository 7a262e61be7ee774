"""Each launcher end to end on two nodes, with the ranks that it must give."""

import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(600)]

SHORT = ("--", "--steps", "5", "--pause", "0", "--output", "out")


def ranks(training):
    """By rank: what it said about itself, from the logs that came back."""
    found = {}
    for path in training.last_run().glob("*/rank*.log"):
        for rank, world, local in re.findall(r"rank (\d+) of (\d+), local rank (\d+)", path.read_text()):
            found[int(rank)] = (path.parent.name, int(world), int(local))
    return found


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "accelerate", "plain"])
def test_two_nodes_with_two_ranks_each(training_nodes, launcher):
    result = training_nodes.run(
        "train", "--nodes", "2", "--gpus-per-node", "2", "--launcher", launcher, "tiny.py", *SHORT
    )
    assert result.returncode == 0, result.stderr + result.stdout
    assert ranks(training_nodes) == {
        0: ("node01", 4, 0),
        1: ("node01", 4, 1),
        2: ("node02", 4, 0),
        3: ("node02", 4, 1),
    }
    assert training_nodes.marked() == []


def test_a_module(training_nodes):
    result = training_nodes.run("train", "--nodes", "2", "-m", "tiny", *SHORT)
    assert result.returncode == 0, result.stderr + result.stdout
    assert ranks(training_nodes) == {0: ("node01", 2, 0), 1: ("node02", 2, 0)}


def test_what_people_still_type(training_nodes):
    typed = ["--", "python", "-m", "torch.distributed.launch", "--nproc_per_node=1", "--nnodes=2", "--node_rank=0"]
    result = training_nodes.run("train", "--nodes", "2", *typed, "tiny.py", "--steps", "5", "--pause", "0")
    assert result.returncode == 0, result.stderr + result.stdout
    assert ranks(training_nodes) == {0: ("node01", 2, 0), 1: ("node02", 2, 0)}


def test_one_node_of_two(training_nodes):
    result = training_nodes.run("train", "--limit", "node02", "tiny.py", *SHORT)
    assert result.returncode == 0, result.stderr + result.stdout
    assert ranks(training_nodes) == {0: ("node02", 1, 0)}


def test_a_dry_run_prints_each_nodes_command_and_starts_nothing(training_nodes):
    before = sorted((training_nodes.folder / "runs").iterdir())
    there = _written(training_nodes)
    result = training_nodes.run("train", "--nodes", "2", "--dry-run", "tiny.py", *SHORT)
    assert result.returncode == 0, result.stderr
    assert "NODE_RANK=0" in result.stdout
    assert "NODE_RANK=1" in result.stdout
    assert "tiny.py" in result.stdout
    assert sorted((training_nodes.folder / "runs").iterdir()) == before
    assert _written(training_nodes) == there


def _written(nodes):
    """What lies in the user's home and in /tmp of every node, with the times of the folders that runs are made in."""
    found = {}
    for name in nodes.nodes:
        top = Path(nodes.box.node_root(name))
        places = [top / "home/trainer/llm", top / "home/trainer/llm/runs"]
        found[name] = [(sorted(each.iterdir()), each.stat().st_mtime_ns) for each in places]
        found[name].append(sorted((top / "tmp").glob("*dry-run*")))
    return found
