"""What a user may get wrong about a run: refused before anything is started, with the way out."""

import re
import shutil

import pytest

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(600)]

SHORT = ("tiny.py", "--", "--steps", "3", "--pause", "0", "--output", "out")


@pytest.fixture
def training(training_nodes, tmp_path):
    """A folder of its own, in which no run is recorded yet."""
    own = training_nodes.own(tmp_path / "job")
    yield own
    for folder in (own.folder / "runs").glob("*"):
        own.run("stop", folder.name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1, 2\nb: 3\n", r"config\.yaml:2: not YAML"),
        ("services: {web: {image: nginx}}\n", r"config\.yaml is not a LLaMA-Factory config"),
        ("- a\n- b\n", r"config\.yaml is not a LLaMA-Factory config"),
    ],
)
def test_a_file_that_is_no_config_is_a_mistake(training, text, said):
    (training.folder / "config.yaml").write_text(text)
    refused = training.run("train", "--nodes", "2", "config.yaml")
    assert refused.returncode == 2
    assert re.search(said, refused.stderr), refused.stderr
    assert not (training.folder / "runs").exists()


def test_more_nodes_than_there_are(training):
    refused = training.run("train", "--nodes", "3", *SHORT)
    assert refused.returncode == 2
    assert "inventory.yaml has 2 (node[01-02])" in refused.stderr
    assert "--nodes 2" in refused.stderr


def test_an_unknown_run(training):
    for what in ("logs", "stop", "resume", "diagnose", "collect"):
        refused = training.run(what, "20200101-000000-none-0000")
        assert refused.returncode == 2, (what, refused.stderr)
        assert "20200101-000000-none-0000" in refused.stderr, what


def test_spaces_in_all_paths(training):
    folder = training.folder / "my job"
    folder.mkdir()
    shutil.move(training.folder / "model", folder / "my model")
    shutil.move(training.folder / "data", folder / "my data")
    name = training.config(
        "my train.yaml", model_name_or_path="my model", dataset_dir="my data", output_dir="my out", max_steps=2
    )
    shutil.move(training.folder / name, folder / name)
    trained = training.run("train", "--nodes", "2", f"my job/{name}")
    assert trained.returncode == 0, trained.stderr
    run = training.last_run().name
    assert "config.json" in training.on("node01", "ls", f"/home/trainer/llm/runs/{run}/job/my out")


def test_a_port_that_is_taken(training):
    inventory = training.folder / "inventory.yaml"
    inventory.write_text(inventory.read_text() + "train: {port: 22}\n")  # the node's own sshd
    refused = training.run("train", "--nodes", "2", *SHORT)
    assert refused.returncode == 4, refused.stdout
    assert re.search(r"node01: .*\b22\b", refused.stderr), refused.stderr
    assert "train.port" in refused.stderr
    assert not (training.folder / "runs").exists()


def test_another_run_on_the_same_nodes_is_named(training):
    first = training.detached("--output", "out", "tiny.py", "--", "--steps", "100000", "--output", "out")
    second = training.run("train", "--nodes", "2", *SHORT)
    assert second.returncode == 0, second.stderr  # without GPUs they only slow down one another
    assert f"run {first} of trainer is running on the same cores" in second.stderr
    assert training.marked(run=first)


def test_somebody_elses_run_is_not_stopped(training):
    run = training.detached("--output", "out", "tiny.py", "--", "--steps", "100000", "--output", "out")
    folder = f"/home/trainer/llm/runs/{run}"
    # The only other user of these nodes who is nobody's root; with rights of reading, as on a shared file system.
    stranger = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    python = training.on("node01", "cat", f"{folder}/release").strip() + "/bin/python"
    tried = training.box.enter("node01", [*stranger, python, "-I", f"{folder}/agent", "stop", f"{folder}/plan-0.json"])
    assert tried.returncode != 0, tried.stdout
    assert "trainer" in tried.stdout + tried.stderr
    assert "Traceback" not in tried.stderr
    assert training.marked(run=run, among=["node01"])
    assert training.run("stop", run).returncode == 0
    assert training.marked(run=run) == []


@pytest.fixture
def one_sided(training):
    """A config whose model lies on node02 only."""
    for path in sorted((training.folder / "model").iterdir()):
        data = path.read_bytes()
        assert training.box.enter("node02", ["mkdir", "-p", "/home/trainer/one-sided"]).returncode == 0
        (training.box.node_root("node02") / "home/trainer/one-sided" / path.name).write_bytes(data)
    training.on("node02", "chown", "-R", "trainer:trainer", "/home/trainer/one-sided")
    yield training.config("absolute.yaml", model_name_or_path="/home/trainer/one-sided", max_steps=2)
    training.on("node02", "rm", "-rf", "/home/trainer/one-sided")


def test_a_path_of_one_node_only_is_named_and_the_bad_node_left_out(training, one_sided):
    refused = training.run("train", "--nodes", "2", one_sided)
    assert refused.returncode == 4, refused.stdout
    assert re.search(r"node01: model_name_or_path /home/trainer/one-sided is missing", refused.stderr), refused.stderr
    assert "it exists on node02 only" in refused.stderr
    assert "--exclude-bad" in refused.stderr
    assert not (training.folder / "runs").exists()
    rest = training.run("train", "--nodes", "2", "--exclude-bad", one_sided)
    assert rest.returncode == 0, rest.stderr
    (plan,) = training.record()["plans"].values()
    assert (plan["node"], plan["node_rank"], plan["nnodes"]) == ("node02", 0, 1)
    forced = training.start("train", "--nodes", "2", "--force", one_sided, until=r"forced: node01: .*one-sided")
    assert forced.finish() == 6, forced.output
    assert training.marked(run=training.last_run().name) == []
