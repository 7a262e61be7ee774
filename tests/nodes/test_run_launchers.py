"""Each launcher end to end on two nodes, with the ranks that it must give.

The launchers are real. Ranks need no torch, except with DeepSpeed: four imports of torch cost 16 CPU-seconds.
"""

import re
import shutil

import pytest
from training import PLAIN

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(600)]

SHORT = ("--", "--steps", "5", "--pause", "0", "--output", "out")


def ranks(training):
    """By rank: its report about itself, from the collected logs."""
    found = {}
    for path in training.last_run().glob("*/rank*.log"):
        for rank, world, local in re.findall(r"rank (\d+) of (\d+), local rank (\d+)", path.read_text()):
            found[int(rank)] = (path.parent.name, int(world), int(local))
    return found


LEGACY = (
    "--",
    "python",
    "-m",
    "torch.distributed.launch",
    "--nproc_per_node=2",
    "--nnodes=2",
    "--node_rank=0",
    "steps.py",
)


@pytest.mark.parametrize(
    "typed",
    [
        (*LEGACY, *SHORT[1:]),  # torchrun itself starts the trainings of other tests
        ("--gpus-per-node", "2", "--launcher", "deepspeed", "tiny.py", *SHORT),
        ("--gpus-per-node", "2", "--launcher", "accelerate", "steps.py", *SHORT),
        ("--gpus-per-node", "2", "--launcher", "plain", "steps.py", *SHORT),
    ],
    ids=["torch.distributed.launch", "deepspeed", "accelerate", "plain"],
)
def test_two_nodes_with_two_ranks_each(training_nodes, typed):
    shutil.copy(PLAIN / "steps.py", training_nodes.folder)
    result = training_nodes.run("train", "--nodes", "2", *typed)
    assert result.returncode == 0, result.stderr + result.stdout
    assert ranks(training_nodes) == {
        0: ("node01", 4, 0),
        1: ("node01", 4, 1),
        2: ("node02", 4, 0),
        3: ("node02", 4, 1),
    }
    assert training_nodes.marked() == []
