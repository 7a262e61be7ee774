"""Bytes to many nodes, over real ssh: each copy whole, the controller's uplink used once, and around what fails."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from relaying import ROOT, Nodes, Payload, new_name, share_folder

from provision import inventory as inventory_file
from provision import sandbox as sandboxes
from provision.errors import BundleError, InterruptedByUser
from provision.model import Progress
from provision.ssh.remote import Connections
from provision.transfer import clean, keys

MB = 1 << 20
PAYLOAD = Payload(6, part=MB)  # two tar parts and three of a file
SMALL = Payload(1)
UNIT = MB // 4


@pytest.fixture(scope="module")
def cluster(require_sandbox, tmp_path_factory):
    """Five nodes, two of them with zstd."""
    with sandboxes.up(sandboxes.Options(nodes=5, name=new_name(), directory=tmp_path_factory.mktemp("relay"))) as box:
        inventory = inventory_file.load(box.inventory)
        with Connections(inventory) as connections:
            yield box, inventory, connections


@pytest.fixture
def nodes(cluster):
    found = Nodes(*cluster)
    yield found
    assert found.traces() == {}


def bring_zstd(box, *names):
    """This machine's zstd, with the libraries that a minimal root lacks."""
    for name in names:
        root = box.node_root(name)
        shutil.copy2("/usr/bin/zstd", root / "usr/bin/zstd")
        for library in Path("/usr/lib/x86_64-linux-gnu").glob("lib[lz]*"):
            if library.name.startswith(("liblz4", "liblzma", "libzstd", "libz.")) and library.is_file():
                target = root / "usr/lib/x86_64-linux-gnu" / library.name
                if not target.exists():
                    shutil.copy2(library.resolve(), target)
        assert box.enter(name, ["zstd", "--version"]).returncode == 0


def test_five_nodes_get_identical_trees_by_one_stream(nodes):
    reported = []
    done = nodes.send(PAYLOAD, emit=reported.append)
    assert set(done.errors.values()) == {None}
    assert nodes.identical(PAYLOAD)
    assert PAYLOAD.size() <= done.sent <= 1.1 * PAYLOAD.size()
    assert {event.total for event in reported} == {5 * PAYLOAD.size()}
    assert [event.done for event in reported] == sorted(event.done for event in reported)
    assert reported[-1].done == reported[-1].total
    assert nodes.send(PAYLOAD).sent == 0


def test_each_node_gets_the_files_it_lacks(nodes):
    first, second, *_ = nodes.inventory.nodes
    nodes.run(first, f'echo t0 >"{nodes.folder}/have"')
    nodes.run(second, f'printf "t1\\nr0" >"{nodes.folder}/have"')
    others = nodes.names[2:]
    done = nodes.send(PAYLOAD, unit=UNIT)
    assert set(done.errors.values()) == {None}
    assert nodes.identical(PAYLOAD, *others)
    assert {path.split("/")[0] for path in nodes.differing(PAYLOAD, first.name)[first.name]} == {"dir 0"}
    assert "dir 1" in {path.split("/")[0] for path in nodes.differing(PAYLOAD, second.name)[second.name]}
    assert done.sent <= 1.1 * PAYLOAD.size()


def test_node_that_reports_a_group_has_all_its_parts(nodes):
    first, *others = nodes.inventory.nodes
    nodes.run(first, f'echo all >"{nodes.folder}/have"')
    assert set(nodes.send(PAYLOAD).errors.values()) == {None}
    assert nodes.identical(PAYLOAD, *(node.name for node in others))
    assert not list((nodes.box.node_root(first.name) / nodes.into[1:]).iterdir())


def test_two_nodes_get_identical_trees_by_one_stream(nodes):
    done = nodes.send(PAYLOAD, nodes.targets("node02", "node04"))
    assert nodes.identical(PAYLOAD, "node02", "node04")
    assert PAYLOAD.size() <= done.sent <= 1.1 * PAYLOAD.size()


def test_without_a_relay_every_node_is_served_directly(nodes):
    done = nodes.send(PAYLOAD, relay=False)
    assert nodes.identical(PAYLOAD)
    assert 5 * PAYLOAD.size() <= done.sent <= 5.1 * PAYLOAD.size()


def test_small_transfer_is_sent_directly(nodes):
    done = nodes.send(PAYLOAD, relay_from=6 * PAYLOAD.size())
    assert nodes.identical(PAYLOAD)
    assert done.sent >= 5 * PAYLOAD.size()


def test_node_with_an_unquotable_folder_is_reached_directly(cluster):
    nodes = Nodes(*cluster, root=ROOT)
    done = nodes.send(PAYLOAD, nodes.targets("node01", "node02", "node03"))
    assert nodes.identical(PAYLOAD, "node01", "node02", "node03")
    assert done.sent >= 3 * PAYLOAD.size()
    assert nodes.traces() == {}


def test_each_wire_format_has_a_separate_relay(nodes):
    with_zstd = ("node02", "node03", "node05")
    bring_zstd(nodes.box, *with_zstd)
    targets = [replace(each, wire="zstd" if each.node.name in with_zstd else "plain") for each in nodes.targets()]
    done = nodes.send(PAYLOAD, targets)
    assert set(done.errors.values()) == {None}
    assert nodes.identical(PAYLOAD)
    assert done.sent <= 1.1 * (PAYLOAD.size("zstd") + 2 * PAYLOAD.size())


def test_node_without_ssh_client_is_last_in_the_chain(nodes):
    name = "node02"
    ssh = nodes.box.node_root(name) / "usr/bin/ssh"
    aside = ssh.rename(ssh.with_name("ssh.aside"))
    try:
        targets = [replace(each, has_ssh=each.node.name != name) for each in nodes.targets()]
        done = nodes.send(PAYLOAD, targets)
    finally:
        aside.rename(ssh)
    assert nodes.identical(PAYLOAD)
    assert done.sent <= 1.1 * PAYLOAD.size()


def test_second_node_without_ssh_client_is_served_directly(nodes):
    targets = [replace(each, has_ssh=each.node.name not in {"node02", "node03"}) for each in nodes.targets()]
    done = nodes.send(PAYLOAD, targets)
    assert nodes.identical(PAYLOAD)
    assert 2 * PAYLOAD.size() <= done.sent <= 2.1 * PAYLOAD.size()


def test_an_ordinary_user_s_nodes(cluster):
    box, inventory, _ = cluster
    inventory = replace(inventory, ssh=replace(inventory.ssh, user="trainer"))
    with Connections(inventory) as connections:
        nodes = Nodes(box, inventory, connections, root="/home/trainer/a b")
        done = nodes.send(PAYLOAD)
        assert nodes.identical(PAYLOAD)
    assert done.sent <= 1.1 * PAYLOAD.size()
    assert nodes.traces() == {}


# --- authorized_keys ---------------------------------------------------------------------------------


def test_a_shared_home_is_left_unchanged(cluster, tmp_path):
    box, _, _ = cluster
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    before = (box.node_root("node01") / "root/.ssh/authorized_keys").read_bytes().rstrip(b"\n")
    before += b"\n# by hand, and no line end"
    (folder / "linked").write_bytes(before)
    (folder / "linked").chmod(0o640)
    (folder / "authorized_keys").symlink_to("linked")
    share_folder(box, folder, box_names := [node.name for node in box.nodes], "/root/.ssh")
    try:
        nodes = Nodes(*cluster)
        done = nodes.send(PAYLOAD)
        assert nodes.identical(PAYLOAD)
        assert done.sent <= 1.1 * PAYLOAD.size()
        assert nodes.traces() == {}
    finally:
        for name in box_names:
            box.enter(name, ["umount", "/root/.ssh"])
    assert (folder / "linked").read_bytes() == before + b"\n"
    assert (folder / "linked").stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in folder.iterdir()) == ["authorized_keys", "linked"]
    assert (folder / "authorized_keys").is_symlink()


def test_the_next_run_removes_leftovers_of_a_killed_one(nodes):
    _leave_traces(nodes)
    assert set(nodes.left()) == {"node02"}
    nodes.send(SMALL, nodes.targets("node01", "node02"))  # directly
    assert nodes.traces() == {}
    _leave_traces(nodes)
    nodes.send(SMALL, nodes.targets("node02", "node03", "node04"))
    assert nodes.traces() == {}
    _leave_traces(nodes)
    assert _clean(nodes, "/opt/elsewhere") == dict.fromkeys(nodes.names)
    assert set(nodes.left()) == {"node02"}
    assert _clean(nodes, nodes.root) == dict.fromkeys(nodes.names)
    assert nodes.traces() == {}


def _clean(nodes, place):
    return clean(nodes.inventory, nodes.inventory.nodes, nodes.connections, place)


def _leave_traces(nodes):
    comment = keys.comment_prefix(nodes.inventory, nodes.root) + str(int(time.time()))
    root = nodes.box.node_root("node02")
    with (root / "root/.ssh/authorized_keys").open("a") as file:
        file.write(f'restrict,command="x" ssh-ed25519 AAAA {comment}:old\n')
    (root / "dev/shm" / f"{keys.secret_prefix(nodes.inventory, nodes.root)}old").mkdir()


def test_without_a_memory_file_system_the_private_key_of_a_killed_run_is_found_in_its_folder(nodes):
    names = ("node01", "node02", "node03")
    for name in names:
        nodes.box.enter(name, ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", "/dev/shm"])
    try:
        secret = (
            nodes.box.node_root("node02") / nodes.folder[1:] / f"{keys.secret_prefix(nodes.inventory, nodes.root)}old"
        )
        secret.mkdir()
        (secret / "key").write_text("private")
        done = nodes.send(PAYLOAD, nodes.targets(*names))
        assert nodes.identical(PAYLOAD, *names)
        assert done.sent <= 1.1 * PAYLOAD.size()
        for name in names:
            folder = nodes.box.node_root(name) / nodes.folder[1:]
            assert [path.name for path in folder.iterdir() if "clusterctl-relay" in path.name] == []
        secret.mkdir()
        assert _clean(nodes, nodes.root) == dict.fromkeys(nodes.names)
        assert not secret.exists()
    finally:
        for name in names:
            nodes.box.enter(name, ["umount", "/dev/shm"])


# --- what goes wrong at the source ---------------------------------------------------------------------


def test_a_damaged_source_aborts_every_stream(nodes):
    def damaged():
        yield from PAYLOAD.parts["plain"][1].blocks()
        raise BundleError("chunk 1 is damaged")

    parts = list(PAYLOAD.parts["plain"])
    parts[1] = replace(parts[1], blocks=damaged)
    payload = Payload(6, part=MB)
    payload.parts = {"plain": tuple(parts)}
    with pytest.raises(BundleError, match="chunk 1"):
        nodes.send(payload, unit=UNIT)
    for name in nodes.names:
        have = (nodes.box.node_root(name) / nodes.folder[1:] / "have").read_text().split()
        assert "t1" not in have
    assert set(nodes.send(PAYLOAD).errors.values()) == {None}
    assert nodes.identical(PAYLOAD)


def test_an_interruption_aborts_every_stream(nodes):
    def interrupt(event):
        if isinstance(event, Progress) and event.done > event.total // 4:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedByUser):
        nodes.send(PAYLOAD, unit=UNIT, emit=interrupt)
    assert nodes.traces() == {}
    assert set(nodes.send(PAYLOAD).errors.values()) == {None}
    assert nodes.identical(PAYLOAD)
