"""Decisions of a push, without a node: parts, missing files, refusals, and the input of its scripts."""

import os
import random
from pathlib import Path, PurePosixPath

import pytest

from provision import data
from provision.data import (
    NodeFile,
    NodeTree,
    PushTarget,
    begin_input,
    compare_input,
    place_input,
    plan_parts,
    scan_tree,
)
from provision.errors import ClusterctlError, PreflightError, UsageError
from provision.model import Inventory, Node
from provision.session import Lock
from provision.tasks.push import Shipment, refuse_full

INVENTORY = Inventory(Path("i.yaml"), PurePosixPath("/opt/llm/current"), (Node("node01", ""),))
ODD = ("new\nline", "\nfirst", "vt\x0b", "nel\x85", "ls\u2028", "cr\r", "tab\t", "a b", "no \udcff utf", "-n")


@pytest.fixture
def source(tmp_path):
    top = tmp_path / "set"
    (top / "sub").mkdir(parents=True)
    for name in ("a", "b", "sub/c"):
        (top / name).write_text(name)
        os.utime(top / name, (1000, 1000))
    (top / "link").symlink_to("sub")
    (top / "sub").chmod(0o700)
    return top


def seen(tree, **changes):
    """The answer of a node with all files of a tree."""
    things = {one.path: NodeFile(one.type, one.mode, one.size, one.mtime, 0, one.target) for one in tree.found} | {
        "": NodeFile("dir", tree.mode, 0, 0, 0)
    }
    things |= {path.replace("__", "/"): thing for path, thing in changes.items()}
    return NodeTree({path: thing for path, thing in things.items() if thing})


def refusal(tree, there, destination):
    return data.find_changes(tree, there, destination).refused


FOLDER, FILE = NodeFile("dir", 0o755, 0, 0, 0), NodeFile("file", 0o644, 1, 1, 0)
LINK = NodeFile("link", 0o777, 1, 1, 0, "x")
DEVICE = NodeFile("other", 0o644, 0, 0, 0)


def test_staging_folder_in_the_source_is_not_sent(source):
    (source / "sub/.clusterctl-push-folder").mkdir()
    (source / "sub/.clusterctl-push-folder/x").write_text("")
    assert [one.path for one in scan_tree(source).found] == ["a", "b", "link", "sub", "sub/c"]


def test_existing_files_do_not_change_the_parts_of_the_others(tmp_path):
    for number in range(40):
        (tmp_path / f"{number:02}").write_bytes(bytes(100))
    tree = scan_tree(tmp_path)
    everything = frozenset(one.path for one in tree.found)
    before = plan_parts(tree, everything, limit=1000)
    assert [len(files) for files in before.small.values()] == [10, 10, 10, 10]
    after = plan_parts(tree, everything - {f"{number:02}" for number in range(13)}, limit=1000)
    assert list(after.small)[1:] == list(before.small)[2:]
    assert [part.key for part in after.parts[1:]] == [part.key for part in before.parts[2:]]
    assert next(iter(after.small.values())) == tuple(f"{number}" for number in range(13, 20))


def test_a_file_of_more_than_two_gibibytes(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.seek(2 << 30)
        file.write(b"a\0end")
    parts = plan_parts(scan_tree(tmp_path), frozenset({"large"})).parts
    assert [part.offset for part in parts] == [number << 26 for number in range(33)]
    assert b"".join(parts[-1].blocks()) == b"a\0end"


def test_parts_have_the_announced_size_and_separate_folders(source):
    (source / ("long " * 20)).write_text("x")
    (source / "large").write_text("xyz")
    tree = scan_tree(source)
    pushed = plan_parts(tree, data.differing(tree, NodeTree()), limit=1)
    for part in pushed.parts:
        assert sum(map(len, part.blocks())) == part.size
        if part.kind == "tar":
            assert f"small/{part.key}/".encode() in b"".join(part.blocks())


@pytest.mark.parametrize("name", ODD)
def test_an_answer_may_hold_any_name(name):
    answer = f"T user 0\nT tools ssh \nT at 81a4 3 17 0 {name}\nT at a1ff 1 1 0 l{name}\nT link l{name}\nT to {name}\n"
    there = data.read_answer(f"{answer}T at 41ed 1 1 0 .\nT closed .\nT end\n", "T")
    assert there.things == {
        name: NodeFile("file", 0o644, 3, 17, 0),
        f"l{name}": NodeFile("link", 0o777, 1, 1, 0, name),
        "": NodeFile("dir", 0o755, 1, 1, 0),
    }
    assert there.closed == {""}
    assert (there.tools, there.free_bytes, there.staged) == ({"ssh"}, None, None)


@pytest.mark.parametrize("answer", ["", "T user 0\n", "T user 0\nT tools \nT at 81a4 1 1 0 end\n"])
def test_truncated_answer_is_an_error(answer):
    with pytest.raises(ClusterctlError, match="incomplete"):
        data.read_answer(answer, "T")


def test_existing_files_are_not_sent(source):
    tree = scan_tree(source)
    assert data.differing(tree, seen(tree)) == frozenset()
    assert not data.incomplete(tree, seen(tree))
    changed = seen(tree, a=FILE, link=None, sub__c=LINK)
    assert data.differing(tree, changed) == {"a", "link", "sub/c"}


def test_files_behind_a_link_in_place_of_a_folder_do_not_count(source):
    tree = scan_tree(source)
    there = seen(tree, sub=LINK)
    assert data.differing(tree, there) == {"sub/c"}
    assert data.folders(tree, there, frozenset({"sub/c"})) == (("sub", 0o700),)
    assert refusal(tree, there, "/d") == ""


@pytest.mark.parametrize(
    ("path", "thing", "words"),
    [
        ("a", FOLDER, "/d/a is a folder on the node and a file here"),
        ("link", FOLDER, "/d/link is a folder on the node and a symlink here"),
        ("sub", FILE, "/d/sub is a file on the node and a folder here"),
        ("sub", DEVICE, "/d/sub is a device, pipe or socket on the node and a folder here"),
        ("a", DEVICE, "/d/a is a device, pipe or socket on the node and a file here"),
    ],
)
def test_wrong_file_type_is_refused(source, path, thing, words):
    tree = scan_tree(source)
    assert words in refusal(tree, seen(tree, **{path: thing}), "/d")


@pytest.mark.parametrize(("path", "thing"), [("a", LINK), ("link", FILE), ("sub", LINK)])
def test_a_link_is_replaced(source, path, thing):
    tree = scan_tree(source)
    assert refusal(tree, seen(tree, **{path: thing}), "/d") == ""


def test_a_folder_of_another_user(source):
    """No file can be put in it, which is reported before anything is sent; its mode is not changed."""
    tree = scan_tree(source)
    theirs = seen(tree, sub=NodeFile("dir", 0o755, 0, 0, 7), sub__c=None)
    closed = NodeTree(theirs.things, frozenset({"sub"}), 1000)
    assert "/d/sub belongs to another user" in refusal(tree, closed, "/d")
    writable = NodeTree(theirs.things, frozenset(), 1000)
    assert refusal(tree, writable, "/d") == ""
    assert data.folders(tree, writable, frozenset({"sub/c"})) == ()
    assert data.folders(tree, NodeTree(theirs.things), frozenset()) == (("sub", 0o700),)


def test_only_folders_that_are_written_in_are_opened(source):
    (source / "sub").chmod(0o500)
    (source / "sub/deep").mkdir()
    tree = scan_tree(source)
    there = NodeTree(seen(tree).things, frozenset({"sub", "sub/deep"}))
    assert data.folders(tree, there, frozenset()) == ()
    assert data.folders(tree, there, frozenset({"sub/c"})) == (("sub", 0o500),)


def test_a_folder_is_opened_before_and_closed_behind_everything(source):
    (source / "sub/back\\slash\n").mkdir(mode=0o555)
    (source / "sub").chmod(0o500)
    tree = scan_tree(source)
    pushed = plan_parts(tree, data.differing(tree, NodeTree()))
    lines = place_input(pushed, data.folders(tree, NodeTree(), frozenset())).decode().splitlines()
    assert lines[:2] == ["folder 700 sub", "folder 755 sub/back\\\\slash\\n"]
    assert lines[2].startswith("group ")
    assert lines[3:-2] == ["small a", "small b", "small link", "small sub/c"]
    assert lines[-2:] == ["mode 555 sub/back\\\\slash\\n", "mode 500 sub"]


def test_list_for_a_node_includes_parts_for_other_nodes(source):
    tree = scan_tree(source)
    pushed = plan_parts(tree, frozenset({"a"}))
    key = pushed.parts[0].key
    assert begin_input(pushed, (key, "other")).decode() == f"want {key}\nskip other\n"
    assert compare_input(tree) == b".\0a\0b\0link\0sub\0sub/c\0"


@pytest.mark.parametrize(
    "destination",
    [
        "/opt/llm/current",
        "/opt/llm/current/share/x",
        "/opt/llm/releases",
        "/opt/llm/releases/x/y",
        "/opt/llm",
        "/opt",
        "//opt//llm/current/x",
        "/opt/llm/data/../current/x",
    ],
)
@pytest.mark.parametrize("folder", [True, False])
def test_a_release_is_no_destination(destination, folder):
    with pytest.raises(UsageError, match="where clusterctl keeps releases") as caught:
        PushTarget.of(INVENTORY, destination, folder=folder)
    assert caught.value.hint


def test_a_folder_is_staged_in_itself_and_a_file_beside_itself():
    folder, file = (PushTarget.of(INVENTORY, "/data/x", folder=kind) for kind in (True, False))
    assert folder.staging == "/data/x/.clusterctl-push-folder"
    assert file.staging.startswith("/data/.clusterctl-push-")
    assert file.staging != PushTarget.of(INVENTORY, "/data/y", folder=False).staging


def test_leftovers_of_broken_pushes_count_as_free_space(source):
    tree = scan_tree(source)
    has = NodeTree(free_bytes=600, staged=500)
    pushed = plan_parts(tree, data.differing(tree, has))
    assert pushed.room == 2 * pushed.size > 1100  # one part, which exists twice for a moment
    for free, staged in ((pushed.room, None), (pushed.room - 500, 500), (0, pushed.room)):
        refuse_full(work(tree, pushed, NodeTree(free_bytes=free, staged=staged)), INVENTORY.nodes)
    with pytest.raises(PreflightError) as caught:
        refuse_full(work(tree, pushed, has), INVENTORY.nodes)
    assert caught.value.reasons["node01"].startswith("600 B free and 500 B of an earlier push in /d/.clusterctl")


def work(tree, pushed, has):
    target = PushTarget.of(INVENTORY, "/d", folder=True)
    return Shipment(tree, target, {"node01": data.find_changes(tree, has, "/d")}, {"node01": pushed}, Lock("/d.lock"))


def test_a_random_tree_loses_nothing(tmp_path):
    chance = random.Random(7)
    for number in range(200):
        path = tmp_path / f"d{chance.randrange(9)}" / f"f{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(chance.randrange(3000)))
    tree = scan_tree(tmp_path)
    wanted = frozenset(one.path for one in tree.found if one.type == "file" and chance.random() < 0.5)
    pushed = plan_parts(tree, wanted, limit=2000)
    assert {path for files in pushed.small.values() for path in files} | set(pushed.large.values()) == wanted
    assert len({part.key for part in pushed.parts}) == len(pushed.parts)
