"""The three commands as a user types them: a real environment goes to nodes without Python, and LLaMA-Factory trains.

Slow by nature: one environment of 2 GB, two nodes, real torch and gloo between them.
"""

import functools
import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import command
import pytest
from command import CLUSTERCTL
from training import PREFIX

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


def on(box, node, *argv):
    result = box.enter(node, argv)
    assert result.returncode == 0, result.stderr
    return result.stdout


def marked(box):
    """Processes of any run on the nodes: they carry its name in their environment."""
    script = "grep -lz '^CLUSTERCTL_RUN=' /proc/[0-9]*/environ 2>/dev/null; true"
    return [line for node in ("node01", "node02") for line in on(box, node, "sh", "-c", script).splitlines()]


def test_the_nodes_have_no_python_of_their_own(box, training_nodes):
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


def test_a_second_deploy_changes_nothing_and_says_so(deployed):
    result = run("deploy", "--inventory", "inventory.yaml", cwd=deployed)
    assert result.returncode == 0
    assert "nothing changed" in result.stdout


@pytest.fixture(scope="module")
def trained(deployed):
    result = train("--nodes", "2", cwd=deployed)
    assert result.returncode == 0, result.stderr + result.stdout
    return result


def last_run(folder):
    return max((folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_training_has_world_size_2_and_each_node_its_own_rank(deployed, trained):
    record = last_run(deployed)
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
    record = json.loads((last_run(deployed) / "run.json").read_text())
    assert record["state"] == "finished"
    assert record["losses"][-1] < record["losses"][0]
    assert "world size 2" in trained.stdout
    output = re.search(r"checkpoint in node01:(\S+)", trained.stdout)[1]
    assert "model.safetensors" in on(box, "node01", "ls", output)


def test_the_config_and_its_dataset_travelled_with_the_run(box, deployed, trained):
    run_folder = json.loads((last_run(deployed) / "run.json").read_text())["folder"]
    for node in ("node01", "node02"):
        found = on(box, node, "find", f"{run_folder}/job", "-name", "*.yaml", "-o", "-name", "dataset_info.json")
        assert "train.yaml" in found
        assert "dataset_info.json" in found


def test_nothing_of_a_finished_run_is_left(box, trained):
    assert marked(box) == []


def test_a_crash_on_one_node_stops_the_other_and_gives_6_with_its_last_lines(box, deployed):
    # The data lies on node01 only: node02 crashes, and node01 would wait for it for half an hour, longer than `run`.
    target = Path(box.node_root("node01")) / "srv/data"
    shutil.copytree(deployed / "data", target)
    config = (deployed / "train.yaml").read_text()
    (deployed / "broken.yaml").write_text(re.sub(r"dataset_dir: .*", "dataset_dir: /srv/data", config))
    refused = run("train", "--nodes", "2", "broken.yaml", cwd=deployed)
    assert refused.returncode == 4, refused.stderr
    assert "/srv/data is missing; it exists on node01 only" in " ".join(refused.stderr.split())
    result = run("train", "--nodes", "2", "--force", "broken.yaml", cwd=deployed)
    assert result.returncode == 6, result.stderr
    assert "node02" in result.stderr
    assert "/srv/data" in result.stderr
    assert marked(box) == []
    assert json.loads((last_run(deployed) / "run.json").read_text())["state"] == "failed"


def start_and_wait_for_a_step(folder):
    """``clusterctl train`` on its way, with at least one training step behind it."""
    config = (folder / "train.yaml").read_text()
    (folder / "long.yaml").write_text(re.sub(r"num_train_epochs: .*", "num_train_epochs: 500.0", config))
    process = subprocess.Popen(
        [CLUSTERCTL, "train", "--nodes", "2", "long.yaml"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "'loss'" in line:
            return process
    pytest.fail("no training step:\n" + "".join(seen))
    return None


def test_ctrl_c_stops_every_node_and_ends_with_130(box, deployed):
    process = start_and_wait_for_a_step(deployed)
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=90)[0]
    assert process.returncode == 130, rest
    assert "stopped on every node" in rest
    assert marked(box) == []


def test_a_taken_port_is_refused_and_nothing_is_left(box, deployed, tmp_path):
    for name in ("id_ed25519", "known_hosts"):
        shutil.copy2(deployed / name, tmp_path / name)
    (tmp_path / "inventory.yaml").write_text((deployed / "inventory.yaml").read_text() + "\ntrain: {port: 22}\n")
    runs = str(Path(PREFIX).parent / "runs")
    before = [on(box, node, "ls", runs) for node in ("node01", "node02")]
    result = run("train", "--nodes", "2", str(deployed / "train.yaml"), cwd=tmp_path)
    assert result.returncode == 4
    text = " ".join(result.stderr.split())
    assert "nothing was started" in text
    assert "node01: port 22 is in use; name another train.port, or none: then a free one is found" in text
    assert [on(box, node, "ls", runs) for node in ("node01", "node02")] == before
    assert not (tmp_path / "runs").exists()


def test_what_a_run_was_given_is_readable_by_its_user_alone(box, deployed, trained):
    folder = json.loads((last_run(deployed) / "run.json").read_text())["folder"]
    assert on(box, "node01", "stat", "-c", "%a %U", f"{folder}/plan-0.json").split() == ["600", "trainer"]
    assert (last_run(deployed) / "run.json").stat().st_mode & 0o077 == 0


def test_training_where_nothing_is_deployed_is_refused(box, deployed, tmp_path):
    text = (deployed / "inventory.yaml").read_text().replace(PREFIX, "/home/trainer/nothing/current")
    for name in ("id_ed25519", "known_hosts"):
        shutil.copy2(deployed / name, tmp_path / name)
    (tmp_path / "inventory.yaml").write_text(text)
    result = run("train", "--nodes", "2", str(deployed / "train.yaml"), cwd=tmp_path)
    assert result.returncode == 4
    assert "there is no environment at /home/trainer/nothing/current" in " ".join(result.stderr.split())
    assert "clusterctl deploy" in result.stderr
