"""``clusterctl runs`` and ``collect --wandb`` on real nodes."""

import json
import shlex
from pathlib import Path

import pytest
from training import RUNS

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(300)]

TRAIN = ("--launcher", "plain", "--output", "out", "steps.py", "--", "--pause", "0", "--steps")


@pytest.fixture(scope="module")
def nodes(plain_nodes, tmp_path_factory):
    own = plain_nodes.own(tmp_path_factory.mktemp("history") / "job")
    yield own
    for name in listed(own):
        own.run("stop", name)


def trained(nodes, *steps):
    result = nodes.run("train", "--nodes", "2", *TRAIN, *steps)
    assert result.returncode == 0, result.stderr
    return nodes.last_run().name


def listed(nodes, *options):
    shown = json.loads(nodes.run("runs", "list", "--json", "--last", "1000", *options).stdout)
    return {run["run"]: run for run in shown["runs"]}


def names(nodes, node):
    return nodes.on(node, "ls", "-A", RUNS).split()


def test_a_run_is_removed_once_its_checkpoint_is_here(nodes):
    run = trained(nodes, "4", "--save-every", "2")
    seen = listed(nodes, "--name", run)[run]
    assert (seen["state"], seen["nodes"], seen["step"], seen["total"]) == ("finished", ["node01", "node02"], 4, 4)
    assert seen["bytes"] > 0
    assert not listed(nodes, "--name", run, "--state", "failed")
    assert run in listed(nodes, "--since", "1h")

    kept = nodes.run("runs", "prune", "--name", run, "--yes")
    assert kept.returncode == 0
    assert f"kept {run}: checkpoint-2, checkpoint-4 not collected" in kept.stdout
    assert run in names(nodes, "node01")

    assert nodes.run("collect", run).returncode == 0
    nodes.write("node01", f"{RUNS}/.removing-older/state.json", "")  # what a killed prune leaves
    dry = nodes.run("runs", "prune", "--name", run, "--dry-run")
    assert "would remove 1 run" in dry.stdout
    assert run in names(nodes, "node01")
    done = nodes.run("runs", "prune", "--name", run, "--yes")
    assert "removed 1 run" in done.stdout, done.stderr
    for node in nodes.nodes:
        assert not {run, ".removing-older", f".removing-{run}"} & set(names(nodes, node))
    assert not (nodes.folder / "runs" / run).exists()
    assert run not in listed(nodes)


def test_a_running_run_stays_even_if_it_is_named(nodes):
    run = nodes.detached("--output", "out", "steps.py", "--", "--steps", "100000")
    try:
        refused = nodes.run("runs", "prune", run, "--yes")
        assert refused.returncode == 4
        assert "it is running" in refused.stderr
        assert run in names(nodes, "node01")
        assert run in listed(nodes)
    finally:
        nodes.run("stop", run)
    named = nodes.run("runs", "prune", run, "--yes")
    assert named.returncode == 0, named.stderr
    assert run not in names(nodes, "node02")


def test_offline_runs_of_wandb_come_here_once(nodes):
    run = trained(nodes, "2")
    none = nodes.run("collect", "--wandb", run)
    assert none.returncode == 2
    assert "wrote no offline W&B run" in none.stderr
    assert "report_to: wandb" in none.stderr
    # The files that wandb 0.31 wrote with the variables of a run.
    offline = "wandb/offline-run-20261126_113901-k3j2h1g0"
    for node, rank in (("node01", 0), ("node02", 1)):
        nodes.write(node, f"{RUNS}/{run}/logs/node{rank}/{offline}/run-k3j2h1g0.wandb", f"rank {rank}")
        nodes.write(node, f"{RUNS}/{run}/logs/node{rank}/{offline}/files/requirements.txt", "wandb==0.31.0\n")
    nodes.write("node01", f"{RUNS}/{run}/job/wandb/offline-run-20261126_1-empty/logs/debug.log", "no data file")
    result = nodes.run("collect", "--wandb", run)
    assert result.returncode == 0, result.stderr
    folders = [Path("collected", run, "wandb", node, Path(offline).name) for node in nodes.nodes]
    assert result.stdout.splitlines()[-1] == f"wandb sync {shlex.join(map(str, folders))}"
    for rank, folder in enumerate(folders):
        assert (nodes.folder / folder / "run-k3j2h1g0.wandb").read_text() == f"rank {rank}"
    again = json.loads(nodes.run("collect", "--wandb", "--json", run).stdout)
    assert (again["files"], again["already_here"]) == (0, 4)
