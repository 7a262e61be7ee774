"""``clusterctl push`` on real nodes: everything arrives as it is here, and nothing is sent twice."""

import json
import os
import subprocess
from itertools import count
from pathlib import Path

import pytest
from command import run
from relaying import share_folder
from tiny_env import as_trainer, inventory, on

from provision import sandbox as sandboxes
from provision.data import plan_parts
from provision.inventory import load
from provision.model import StageStarted
from provision.session import Session
from provision.tasks.push import push as push_task
from provision.transfer import engine

pytestmark = pytest.mark.root

ODD = ("new\nline", "last\n", "vt\x0b", "nel\x85", "ls\u2028", "cr\r", "tab\t", " a ", "no \udcff utf")

_numbers = count(1)
RANGE = 4 << 20
LARGE = 2 * RANGE + 1_000_001  # bytes: three ranges, the last one odd
REAL = (64 << 20) + 1_000_001  # two of the length that ranges have for users
# The command with ranges of that length, and a relay that starts with fewer bytes.
SMALL = f"""
from provision.data import plan_parts
from provision.transfer import engine
plan_parts.__kwdefaults__["limit"] = {RANGE}
engine.Options.__init__.__kwdefaults__["relay_from"] = {RANGE}
"""


@pytest.fixture(scope="module")
def box(tmp_path_factory, require_sandbox):
    with sandboxes.up(
        sandboxes.Options(nodes=3, name=f"push-{os.getpid()}", directory=tmp_path_factory.mktemp("push"))
    ) as box:
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
        file.write(os.urandom(LARGE))
    return top


def there(box, node, path):
    """The files on a node: type, mode, size, whole seconds, target and path of each."""
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
    return sorted(kept)


def push(folder, *argv, first=SMALL):
    result = run("push", "--json", *argv, cwd=folder, first=first)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def target():
    return f"/data/p{next(_numbers)}"


def test_folder_arrives_unchanged_and_a_second_push_sends_nothing(box, folder, data):
    path = target()
    os.truncate(data / "model.safetensors", REAL)
    first = push(folder, data, path, first="")
    assert set(first["nodes"].values()) == {"pushed"}
    assert REAL < first["bytes_sent"] < 1.3 * REAL  # three nodes, one copy through this machine's cable
    wanted = without_folder_times(here(data))
    for node in ("node01", "node02", "node03"):
        assert without_folder_times(there(box, node, path)) == wanted
        assert ".clusterctl" not in on(box, node, "ls", "-A", "/data")
    digest = subprocess.run(["sha256sum", data / "model.safetensors"], capture_output=True, text=True, check=True)
    for node in ("node01", "node03"):
        assert on(box, node, "sha256sum", f"{path}/model.safetensors").split()[0] == digest.stdout.split()[0]
    again = push(folder, data, path, first="")
    assert (again["changed"], again["bytes_sent"]) == (False, 0)
    assert box.enter("node01", ["find", "/", "-xdev", "-name", "owned"]).stdout == ""


def test_only_changed_files_are_sent_and_extra_files_on_the_node_stay(box, folder, data):
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


def test_one_file_gets_the_given_name(box, folder, data):
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


def test_a_node_gets_only_its_missing_files(box, folder, data):
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
        (["{data}", "/opt/llm/current/share/x"], 2, "where clusterctl keeps releases"),
        (["{data}", "/etc/hostname/x"], 4, "/etc/hostname is not a folder"),
    ],
)
def test_wrong_source_or_destination_is_refused(folder, data, argv, code, message):
    result = run("push", *(word.format(data=data) for word in argv), cwd=folder)
    assert result.returncode == code
    assert message in " ".join(result.stderr.split()).lower()


def test_current_release_is_refused_as_a_destination_by_every_name(box, folder, data):
    on(box, "node02", "sh", "-c", "mkdir -p /opt/llm/releases/abc && ln -sfn releases/abc /opt/llm/current")
    on(box, "node02", "ln", "-sfn", "/opt/llm/current", "/data-env")
    result = run("push", data, "/data-env/share", cwd=folder)
    assert result.returncode == 4
    assert "where clusterctl keeps releases" in " ".join(result.stderr.split())
    assert on(box, "node02", "ls", "-A", "/opt/llm/releases/abc") == ""


@pytest.mark.parametrize("content", [None, "x"])
def test_a_folder_without_folders_arrives(box, folder, tmp_path, content):
    flat, path = tmp_path / "flat", target()
    flat.mkdir(mode=0o750)
    if content:
        (flat / "file").write_text(content)
    assert push(folder, flat, path)["changed"] is True
    assert on(box, "node03", "stat", "-c", "%a %F", path).strip() == "750 directory"
    assert without_folder_times(there(box, "node03", path)) == without_folder_times(here(flat))
    assert push(folder, flat, path)["changed"] is False


def test_files_with_any_name_are_sent_once(box, folder, tmp_path):
    top, path = tmp_path / "odd", target()
    (top / "sub").mkdir(parents=True)
    for name in ODD:
        (top / "sub" / name).write_text(name, errors="surrogateescape")
        (top / f"to {name}").symlink_to(name)
        (top / f"folder {name}").mkdir()
    push(folder, top, path)
    assert (push(folder, top, path)["changed"], push(folder, top, path)["bytes_sent"]) == (False, 0)
    for name in ODD:
        placed = Path(f"{box.node_root('node02')}{path}/sub", name).read_bytes()
        assert placed == name.encode(errors="surrogateescape")


def test_folder_replaces_a_link_and_nothing_is_written_to_the_links_target(box, folder, tmp_path):
    top, path = tmp_path / "set", target()
    top.mkdir()
    on(box, "node01", "sh", "-c", "mkdir -p /elsewhere && echo precious >/elsewhere/x")
    (top / "data").symlink_to("/elsewhere")
    push(folder, top, path)
    (top / "data").unlink()
    (top / "data").mkdir()
    (top / "data/x").write_text("new")
    push(folder, top, path)
    assert on(box, "node01", "cat", "/elsewhere/x") == "precious\n"
    assert on(box, "node01", "stat", "-c", "%F", f"{path}/data").strip() == "directory"
    assert on(box, "node02", "cat", f"{path}/data/x") == "new"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ("mkdir -p {path}/model.safetensors", "{path}/model.safetensors is a folder on the node and a file here"),
        ("mkdir -p {path} && echo x >'{path}/sub dir'", "{path}/sub dir is a file on the node and a folder here"),
        ("mkdir -p {path} && mkfifo {path}/link", "{path}/link is a device, pipe or socket on the node"),
        ("echo x >{path}", "{path} is not a folder on the node but a folder here"),
    ],
)
def test_wrong_file_type_is_found_before_anything_is_sent(box, folder, data, make, message):
    path = target()
    on(box, "node02", "sh", "-c", f"mkdir -p /data; {make.format(path=path)}")
    result = run("push", data, path, cwd=folder)
    assert result.returncode == 4
    assert message.format(path=path) in " ".join(result.stderr.split())
    assert ".clusterctl" not in on(box, "node02", "find", "/data", "-name", ".clusterctl*")
    assert box.enter("node01", ["ls", path]).returncode != 0


def test_a_separate_file_system_that_only_the_user_can_write_to(box, tmp_path):
    """A user who may write in a mount point may be unable to write beside it; the mount point's free space counts."""
    folder, path = inventory(box, tmp_path / "trainer", prefix="/home/trainer/llm/current", change=as_trainer), target()
    for name, size in (("node01", "60m"), ("node02", "60m"), ("node03", "120m")):
        on(box, name, "mkdir", "-p", path)
        on(box, name, "mount", "-t", "tmpfs", "-o", f"size={size},mode=755,uid=1000,gid=1000", "tmpfs", path)
    top = tmp_path / "set"
    (top / "sub").mkdir(parents=True)
    (top / "sub/first").write_bytes(bytes(20 << 20))
    push(folder, top, path)
    wanted = without_folder_times(here(top))
    for name in ("node01", "node03"):
        assert without_folder_times(there(box, name, path)) == wanted
    (top / "second").write_bytes(bytes(25 << 20))
    result = run("push", top, path, cwd=folder)
    assert result.returncode == 4
    assert "node[01-02]: 41.9 MB free, 52.4 MB needed; free some space" in " ".join(result.stderr.split())
    for name in ("node01", "node02", "node03"):
        assert without_folder_times(there(box, name, path)) == wanted
        on(box, name, "umount", path)


def test_read_only_folders_can_be_updated_without_root(box, tmp_path):
    folder = inventory(box, tmp_path / "trainer", prefix="/home/trainer/llm/current", change=as_trainer)
    top, path = tmp_path / "set", f"/home/trainer/closed{next(_numbers)}"
    (top / "closed/deep").mkdir(parents=True)
    for number in ("one", "two"):
        (top / "closed/deep/x").write_text(number)
        (top / f"closed/{number}").write_text(number)
        for name in ("closed/deep", "closed", "."):
            (top / name).chmod(0o555)
        push(folder, top, path)
        assert on(box, "node01", "cat", f"{path}/closed/deep/x") == number
        listed = on(box, "node01", "stat", "-c", "%a", path, f"{path}/closed", f"{path}/closed/deep")
        assert listed.split() == ["555"] * 3
        assert on(box, "node01", "ls", "-A", path) == "closed\n"
        assert push(folder, top, path)["changed"] is False
        (top / "closed").chmod(0o755)


def test_a_folder_of_another_user_is_found_before_anything_is_sent(box, tmp_path, data):
    folder = inventory(box, tmp_path / "trainer", prefix="/home/trainer/llm/current", change=as_trainer)
    path = f"/home/trainer/theirs{next(_numbers)}"
    on(box, "node03", "sh", "-c", f"mkdir -p '{path}/sub dir' && chown trainer {path}")
    result = run("push", data, path, cwd=folder)
    assert result.returncode == 4
    assert f"{path}/sub dir belongs to another user" in " ".join(result.stderr.split())
    assert on(box, "node03", "ls", "-A", path) == "sub dir\n"


def test_nodes_with_different_missing_files_get_them_in_one_transfer(box, folder, data, monkeypatch):
    monkeypatch.setitem(plan_parts.__kwdefaults__, "limit", RANGE)
    monkeypatch.setitem(engine.Options.__init__.__kwdefaults__, "relay_from", RANGE)
    path = target()
    push(folder, data, path)
    for node, name in (("node01", "sub dir/it's"), ("node02", "sub dir/a b"), ("node03", "link")):
        on(box, node, "rm", f"{path}/{name}")
    on(box, "node01", "rm", f"{path}/model.safetensors")
    on(box, "node03", "rm", f"{path}/model.safetensors")
    cluster, stages = load(folder / "inventory.yaml"), []
    with Session(
        cluster, emit=lambda event: stages.append(event.stage) if isinstance(event, StageStarted) else None
    ) as session:
        result = push_task(session, data, path)
    assert stages == ["compare", "send", "place"]
    assert LARGE < result.bytes_sent < 1.3 * LARGE  # once through this machine's cable, though two nodes need it
    wanted = without_folder_times(here(data))
    for node in ("node01", "node02", "node03"):
        assert without_folder_times(there(box, node, path)) == wanted
    assert push(folder, data, path)["changed"] is False


def test_shared_destination_is_written_by_one_node(box, folder, data, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    for name in ("node01", "node03"):
        on(box, name, "mkdir", "-p", "/nfs")
    share_folder(box, shared, ("node01", "node03"), "/nfs")
    result = push(folder, "--limit", "node01,node03", data, "/nfs/set")
    assert sorted(result["nodes"].values()) in (["pushed", "shared with node01"], ["pushed", "shared with node03"])
    assert result["bytes_sent"] < 1.3 * LARGE
    assert without_folder_times(there(box, "node03", "/nfs/set")) == without_folder_times(here(data))
    assert push(folder, "--limit", "node01,node03", data, "/nfs/set")["changed"] is False
    for name in ("node01", "node03"):
        on(box, name, "umount", "/nfs")
