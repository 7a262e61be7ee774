"""Releases on real nodes: shared files, rollback, prune, verify, repair, and one command at a time."""

import json
import os
import select
import shlex
from itertools import count
from pathlib import Path

import pytest
from command import run
from forked import Command
from relaying import share_folder
from tiny_env import as_trainer, inventory, make_env, on, pack
from training import wait_until

from provision import sandbox as sandboxes
from tests.unit.pasting import commands_in

pytestmark = pytest.mark.root

_numbers = count(1)


@pytest.fixture(scope="module")
def box(tmp_path_factory, require_sandbox):
    with sandboxes.up(
        sandboxes.Options(nodes=2, name=f"releases-{os.getpid()}", directory=tmp_path_factory.mktemp("releases"))
    ) as box:
        yield box


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Three bundles of one environment, each with another version of one package, and 2 MB that all of them share."""
    folder = tmp_path_factory.mktemp("bundles")
    noise = os.urandom(2 << 20)
    made = []
    for text in ("one", "two", "three"):
        env = make_env(folder / text / "tiny", text)
        (env / "share/noise").write_bytes(noise)
        made.append(pack(env, folder / f"{text}.ccb"))
    return made


@pytest.fixture
def place(box, tmp_path):
    """A folder with an inventory whose prefix no other test uses, and that prefix's root."""
    root = f"/opt/r{next(_numbers)}"
    return inventory(box, tmp_path / "i", prefix=f"{root}/current"), root


def deploy(folder, bundle, *more):
    result = run("deploy", "--json", *more, bundle, cwd=folder)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def current(box, root, node="node01"):
    return on(box, node, "readlink", f"{root}/current").strip().removeprefix("releases/")


def test_second_release_links_shared_files_and_only_the_rest_is_sent(box, bundles, place):
    folder, root = place
    first = deploy(folder, bundles[0])
    second = deploy(folder, bundles[1])
    assert first["bytes_sent"] > 2 * (2 << 20)
    assert second["bytes_sent"] < 60_000
    names = [f"{root}/releases/{each['release']}/share/noise" for each in (first, second)]
    inodes = on(box, "node02", "stat", "-c", "%i %h", *names).splitlines()
    assert inodes[0] == inodes[1]
    tool = f"{root}/releases/{second['release']}/lib/python3.11/site-packages/tool/__init__.py"
    assert "two" in on(box, "node02", "cat", tool)
    assert run("verify", "-q", cwd=folder).returncode == 0


def test_files_are_copied_if_linking_is_refused(box, bundles, tmp_path):
    root = "/home/trainer/copied"
    folder = inventory(box, tmp_path / "i", prefix=f"{root}/current", change=as_trainer)
    first = deploy(folder, bundles[0])["release"]
    for node in ("node01", "node02"):  # the kernel refuses to link files of another user (fs.protected_hardlinks)
        on(box, node, "chown", "-R", "root:root", f"{root}/releases/{first}")
    second = deploy(folder, bundles[1])
    assert second["bytes_sent"] < 60_000
    names = [f"{root}/releases/{release}/share/noise" for release in (first, second["release"])]
    inodes = on(box, "node01", "stat", "-c", "%i", *names).split()
    assert inodes[0] != inodes[1]
    assert (
        on(box, "node01", "stat", "-c", "%Y %a", *names).splitlines()[0]
        == on(box, "node01", "stat", "-c", "%Y %a", names[1]).strip()
    )
    assert run("verify", "-q", cwd=folder).returncode == 0


def test_rollback_switches_to_the_previous_release_and_back(box, bundles, place):
    folder, root = place
    first, second = (deploy(folder, bundle)["release"] for bundle in bundles[:2])
    back = run("rollback", cwd=folder)
    assert back.returncode == 0, back.stderr
    assert f"node[01-02]: release {first} is current, {second} was" in back.stdout
    assert current(box, root) == current(box, root, "node02") == first
    forth = json.loads(run("rollback", "--json", cwd=folder).stdout)
    assert forth["nodes"]["node02"] == {"before": first, "current": second}
    named = run("rollback", "--to", first[:6], cwd=folder)
    assert named.returncode == 0, named.stderr
    assert current(box, root) == first
    assert "nothing changed" in run("rollback", "--to", first, cwd=folder).stdout


def test_rollback_without_another_release_is_refused_before_anything_is_changed(box, bundles, place):
    folder, root = place
    release = deploy(folder, bundles[0])["release"]
    result = run("rollback", cwd=folder)
    assert result.returncode == 4
    assert "no earlier release" in result.stderr
    unknown = run("rollback", "--to", "0123", cwd=folder)
    assert unknown.returncode == 4
    for hint in commands_in(unknown.stderr):
        pasted = run(*shlex.split(hint)[1:], cwd=folder)
        assert (hint, pasted.returncode) == ("clusterctl releases", 0)
        assert release in pasted.stdout
    assert current(box, root) == release


def test_prune_keeps_selected_releases_and_never_removes_one_in_use_by_a_process(box, bundles, place, ssh):
    folder, root = place
    first, second, third = (deploy(folder, bundle)["release"] for bundle in bundles)
    held = f"{root}/releases/{first}"
    pid = ssh(box, "node01", f"cd {held} && {{ sleep 300 >/dev/null 2>&1 & echo $!; }}").stdout.decode().strip()
    try:
        message = run("prune", "--dry-run", cwd=folder)
        assert f"node02: would remove {first}" in message.stdout
        result = json.loads(run("prune", "--keep", "1", "--json", cwd=folder).stdout)
    finally:
        ssh(box, "node01", f"kill {pid}")
    assert result["nodes"]["node01"] == {"removed": [second], "in_use": [first]}
    assert sorted(result["nodes"]["node02"]["removed"]) == sorted([first, second])
    assert sorted(on(box, "node01", "ls", f"{root}/releases").split()) == sorted(
        name for release in (first, third) for name in (release, f"{release}.ok")
    )
    assert on(box, "node02", "ls", f"{root}/releases").split() == sorted([third, f"{third}.ok"])
    assert run("verify", "-q", cwd=folder).returncode == 0


DAMAGE = """
cd {release}
echo x >>share/noise
printf x | dd of=bin/tool bs=1 seek=9 conv=notrunc
touch -d @0 bin/tool
rm 'share/odd names/-rf'
mkdir lib/new
echo x >lib/new/mod.py
ln -sfn /bin/sh bin/python3
"""


def test_verify_finds_changed_files_and_repair_restores_them(box, bundles, place):
    folder, root = place
    release = f"{root}/releases/{deploy(folder, bundles[0])['release']}"
    assert run("verify", cwd=folder).returncode == 0
    on(box, "node02", "sh", "-ec", DAMAGE.format(release=release))
    result = run("verify", cwd=folder)
    assert result.returncode == 5
    message = " ".join(result.stderr.split())
    assert any(f"2 changed ({names})" in message for names in ("bin/tool, share/noise", "share/noise, bin/tool"))
    assert "1 missing (share/odd names/-rf)" in message
    assert "1 added (lib/new/mod.py)" in message
    assert "1 links changed (bin/python3)" in message
    assert "clusterctl deploy --repair" in result.stderr
    assert "node01: " in result.stdout
    data = json.loads(run("verify", "--json", cwd=folder).stdout)
    assert data["error"]["exit_code"] == 5
    assert {each["node"]: each["verdict"] for each in data["findings"]}["node02"] == "FAIL"
    repaired = deploy(folder, bundles[0], "--repair")
    assert repaired["nodes"] == {"node01": "repaired", "node02": "repaired"}
    after = run("verify", cwd=folder)
    assert after.returncode == 0, after.stderr
    assert ".removing" not in on(box, "node02", "ls", "-A", f"{root}/releases")


def test_a_changed_file_is_never_linked_into_a_new_release(box, bundles, place):
    folder, root = place
    first = deploy(folder, bundles[0])["release"]
    on(box, "node01", "sh", "-c", f"echo x >>{root}/releases/{first}/share/noise")
    result = run("deploy", "--json", bundles[1], cwd=folder)
    assert f"node01: release {first} was changed after its deploy" in " ".join(result.stderr.split())
    second = json.loads(result.stdout)
    assert 2 << 20 < second["bytes_sent"] < 3 << 20  # node01 got the file again, node02 linked it
    assert run("verify", "-q", cwd=folder).returncode == 0


def wait_for(condition, child):
    while not condition():
        assert child.poll() is None, child.stderr
        select.select([], [], [], 0.02)


def test_concurrent_deploys_exclude_each_other_and_a_dead_one_holds_no_lock(make_sandbox, tmp_path):
    box = make_sandbox(nodes=2, link="5mbit")
    env = make_env(tmp_path / "tiny")
    (env / "share/more").write_bytes(os.urandom(3 << 20))  # five seconds on this link
    bundle = pack(env, box.directory / "slow.ccb")
    one = Command("deploy", bundle, cwd=box.directory)
    owner = Path(box.node_root("node02"), "opt/llm/releases/.lock/owner")
    wait_for(owner.exists, one)
    other = run("deploy", bundle, cwd=box.directory)
    assert other.returncode == 4
    text = " ".join(other.stderr.split())
    assert "locked by another command; nothing was changed" in text
    assert f"process {one.pid}" in text
    one.kill()
    again = run("deploy", bundle, cwd=box.directory)
    assert again.returncode == 0, again.stderr
    wait_until(lambda: not owner.exists(), "the lock goes", 60)


def test_lock_of_a_switched_off_node_is_taken_over(box, bundles, place):
    folder, root = place
    left = f"mkdir -p {root}/releases/.lock && touch {root}/releases/.clusterctl && cd {root}/releases/.lock && : >beat"
    host = '"$(uname -n) $(cat /proc/sys/kernel/random/boot_id)"'
    on(box, "node01", "sh", "-c", f"{left} && printf '%s\\n' old {host} 999999 1 1 somebody >owner")
    on(box, "node02", "sh", "-c", f"{left} && touch -d '-1 hour' beat && printf '%s\\n' old 'else x' 7 1 1 me >owner")
    deployed = deploy(folder, bundles[0])
    assert deployed["changed"]
    on(box, "node02", "sh", "-c", f"{left}")  # killed between making the folder and writing its name
    other = "1" if deployed["release"].startswith("0") else "0"  # no release starts with it
    assert run("rollback", "--to", other, cwd=folder).returncode == 4
    lock = Path(box.node_root("node02"), root[1:], "releases/.lock")
    wait_until(lambda: not lock.exists(), "the lock goes with the connection of its command", 60)


def test_a_noexec_mount_is_found_before_anything_is_sent(box, bundles, tmp_path):
    on(box, "node02", "sh", "-c", "mkdir -p /noexec && mount -t tmpfs -o noexec tmpfs /noexec")
    folder = inventory(box, tmp_path / "i", prefix="/noexec/llm/current")
    result = run("deploy", bundles[0], cwd=folder)
    assert result.returncode == 4
    assert "mounted noexec" in " ".join(result.stderr.split())
    assert not Path(box.node_root("node01"), "noexec/llm").exists()


def test_releases_lists_the_releases_on_the_nodes(box, bundles, place):
    folder, root = place
    first, second = (deploy(folder, bundle)["release"] for bundle in bundles[:2])
    on(box, "node01", "mkdir", f"{root}/releases/0badc0ffee00")
    text = run("releases", cwd=folder).stdout
    assert "node01:" in text
    assert "incomplete" in text
    data = json.loads(run("releases", "--json", cwd=folder).stdout)["nodes"]
    assert data["node02"] == {"current": second, "previous": first, "complete": [first, second], "broken": []}
    assert data["node01"]["broken"] == ["0badc0ffee00"]


def test_nodes_that_share_the_root_get_one_release_together(box, bundles, tmp_path):
    shared = tmp_path / "export"
    shared.mkdir()
    for node in ("node01", "node02"):
        on(box, node, "mkdir", "-p", "/shared")
    share_folder(box, shared, ("node01", "node02"), "/shared")
    folder = inventory(box, tmp_path / "i", prefix="/shared/llm/current")
    result = deploy(folder, bundles[0])
    assert sorted(state.split(" ")[0] for state in result["nodes"].values()) == ["deployed", "shared"]
    assert 2 << 20 < result["bytes_sent"] < 3 << 20  # once
    for node in ("node01", "node02"):
        assert on(box, node, "env", "-i", "/shared/llm/current/bin/where").endswith("/share\n")
    assert deploy(folder, bundles[0])["changed"] is False
    second = deploy(folder, bundles[1])["release"]
    assert json.loads(run("rollback", "--json", cwd=folder).stdout)["changed"]
    prune = ("prune", "--keep", "1", "--json")
    for argv in ((*prune, "--dry-run"), prune):  # the dry run takes no lock, and still sees who shares the folder
        kept = json.loads(run(*argv, cwd=folder).stdout)["nodes"]
        assert [node["removed"] for node in kept.values()] == [[second]]
    assert run("verify", "-q", cwd=folder).returncode == 0
    assert ".lock" not in [path.name for path in (shared / "llm/releases").iterdir()]


def test_a_key_that_the_relay_of_a_killed_run_left_is_removed_by_the_next_run(box, bundles, place):
    from provision.inventory import load
    from provision.transfer import keys

    folder, _ = place
    deploy(folder, bundles[0])
    line = f"restrict ssh-ed25519 AAAA {keys.comment_prefix(load(folder / 'inventory.yaml'))}1700000000:abc"
    on(box, "node01", "sh", "-c", f"echo '{line}' >>/root/.ssh/authorized_keys")
    assert deploy(folder, bundles[0])["changed"] is False
    left = on(box, "node01", "cat", "/root/.ssh/authorized_keys")
    assert "clusterctl-relay" not in left
    assert left.count("ssh-ed25519") == 1  # the administrator's own key stays


def snapshot(box):
    """Every file of every node that outlives a command, with what a write to it changes."""
    found = {}
    for node in box.nodes:
        top = Path(box.node_root(node.name))
        for folder, names, files in os.walk(top):
            if Path(folder) == top:
                names[:] = [name for name in names if name not in {"proc", "sys", "dev", "run", "tmp"}]
            for name in (*names, *files):
                status = os.lstat(f"{folder}/{name}")
                changed = 0 if name in {"log", "wtmp", "lastlog"} else status.st_mtime_ns
                found[f"{folder}/{name}"] = (status.st_ino, status.st_mode, status.st_uid, status.st_size, changed)
    return found


def test_no_dry_run_writes_anything_on_a_node(box, bundles, place, tmp_path):
    """A lock is a folder on the node, so prune takes none; nothing but /tmp and /run may change."""
    folder, root = place
    first, _ = (deploy(folder, bundle)["release"] for bundle in bundles[:2])
    text = (folder / "inventory.yaml").read_text()
    (folder / "inventory.yaml").write_text(f"{text}\nservices: {{hosts: {{}}, limits: {{}}}}\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/x").write_text("x")
    before = snapshot(box)
    would = run("prune", "--keep", "1", "--dry-run", cwd=folder)
    assert f"node[01-02]: would remove {first}" in would.stdout, would.stdout + would.stderr
    for argv in (
        ("deploy", "--dry-run", bundles[2]),
        ("deploy", "--dry-run", "--repair", bundles[1]),
        ("push", "--dry-run", tmp_path / "data", f"{root}-data/x"),
        ("services", "apply", "--dry-run"),
        ("services", "undo", "--dry-run"),
        ("services", "status"),
    ):
        done = run(*argv, cwd=folder)
        assert done.returncode == 0, (argv, done.stderr)
    after = snapshot(box)
    assert {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)} == set()
