"""The curves of a run without a network: TensorBoard's files and W&B's offline ones, written by rank 0 alone."""

import pytest
from training import RUNS

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(600)]


def test_llamafactory_writes_for_both_and_asks_no_network(training_nodes):
    config = training_nodes.folder / training_nodes.config("tracked.yaml", max_steps=3, save_steps=100)
    config.write_text(config.read_text().replace("report_to: none\n", ""))  # what the user says would win
    result = training_nodes.run("train", "--nodes", "2", "tracked.yaml")
    assert result.returncode == 0, result.stderr + result.stdout
    run = training_nodes.last_run().name
    wanted = ("-name", "*.wandb", "-o", "-name", "*.tfevents.*")
    found = {node: training_nodes.on(node, "find", f"{RUNS}/{run}", *wanted).split() for node in training_nodes.nodes}
    assert found["node02"] == []
    assert len(found["node01"]) == 2, found
    assert any("events.out.tfevents" in path for path in found["node01"])
    (wandb,) = (path for path in found["node01"] if path.endswith(".wandb"))
    assert wandb.startswith(f"{RUNS}/{run}/logs/node0/wandb/offline-run-")  # beside the other logs: collect brings it
    content = (training_nodes.box.node_root("node01") / wandb.lstrip("/")).read_bytes()
    assert run.encode() in content  # the run's name there
    assert b"train/loss" in content
    assert training_nodes.marked() == []  # W&B's own service has ended with the run
