"""Wrong input for a run: refused before anything is started, with a hint."""

import json
import re

import pytest
import yaml
from training import PREFIX, ROOT, RUNS

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(600)]

SHORT = ("steps.py", "--", "--steps", "3", "--pause", "0", "--output", "out")


@pytest.fixture
def training(plain_nodes, tmp_path):
    """A new folder without recorded runs."""
    own = plain_nodes.own(tmp_path / "job")
    yield own
    for folder in (own.folder / "runs").glob("*"):
        own.run("stop", folder.name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2\nb: 3\n", r"config\.yaml:2: not YAML"),
        ("services: {web: {image: nginx}}\n", r"config\.yaml is not a LLaMA-Factory config"),
        ("- a\n- b\n", r"config\.yaml is not a LLaMA-Factory config"),
    ],
)
def test_a_file_that_is_not_a_config_is_a_usage_error(training, text, message):
    (training.folder / "config.yaml").write_text(text)
    refused = training.run("train", "--nodes", "2", "config.yaml")
    assert refused.returncode == 2
    assert re.search(message, refused.stderr), refused.stderr
    assert not (training.folder / "runs").exists()


def test_more_nodes_than_the_inventory_has(training):
    refused = training.run("train", "--nodes", "3", *SHORT)
    assert refused.returncode == 2
    assert "inventory.yaml has 2 (node[01-02])" in refused.stderr
    assert "--nodes 2" in refused.stderr


def test_port_in_use(training):
    inventory = training.folder / "inventory.yaml"
    inventory.write_text(inventory.read_text() + "train: {port: 22}\n")  # the node's own sshd
    runs = ("find", ROOT, "-path", f"{RUNS}/[!.]*")  # .agent-* is shared by all runs
    before = [training.on(node, *runs) for node in training.nodes]
    refused = training.run("train", "--nodes", "2", *SHORT)
    assert refused.returncode == 4, refused.stdout
    text = " ".join(refused.stderr.split())
    assert "nothing was started" in text
    assert "node01: port 22 is in use" in text
    assert [training.on(node, *runs) for node in training.nodes] == before
    assert not (training.folder / "runs").exists()


def test_an_interface_that_no_node_has_is_refused(training):
    inventory = training.folder / "inventory.yaml"
    inventory.write_text(inventory.read_text() + "train: {env: {NCCL_SOCKET_IFNAME: eno9}}\n")
    refused = training.run("train", "--nodes", "2", *SHORT)
    assert refused.returncode == 4, refused.stdout
    text = " ".join(refused.stderr.split())
    assert "node[01-02]: NCCL_SOCKET_IFNAME=eno9 names no interface that is up; the node has eth0, lo" in text, text
    assert "remove it from train: env:" in text
    assert not (training.folder / "runs").exists()


def test_rank_0_that_a_node_looks_for_on_itself_is_refused(training):
    inventory = training.folder / "inventory.yaml"
    cluster = yaml.safe_load(inventory.read_text())
    cluster["nodes"]["node01"] = {"address": cluster["nodes"]["node01"], "data_address": "rank0"}
    inventory.write_text(yaml.safe_dump(cluster))
    for node, address in zip(training.nodes, (training.box.nodes[0].address, "127.0.0.1"), strict=True):
        training.on(node, "sh", "-c", f"cp /etc/hosts /etc/hosts.before; echo '{address} rank0' >>/etc/hosts")
    try:
        refused = training.run("train", "--nodes", "2", *SHORT)
    finally:
        for node in training.nodes:
            training.on(node, "sh", "-c", "cat /etc/hosts.before >/etc/hosts")
    assert refused.returncode == 4, refused.stdout
    shown = " ".join(refused.stderr.split())
    assert "node02: rank0 resolves to 127.0.0.1, which other nodes cannot reach" in shown, shown
    assert not (training.folder / "runs").exists()


def test_a_best_model_that_only_one_node_has_is_refused(training):
    (training.folder / "data").mkdir()
    (training.folder / "data/tiny.json").write_text("[]")
    (training.folder / "data/dataset_info.json").write_text('{"tiny": {"file_name": "tiny.json"}}')
    (training.folder / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    config = {"stage": "sft", "dataset": "tiny", "dataset_dir": "data", "template": "qwen", "output_dir": "out"}
    config |= {"deepspeed": "ds.json", "load_best_model_at_end": True, "model_name_or_path": "/etc"}
    (training.folder / "best.yaml").write_text(json.dumps(config))
    refused = training.run("train", "--nodes", "2", "best.yaml")
    assert refused.returncode == 4, refused.stdout
    text = " ".join(refused.stderr.split())
    assert "load_best_model_at_end: true needs the checkpoints of node01" in text.partition("node02: ")[2], text
    assert not (training.folder / "runs").exists()


def test_nodes_with_different_releases_are_refused(training):
    now = training.on("node02", "readlink", PREFIX).strip()
    copied = f"cd {ROOT} && cp -al {now} {now}-other && cp {now}.ok {now}-other.ok && ln -sfn {now}-other {PREFIX}"
    training.on("node02", "sh", "-c", copied)
    try:
        refused = training.run("train", "--nodes", "2", *SHORT)
    finally:
        training.on("node02", "sh", "-c", f"cd {ROOT} && ln -sfn {now} {PREFIX} && rm -rf {now}-other {now}-other.ok")
    assert refused.returncode == 4, refused.stdout
    text = " ".join(refused.stderr.split())
    assert f"node02: has release {now.rpartition('/')[2]}-other" in text, text
    assert "clusterctl deploy" in text
    assert not (training.folder / "runs").exists()


def test_training_without_a_deployed_environment_is_refused(training):
    inventory = training.folder / "inventory.yaml"
    inventory.write_text(inventory.read_text().replace(PREFIX, "/home/trainer/nothing/current"))
    refused = training.run("train", "--nodes", "2", *SHORT)
    assert refused.returncode == 4
    assert "there is no environment at /home/trainer/nothing/current" in " ".join(refused.stderr.split())
    assert "clusterctl deploy" in refused.stderr


def test_a_running_run_is_reported_at_the_next_start_and_other_users_cannot_stop_it(training):
    run = training.detached("--output", "out", "steps.py", "--", "--steps", "100000", "--output", "out")
    second = training.run("train", "--nodes", "2", *SHORT)
    assert second.returncode == 0, second.stderr  # without GPUs they only slow down one another
    assert f"run {run} of trainer is running on the same cores" in second.stderr
    folder = f"{RUNS}/{run}"
    # The only other user of these nodes without root's rights; may read, as on a shared file system.
    stranger = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    python = training.on("node01", "cat", f"{folder}/release").strip() + "/bin/python"
    tried = training.box.enter("node01", [*stranger, python, "-I", f"{folder}/agent", "stop", f"{folder}/plan-0.json"])
    assert tried.returncode != 0, tried.stdout
    assert "trainer" in tried.stdout + tried.stderr
    assert "Traceback" not in tried.stderr
    for node in training.nodes:
        assert training.marked(run=run, among=[node])
    assert training.run("stop", run).returncode == 0
    assert training.marked(run=run) == []


@pytest.fixture
def one_sided(training):
    """A config whose model is on node02 only."""
    training.write("node02", "/home/trainer/one-sided/config.json", "{}")
    config = {
        "model_name_or_path": "/home/trainer/one-sided",
        "stage": "sft",
        "dataset": "tiny",
        "dataset_dir": "data",
        "template": "qwen",
        "output_dir": "out",
    }
    (training.folder / "data").mkdir()
    (training.folder / "data/tiny.json").write_text("[]")
    (training.folder / "data/dataset_info.json").write_text('{"tiny": {"file_name": "tiny.json"}}')
    (training.folder / "absolute.yaml").write_text(json.dumps(config))
    yield "absolute.yaml"
    training.on("node02", "rm", "-rf", "/home/trainer/one-sided")


def test_path_missing_on_one_node_is_named_and_that_node_can_be_excluded(training, one_sided):
    refused = training.run("train", "--nodes", "2", one_sided)
    assert refused.returncode == 4, refused.stdout
    assert re.search(r"node01: model_name_or_path /home/trainer/one-sided is missing", refused.stderr), refused.stderr
    assert "it exists on node02 only" in refused.stderr
    assert "--exclude-bad" in refused.stderr
    assert not (training.folder / "runs").exists()
    rest = training.run("train", "--nodes", "2", "--exclude-bad", "--dry-run", one_sided)
    assert rest.returncode == 0, rest.stderr
    assert "node02" in rest.stdout
    assert "node01" not in rest.stdout
    assert "NNODES=1" in rest.stdout
    few = training.run("train", "--nodes", "2", "--min-nodes", "2", "--exclude-bad", "--dry-run", one_sided)
    assert (few.returncode, few.stderr.count("--min-nodes 2: the run starts on 1 node\n")) == (2, 1), few.stderr
    # LLaMA-Factory itself is not here: it fails on both nodes.
    forced = training.start("train", "--nodes", "2", "--force", one_sided, until=r"forced: node01: .*one-sided")
    assert forced.finish() == 6, forced.output
    assert training.marked(run=training.last_run().name) == []
