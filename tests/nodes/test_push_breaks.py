"""``clusterctl push`` interrupted in several ways: the next one resumes, and no other file is touched.

Ranges are of 4 MiB here instead of 64, and the cables slower by as much: what is decided is the same, at a sixteenth of
the work. ``test_push.py`` sends ranges of the real length.
"""

import json
import os
import select
import signal
from itertools import count
from pathlib import Path

import pytest
from command import run
from forked import Command
from relaying import kill, processes
from tiny_env import on

from provision import sandbox as sandboxes

pytestmark = pytest.mark.root

_numbers = count(1)
RANGE = 4 << 20
MB = RANGE // 64
SMALL = f"""
from provision.data import plan_parts
from provision.transfer import engine
plan_parts.__kwdefaults__["limit"] = {RANGE}
engine.Options.__init__.__kwdefaults__.update(relay_from={RANGE}, unit={RANGE // 8})
"""
# After a power cut no owner of a lock is left: 15 seconds without a heartbeat would prove no more than two.
REBOOTED = f"""{SMALL}
from provision.session import lock
lock.SILENT = 2
"""
# Ends itself when everything has come.
KILLED = """
import os, signal
from provision import data
def place(target):
    os.kill(os.getpid(), signal.SIGKILL)
data.place_script = place
"""


@pytest.fixture(scope="module")
def slow(require_sandbox, tmp_path_factory):
    """One node behind a cable that takes 1 MB a second."""
    directory = tmp_path_factory.mktemp("slow")
    with sandboxes.up(
        sandboxes.Options(nodes=1, link="8mbit", name=f"pushslow-{os.getpid()}", directory=directory)
    ) as box:
        yield box


@pytest.fixture(scope="module")
def chain(require_sandbox, tmp_path_factory):
    directory = tmp_path_factory.mktemp("chain")
    with sandboxes.up(
        sandboxes.Options(nodes=3, link="20mbit", name=f"pushchain-{os.getpid()}", directory=directory)
    ) as box:
        text = box.inventory.read_text()  # a node that is off never answers
        box.inventory.write_text(text.replace("ssh: {", "ssh: {timeout: 3, "))
        yield box


@pytest.fixture
def big(tmp_path):
    """A file of two ranges: five seconds on the slow cable."""
    path = tmp_path / "big.bin"
    path.write_bytes(os.urandom(80 * MB))
    return path


def target():
    return f"/data/b{next(_numbers)}/set"


def push(box, *argv, first=SMALL):
    result = run("push", "--json", *argv, cwd=box.directory, first=first)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def start(box, *argv, first=SMALL):
    return Command("push", *argv, cwd=box.directory, first=first)


def staging(box, node, path):
    """The staging folder of a push, beside its destination or in it; None when there is none."""
    at = Path(f"{box.node_root(node)}{path}")
    found = [*at.parent.glob(".clusterctl-push-*/"), *at.glob(".clusterctl-push-*/")]
    return next((each for each in found if each.suffix != ".lock" and (each / "transfer").exists()), None)


def parts(box, node, path):
    """How many parts a node has unpacked."""
    try:
        return len(Path(staging(box, node, path), "transfer/have").read_text().split())
    except (TypeError, FileNotFoundError):
        return 0


def units(box, node, path):
    """Whether a node has received anything."""
    where = staging(box, node, path)
    return where and any(file.stat().st_size for file in where.glob("transfer/units/*"))


def finish(child):
    assert child.wait() == 0, child.stderr


def wait(child, condition):
    while not condition():
        assert child.poll() is None, child.stderr
        select.select([], [], [], 0.02)


def kill_when(child, condition):
    wait(child, condition)
    child.kill()


def same(box, node, path, source):
    return Path(f"{box.node_root(node)}{path}").read_bytes() == source.read_bytes()


def names(box, node, path):
    return sorted(path.name for path in Path(f"{box.node_root(node)}{path}").iterdir())


def test_an_interrupted_push_resumes_where_it_stopped(slow, big):
    path = target()
    kill_when(start(slow, big, path), lambda: parts(slow, "node01", path))
    assert not Path(f"{slow.node_root('node01')}{path}").exists()
    result = push(slow, big, path)
    assert result["bytes_sent"] < 20 * MB  # the first range, of 64, was there
    assert same(slow, "node01", path, big)
    assert names(slow, "node01", Path(path).parent) == ["set"]


def test_private_files_stay_private_during_the_transfer(slow, tmp_path, big):
    path, top = target(), tmp_path / "set"
    (top / "private").mkdir(parents=True, mode=0o700)
    (top / "private/key").write_text("secret")
    (top / "private").chmod(0o700)
    big.rename(top / "big.bin")
    child = start(slow, top, path)
    wait(child, lambda: parts(slow, "node01", path))
    where = staging(slow, "node01", path)
    assert list(where.rglob("key"))
    assert where.stat().st_mode & 0o777 == 0o700
    finish(child)
    assert on(slow, "node01", "stat", "-c", "%a", f"{path}/private").strip() == "700"


def test_the_next_push_follows_no_links_left_by_an_interrupted_one(slow, tmp_path, big):
    path, top = target(), tmp_path / "set"
    top.mkdir()
    on(slow, "node01", "sh", "-c", "mkdir -p /elsewhere && echo precious >/elsewhere/x")
    (top / "data").symlink_to("/elsewhere")
    big.rename(top / "big.bin")
    kill_when(start(slow, top, path), lambda: parts(slow, "node01", path))
    (top / "big.bin").unlink()
    (top / "data").unlink()
    (top / "data").mkdir()
    (top / "data/x").write_text("new")
    push(slow, top, path)
    assert on(slow, "node01", "cat", "/elsewhere/x") == "precious\n"
    assert on(slow, "node01", "cat", f"{path}/data/x") == "new"
    assert names(slow, "node01", path) == ["data"]


def test_a_push_killed_after_the_last_byte_sends_nothing_again(slow, tmp_path):
    path, top = target(), tmp_path / "set"
    (top / "sub").mkdir(parents=True)
    for number in range(3):
        (top / f"sub/{number}").write_bytes(os.urandom(MB))
    assert start(slow, top, path, first=KILLED).wait() == -signal.SIGKILL
    result = push(slow, top, path)
    assert (result["bytes_sent"], result["changed"]) == (0, True)
    assert same(slow, "node01", f"{path}/sub/2", top / "sub/2")
    assert push(slow, top, path)["changed"] is False


def test_leftovers_of_an_interrupted_push_are_removed_even_without_files_to_send(slow, tmp_path):
    path, top = target(), tmp_path / "set"
    top.mkdir()
    (top / "file").write_bytes(bytes(MB))
    assert start(slow, top, path, first=KILLED).wait() == -signal.SIGKILL
    (top / "file").unlink()
    assert push(slow, top, path)["bytes_sent"] == 0
    assert names(slow, "node01", path) == []


def test_after_a_reboot_data_already_on_the_disk_is_not_sent_again(slow, big):
    path = target()
    kill_when(start(slow, big, path), lambda: parts(slow, "node01", path))
    for fresh in (staging(slow, "node01", path) / "transfer").glob("fresh.*"):
        fresh.unlink()  # as when it has been written to the disk
    slow.power_off("node01")
    slow.power_on("node01")
    assert push(slow, big, path, first=REBOOTED)["bytes_sent"] < 20 * MB
    assert same(slow, "node01", path, big)


def test_only_one_push_at_a_time_writes_to_a_destination(slow, big, tmp_path):
    path, other = target(), tmp_path / "set"
    other.mkdir()
    big.rename(other / "big.bin")
    child = start(slow, other, path)
    wait(child, lambda: staging(slow, "node01", path))
    refused = run("push", other, path, cwd=slow.directory, first=SMALL)
    assert refused.returncode == 4
    message = " ".join(refused.stderr.split())
    assert f"another command of root on {os.uname().nodename}, process {child.pid} has been running here for" in message
    assert "nothing was changed" in message
    finish(child)
    assert same(slow, "node01", f"{path}/big.bin", other / "big.bin")
    assert push(slow, other, path)["changed"] is False


def test_space_used_by_an_interrupted_push_counts_as_free(slow, tmp_path, big):
    path, top = target(), tmp_path / "set"
    top.mkdir()
    big.rename(top / "big.bin")
    on(slow, "node01", "mkdir", "-p", path)
    on(slow, "node01", "mount", "-t", "tmpfs", "-o", f"size={180 * MB}", "tmpfs", path)
    kill_when(start(slow, top, path), lambda: parts(slow, "node01", path))
    assert push(slow, top, path)["bytes_sent"] < 20 * MB
    assert same(slow, "node01", f"{path}/big.bin", top / "big.bin")
    more, there = tmp_path / "more", f"{path}/more"
    more.write_bytes(bytes(40 * MB))
    kill_when(start(slow, more, there), lambda: units(slow, "node01", there))
    more.write_bytes(bytes(90 * MB))
    refused = run("push", more, there, cwd=slow.directory, first=SMALL)
    assert refused.returncode == 4
    assert f"of an earlier push in {path}/.clusterctl-push-" in " ".join(refused.stderr.split())
    on(slow, "node01", "umount", "--lazy", path)  # processes of the killed push may still be ending


def test_a_file_that_changes_during_a_push_is_an_error_and_replaces_nothing(slow, big):
    path = target()
    child = start(slow, big, path)
    wait(child, lambda: units(slow, "node01", path))
    with big.open("ab") as file:
        file.write(b"more")
    assert child.wait() == 3
    assert "changed while" in " ".join(child.stderr.split())
    assert not Path(f"{slow.node_root('node01')}{path}").exists()


@pytest.fixture
def tree(tmp_path):
    """200 MB: small files, and a file of three ranges."""
    top = tmp_path / "tree"
    for number in range(40):
        path = top / f"folder {number % 4}/{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(MB // 2))
    (top / "model").write_bytes(os.urandom(180 * MB))
    return top


def all_the_same(box, node, path, tree):
    return all(
        same(box, node, f"{path}/{each.relative_to(tree)}", each) for each in tree.rglob("*") if each.is_file()
    ) and names(box, node, path) == sorted(each.name for each in tree.iterdir())


def test_a_relay_resumes_after_its_controller_was_killed(chain, tree):
    path = target()
    kill_when(start(chain, tree, path), lambda: min(parts(chain, f"node0{n}", path) for n in (1, 2, 3)) >= 2)
    result = push(chain, tree, path)
    # Of 200 through this machine's cable: the small ones and a range were there.
    assert result["bytes_sent"] < 140 * MB
    for node in ("node01", "node02", "node03"):
        assert all_the_same(chain, node, path, tree)
    assert push(chain, tree, path)["bytes_sent"] == 0


def test_a_relay_continues_after_a_process_on_a_node_was_killed(chain, tree):
    path = target()
    child = start(chain, tree, path)
    wait(child, lambda: parts(chain, "node02", path) >= 1 and processes(chain, "node02", "receive"))
    kill(chain, "node02", "receive")
    finish(child)
    for node in ("node01", "node02", "node03"):
        assert all_the_same(chain, node, path, tree)


def test_node_powered_off_stops_no_other_and_gets_the_rest_later(chain, tree):
    path = target()
    child = start(chain, tree, path)
    wait(child, lambda: parts(chain, "node02", path) >= 1)
    chain.power_off("node02")
    assert child.wait() == 5
    assert "push failed on 1 of 3 nodes" in " ".join(child.stderr.split())
    for node in ("node01", "node03"):
        assert all_the_same(chain, node, path, tree)
    chain.power_on("node02")
    result = push(chain, tree, path, first=REBOOTED)
    assert result["nodes"] == {"node01": "unchanged", "node02": "pushed", "node03": "unchanged"}
    assert all_the_same(chain, "node02", path, tree)
