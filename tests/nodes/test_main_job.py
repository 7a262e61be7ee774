"""The three commands as a user types them: a real environment goes to nodes without Python, and LLaMA-Factory trains.

Slow by nature: one environment of 2 GB, two nodes, real torch and gloo between them.
"""

import functools
import json
import re
import shutil
from typing import NamedTuple

import command
import pytest
from training import PREFIX, RUNS, wait_until

pytestmark = [pytest.mark.root, pytest.mark.lab, pytest.mark.timeout(900)]

run = functools.partial(command.run, timeout=600)  # a real environment takes its time
train = functools.partial(command.train, timeout=600)


@pytest.fixture(scope="module")
def box(training_nodes):
    return training_nodes.box


@pytest.fixture(scope="module")
def deployed(training_nodes):
    assert "node[01-02]: deployed" in training_nodes.deployed.stdout
    return training_nodes.folder


STEPS = {"max_steps": 14, "save_steps": 14}


def on(box, node, *argv):
    result = box.enter(node, argv)
    assert result.returncode == 0, result.stderr
    return result.stdout


def marked(box):
    """Processes of any run on the nodes: they carry its name in their environment."""
    script = "grep -lz '^CLUSTERCTL_RUN=' /proc/[0-9]*/environ 2>/dev/null; true"
    return [line for node in ("node01", "node02") for line in on(box, node, "sh", "-c", script).splitlines()]


def test_the_nodes_have_no_python(box, training_nodes):
    for node in ("node01", "node02"):
        assert box.enter(node, ["sh", "-c", "command -v python3 python zstd rsync"]).stdout == ""


def test_the_bundle_has_many_chunks(deployed):
    from provision.env.bundle.reader import open_bundle

    manifest = open_bundle(next(deployed.glob("*.ccb"))).manifest
    assert len(manifest.chunks) >= 20
    assert manifest.versions["llamafactory"] == "0.9.5"


def test_the_editable_install_is_importable_from_its_new_place(box, deployed):
    program = "import llamafactory; print(llamafactory.__file__)"
    where = on(box, "node01", "env", "-i", f"{PREFIX}/bin/python", "-c", program).strip()
    release = on(box, "node01", "readlink", "-f", PREFIX).strip()
    assert where.startswith(f"{release}/src/")


def test_nothing_on_a_node_names_the_packers_prefix(box, deployed, lab_env):
    release = on(box, "node01", "readlink", "-f", PREFIX).strip()
    script = f"grep -rlF --include='*' -e {lab_env} {release} | grep -v -e '\\.pyc$' -e '/\\.clusterctl/' || true"
    assert on(box, "node01", "sh", "-c", script) == ""


def test_second_deploy_changes_nothing_and_reports_it(deployed):
    result = run("deploy", "--inventory", "inventory.yaml", cwd=deployed)
    assert result.returncode == 0
    assert "nothing changed" in result.stdout


@pytest.fixture(scope="module")
def trained(deployed, training_nodes):
    """A training of 14 steps with spaces in all paths and with both trackers."""
    job = deployed / "my job"
    job.mkdir()
    for name in ("model", "data"):
        shutil.copytree(deployed / name, job / f"my {name}")
    name = training_nodes.config(
        "my train.yaml", model_name_or_path="my model", dataset_dir="my data", output_dir="my out", **STEPS
    )
    text = (deployed / name).read_text().replace("report_to: none\n", "")  # the user's value would win
    (job / name).write_text(text)
    result = train("--nodes", "2", f"my job/{name}", cwd=deployed)
    assert result.returncode == 0, result.stderr + result.stdout
    return Trained(training_nodes.last_run().name, result.stdout)


class Trained(NamedTuple):
    run: str
    stdout: str


def test_training_has_world_size_2_and_each_node_its_own_rank(deployed, trained):
    record = deployed / "runs" / trained.run
    for rank, node in enumerate(("node01", "node02")):
        log = (record / node / f"rank{rank}.log").read_text()
        assert re.search(rf"[Pp]rocess rank: {rank}, world size: 2\b", log), log[-2000:]
        assert not (record / node / f"rank{1 - rank}.log").exists()
    plans = json.loads((record / "run.json").read_text())["plans"]
    assert [plans[node]["env"]["NODE_RANK"] for node in ("node01", "node02")] == ["0", "1"]
    assert {plan["env"]["NNODES"] for plan in plans.values()} == {"2"}
    assert {plan["env"]["GLOO_SOCKET_IFNAME"] for plan in plans.values()} == {"eth0"}
    inventory = (deployed / "inventory.yaml").read_text()
    assert plans["node01"]["env"]["MASTER_ADDR"] in inventory


def test_training_ends_with_a_lower_loss_and_a_checkpoint_on_rank_0(box, deployed, trained):
    record = json.loads(((deployed / "runs" / trained.run) / "run.json").read_text())
    assert record["state"] == "finished"
    assert record["losses"][-1] < record["losses"][0]
    assert "world size 2" in trained.stdout
    assert f"checkpoint in node01:{RUNS}/{trained.run}/job/my out" in trained.stdout
    assert "model.safetensors" in on(box, "node01", "ls", f"{RUNS}/{trained.run}/job/my out")


def test_config_and_dataset_were_sent_with_the_run(box, deployed, trained):
    run_folder = json.loads(((deployed / "runs" / trained.run) / "run.json").read_text())["folder"]
    for node in ("node01", "node02"):
        found = on(box, node, "find", f"{run_folder}/job", "-name", "*.yaml", "-o", "-name", "dataset_info.json")
        assert "train.yaml" in found
        assert "dataset_info.json" in found


def test_a_finished_run_leaves_no_process(box, trained):
    assert marked(box) == []


def test_its_curves_are_written_for_both_trackers_by_rank_0_and_no_network_is_asked(box, training_nodes, trained):
    wanted = ("-name", "*.wandb", "-o", "-name", "*.tfevents.*")
    found = {
        node: on(box, node, "find", f"{RUNS}/{trained.run}", *wanted).splitlines() for node in ("node01", "node02")
    }
    assert found["node02"] == []
    assert len(found["node01"]) == 2, found
    assert any("events.out.tfevents" in path for path in found["node01"])
    (wandb,) = (path for path in found["node01"] if path.endswith(".wandb"))
    # beside the other logs: collect brings it
    assert wandb.startswith(f"{RUNS}/{trained.run}/logs/node0/wandb/offline-run-")
    content = (box.node_root("node01") / wandb.lstrip("/")).read_bytes()
    assert trained.run.encode() in content  # the run's name there
    assert b"train/loss" in content


def test_the_input_files_of_a_run_are_readable_only_by_its_user(box, deployed, trained):
    folder = json.loads(((deployed / "runs" / trained.run) / "run.json").read_text())["folder"]
    assert on(box, "node01", "stat", "-c", "%a %U", f"{folder}/plan-0.json").split() == ["600", "trainer"]
    assert ((deployed / "runs" / trained.run) / "run.json").stat().st_mode & 0o077 == 0


def logged(box, folder):
    """The lines of the trainer's own log on rank 0's node, as far as it is written."""
    shown = box.enter("node01", ["cat", f"{folder}/trainer_log.jsonl"]).stdout
    return [line for line in map(json.loads, re.findall(r"^.*}$", shown, re.MULTILINE)) if "loss" in line]


def losses(lines):
    """By step; a repeated step counts with its last line."""
    return {line["current_steps"]: line["loss"] for line in lines}


def test_a_killed_rank_a_stop_that_saves_and_a_killed_torchrun(box, training_nodes, trained):
    """The same losses after a resume; the next resume starts from the step that a stop has saved."""
    options = {"enable_jit_checkpoint": "true", "save_steps": 5, "max_steps": 100000}
    broken = training_nodes.start(
        "train", "--nodes", "2", training_nodes.config("saving.yaml", **options), until=r"checkpoint-5\b"
    )
    run = training_nodes.last_run().name
    out = f"{RUNS}/{run}/job/out"
    wait_until(lambda: len(logged(box, out)) >= 6, "six steps", 90)
    training_nodes.kill("node02", training_nodes.rank("node02", run))
    assert broken.finish() == 6, broken.output

    resumed = training_nodes.start("resume", run, until=r"checkpoint-(5|10|15|20)\b")
    wait_until(lambda: STEPS["max_steps"] in losses(logged(box, out)), "it trains again", 120)
    stopped = training_nodes.run("stop", "--save", run)
    assert stopped.returncode == 0, stopped.stderr
    resumed.finish()
    step = int(re.search(r"saved a checkpoint at step (\d+)", stopped.stdout)[1])
    assert marked(box) == []
    expected, found = losses(logged(box, f"{RUNS}/{trained.run}/job/my out")), losses(logged(box, out))
    assert sorted(expected) == list(range(1, STEPS["max_steps"] + 1))
    for each in expected:
        assert found[each] == pytest.approx(expected[each], abs=1e-3), each
    for rank, node in enumerate(("node01", "node02")):  # each has its own disk, and its own part of the checkpoint
        assert f"rng_state_{rank}.pth" in on(box, node, "ls", f"{out}/checkpoint-{step}").split()

    before = len(logged(box, out))
    resumed = training_nodes.start("resume", run, until=rf"checkpoint-{step}\b")
    wait_until(lambda: len(logged(box, out)) > before, "it trains again", 120)
    assert logged(box, out)[before]["current_steps"] == step + 1
    # torchrun's ranks have separate sessions: they survive it, and the agent stops them.
    training_nodes.kill("node01", min(training_nodes.pids("node01", r"torch\.distributed\.run|torchrun")))
    assert resumed.finish() == 6, resumed.output
    assert marked(box) == []
