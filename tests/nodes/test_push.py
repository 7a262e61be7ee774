"""``clusterctl push`` on real nodes: everything arrives as it is here, and nothing is sent twice."""

import json
import os
import select
import signal
import subprocess
from itertools import count
from pathlib import Path

import pytest
from command import CLUSTERCTL, run
from tiny_env import as_trainer, inventory, on

from provision import sandbox as sandboxes

pytestmark = pytest.mark.root

_numbers = count(1)
LARGE = 150_000_001  # bytes: three ranges, the last one odd


@pytest.fixture(scope="module")
def box(tmp_path_factory, require_sandbox):
    with sandboxes.up(nodes=3, name=f"push-{os.getpid()}", directory=tmp_path_factory.mktemp("push")) as box:
        yield box


@pytest.fixture
def folder(box, tmp_path):
    return inventory(box, tmp_path / "i")


@pytest.fixture
def data(tmp_path):
    """A small data set with everything that is awkward, and one file of several ranges."""
    top = tmp_path / "set"
    (top / "sub dir/empty").mkdir(parents=True)
    (top / "private").mkdir()
    (top / "private").chmod(0o700)
    for name in ("a b", "it's", "$(touch owned)", "-n", "täst", "back\\slash"):
        (top / "sub dir" / name).write_text(name)
    (top / "sub dir/run.sh").write_text("#!/bin/sh\n")
    (top / "sub dir/run.sh").chmod(0o750)
    (top / "link").symlink_to("sub dir/a b")
    (top / "dangling").symlink_to("/nowhere")
    with (top / "model.safetensors").open("wb") as file:
        file.write(os.urandom(1 << 20) * (LARGE >> 20))
        file.truncate(LARGE)
    return top


def there(box, node, path):
    """What lies on a node: type, mode, size, whole seconds, target and path of everything."""
    listed = on(box, node, "sh", "-c", f"cd '{path}' && find . -mindepth 1 -printf '%y %m %s %Ts %l %P\\n'")
    return sorted(line for line in listed.splitlines() if not line.startswith("d") or line.split(" ")[1])


def here(path):
    argv = ["find", ".", "-mindepth", "1", "-printf", "%y %m %s %Ts %l %P\\n"]
    return sorted(subprocess.run(argv, cwd=path, capture_output=True, text=True, check=True).stdout.splitlines())


def without_folder_times(lines):
    """Folders have no time that counts, links no mode."""
    kept = []
    for line in lines:
        fields = line.split(" ")
        if fields[0] == "d":
            fields[2] = fields[3] = ""
        if fields[0] == "l":
            fields[3] = ""
        kept.append(" ".join(fields))
    return kept


def push(folder, *argv):
    result = run("push", "--json", *argv, cwd=folder)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def target():
    return f"/data/p{next(_numbers)}"


def test_a_folder_arrives_as_it_is_and_the_second_time_nothing_is_sent(box, folder, data):
    path = target()
    first = push(folder, data, path)
    assert set(first["nodes"].values()) == {"pushed"}
    assert LARGE < first["bytes_sent"] < 1.3 * LARGE  # three nodes, one copy through this machine's cable
    wanted = without_folder_times(here(data))
    for node in ("node01", "node02", "node03"):
        assert without_folder_times(there(box, node, path)) == wanted
        assert ".clusterctl" not in on(box, node, "ls", "-A", "/data")
    digest = subprocess.run(["sha256sum", data / "model.safetensors"], capture_output=True, text=True, check=True)
    for node in ("node01", "node03"):
        assert on(box, node, "sha256sum", f"{path}/model.safetensors").split()[0] == digest.stdout.split()[0]
    again = push(folder, data, path)
    assert (again["changed"], again["bytes_sent"]) == (False, 0)
    assert box.enter("node01", ["find", "/", "-xdev", "-name", "owned"]).stdout == ""


def test_only_what_changed_is_sent_and_what_is_not_here_stays(box, folder, data):
    path = target()
    push(folder, data, path)
    on(box, "node01", "touch", f"{path}/results.csv")
    (data / "sub dir/a b").write_text("changed")
    (data / "sub dir/run.sh").chmod(0o700)
    (data / "new").write_text("new")
    result = push(folder, data, path)
    assert 0 < result["bytes_sent"] < 40_000
    assert on(box, "node02", "cat", f"{path}/sub dir/a b") == "changed"
    assert on(box, "node02", "stat", "-c", "%a", f"{path}/sub dir/run.sh").strip() == "700"
    assert on(box, "node02", "cat", f"{path}/new") == "new"
    assert on(box, "node01", "ls", f"{path}/results.csv")
    assert push(folder, data, path)["changed"] is False


def test_one_file_gets_the_name_that_is_given(box, folder, data):
    path = target()
    push(folder, data / "sub dir/a b", f"{path}/deep/name.txt")
    assert on(box, "node03", "cat", f"{path}/deep/name.txt") == "a b"
    assert push(folder, data / "sub dir/a b", f"{path}/deep/name.txt")["changed"] is False
    push(folder, data / "model.safetensors", f"{path}/deep/model")
    assert on(box, "node03", "stat", "-c", "%s", f"{path}/deep/model").strip() == str(LARGE)


def test_a_dry_run_writes_nothing(box, folder, data):
    path = target()
    result = run("push", "--dry-run", data, path, cwd=folder)
    assert "node[01-03]: would send" in result.stdout
    assert box.enter("node01", ["ls", path]).returncode != 0


def test_a_node_that_lacks_something_gets_only_that(box, folder, data):
    path = target()
    push(folder, data, path)
    on(box, "node02", "rm", f"{path}/sub dir/it's")
    result = push(folder, data, path)
    assert result["nodes"] == {"node01": "unchanged", "node02": "pushed", "node03": "unchanged"}
    assert result["bytes_sent"] < 20_000


def test_everything_works_without_root_on_the_nodes(box, tmp_path, data):
    folder = inventory(box, tmp_path / "trainer", prefix="/home/trainer/llm/current", change=as_trainer)
    path = f"/home/trainer/data{next(_numbers)}"
    push(folder, data, path)
    assert on(box, "node02", "stat", "-c", "%U", f"{path}/model.safetensors").strip() == "trainer"
    assert push(folder, data, path)["changed"] is False
    refused = run("push", data, "/data/not-mine", cwd=folder)
    assert refused.returncode == 4
    assert "trainer may not write in /" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["missing", "/data/x"], 2, "no such file or directory"),
        (["{data}", "relative/path"], 2, "no absolute path"),
        (["{data}", "/"], 2, "no absolute path"),
        (["{data}", "/opt/llm/releases/x"], 2, "where clusterctl keeps releases"),
        (["{data}", "/opt/llm/current"], 2, "where clusterctl keeps releases"),
        (["{data}", "/etc/hostname/x"], 4, "/etc/hostname is no folder"),
    ],
)
def test_a_wrong_source_or_place_is_refused(folder, data, argv, code, message):
    result = run("push", *(word.format(data=data) for word in argv), cwd=folder)
    assert result.returncode == code
    assert message in " ".join(result.stderr.split()).lower()


def test_a_push_that_broke_off_goes_on_where_it_stopped(make_sandbox, tmp_path):
    box = make_sandbox(nodes=1, link="100mbit")
    data = tmp_path / "big.bin"
    data.write_bytes(os.urandom(80 << 20))  # seven seconds on this link; two ranges
    argv = [CLUSTERCTL, "push", data, "/data/big.bin"]
    child = subprocess.Popen(argv, cwd=box.directory, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    root = Path(box.node_root("node01"), "data")
    while not any(root.glob(".clusterctl-push-*/transfer/have")) or not any(
        path.read_text() for path in root.glob(".clusterctl-push-*/transfer/have")
    ):
        assert child.poll() is None, child.communicate()[1]
        select.select([], [], [], 0.02)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert not (root / "big.bin").exists()
    result = push(box.directory, data, "/data/big.bin")
    assert result["bytes_sent"] < 20 << 20  # the first range, of 64 MiB, was there
    assert (root / "big.bin").read_bytes() == data.read_bytes()
    assert [path.name for path in root.iterdir()] == ["big.bin"]


def test_a_file_that_changes_while_it_is_sent_is_an_error_and_nothing_takes_its_place(make_sandbox, tmp_path):
    box = make_sandbox(nodes=1, link="100mbit")
    data = tmp_path / "big.bin"
    data.write_bytes(os.urandom(40 << 20))
    argv = [CLUSTERCTL, "push", data, "/data/big.bin"]
    child = subprocess.Popen(argv, cwd=box.directory, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    root = Path(box.node_root("node01"), "data")
    while not any(root.glob(".clusterctl-push-*/transfer/*/*")):
        assert child.poll() is None, child.communicate()[1]
        select.select([], [], [], 0.02)
    with data.open("ab") as file:
        file.write(b"more")
    said = child.communicate(timeout=60)[1]
    assert child.returncode == 3
    assert "changed while" in " ".join(said.split())
    assert not (root / "big.bin").exists()
