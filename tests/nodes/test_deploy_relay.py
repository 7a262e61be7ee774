"""Whole deploys whose bytes nodes pass on to each other, and what happens to nodes and to the controller meanwhile."""

import json
import os
import re
import shutil
import signal
import time
from itertools import count

import pytest
from command import run
from forked import Command
from relaying import new_name
from tiny_env import inventory, make_env, on, pack

from provision import sandbox as sandboxes
from provision.inventory import load
from provision.transfer import keys
from provision.transfer.prepare import pack_zstd

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

SIZE = 6 << 20
# A relay starts with fewer bytes here than for users, and its units are smaller by as much.
SMALL = """
from provision.transfer import engine
engine.Options.__init__.__kwdefaults__.update(relay_from=1 << 20, unit=1 << 19)
"""
# After a power cut no owner of a lock is left: 15 seconds without a heartbeat would prove no more than two.
REBOOTED = f"""{SMALL}
from provision.session import lock
lock.SILENT = 2
"""
NAMES = ("node01", "node02", "node03")
FORGET = (
    "sed -i /clusterctl-relay/d /root/.ssh/authorized_keys; "
    "rm -rf /dev/shm/clusterctl-relay* /opt/*/releases/.transfer-*/clusterctl-relay*"
)

_numbers = count(1)


@pytest.fixture(scope="module")
def box(tmp_path_factory, require_sandbox):
    folder = tmp_path_factory.mktemp("deploy-relay")
    with sandboxes.up(sandboxes.Options(nodes=3, name=new_name(), link="15mbit", directory=folder)) as box:
        yield box


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Two that share nothing large."""
    folder = tmp_path_factory.mktemp("bundles")
    made = []
    for text in ("one", "two"):
        env = make_env(folder / text / "tiny", text)
        for number in range(4):
            (env / f"share/noise{number}").write_bytes(os.urandom(SIZE // 4))
        made.append(pack(env, folder / f"{text}.ccb"))
    return made


@pytest.fixture
def place(box, tmp_path):
    """A folder with an inventory whose prefix no other test uses, and that prefix's root."""
    root = f"/opt/d{next(_numbers)}"
    quick = inventory(box, tmp_path / "i", prefix=f"{root}/current", change=_impatient)
    yield quick, root
    left = relay_keys(box)
    for name in left:  # the next test starts without
        on(box, name, "sh", "-c", FORGET)
    assert left == {}, "a key of the relay was left"
    assert box.problems == ()


def _impatient(text):
    return text.replace("ssh: {", "ssh: {timeout: 4, ")


def deploy(folder, bundle, *more, first=SMALL):
    result = run("deploy", "--json", *more, bundle, cwd=folder, timeout=250, first=first)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def relay_keys(box, names=NAMES):
    """By node, the traces of a relay: lines, and folders with private keys."""
    script = (
        "cat /root/.ssh/authorized_keys; ls -d /dev/shm/* /opt/*/releases/.transfer-*/clusterctl-relay* 2>/dev/null"
    )
    found = {name: on(box, name, "sh", "-c", f"{script}; true").count("clusterctl-relay") for name in names}
    return {name: number for name, number in found.items() if number}


def inodes(box, names=NAMES):
    """Adding or removing a line replaces the file."""
    return [on(box, name, "stat", "-c", "%i", "/root/.ssh/authorized_keys") for name in names]


def works(box, root, release, names=NAMES):
    for name in names:
        message = on(box, name, "env", "-i", f"{root}/current/bin/where")
        assert message == f"{root}/releases/{release}/share\n", name
    return True


class Deploying:
    """A deploy under way, in the middle of the bytes' way over the whole chain."""

    def __init__(self, box, folder, root, bundle):
        self.child = Command("deploy", bundle, cwd=folder, first=SMALL)
        until = time.monotonic() + 200
        last = box.node_root(NAMES[-1]) / root[1:] / "releases"
        while not any((path / "have").exists() and list(path.glob("units/*")) for path in last.glob(".transfer-*")):
            assert self.child.poll() is None, self.child.stderr
            assert time.monotonic() < until
            time.sleep(0.01)
        self.child.send_signal(signal.SIGSTOP)  # the middle lasts until the test has done what it does there
        assert set(relay_keys(box)) == set(NAMES)

    def end(self):
        """Exit code, and the whole output as one line."""
        self.child.send_signal(signal.SIGCONT)
        code = self.child.wait(250)
        out = self.child.stdout + self.child.stderr
        assert "Traceback" not in out
        return code, re.sub(r"\s+", " ", out)


def test_bundle_leaves_the_controller_once(box, bundles, place):
    folder, root = place
    before = inodes(box)
    done = deploy(folder, bundles[0])
    assert SIZE <= done["bytes_sent"] <= 1.1 * SIZE
    assert set(done["nodes"].values()) == {"deployed"}
    assert works(box, root, done["release"])
    assert all(one != other for one, other in zip(inodes(box), before, strict=True))


def test_nodes_without_zstd_receive_compressed_bytes_once(box, place, tmp_path):
    folder, root = place
    env = make_env(tmp_path / "tiny", "many equal bytes")
    (env / "share/equal").write_bytes(bytes(65 << 20))
    (env / "share/noise").write_bytes(os.urandom(SIZE))
    done = deploy(folder, pack(env, tmp_path / "equal.ccb"), "--limit", "node[01-02]")
    brought = len(pack_zstd(shutil.which("zstd")))
    assert SIZE <= done["bytes_sent"] - 2 * brought <= 1.1 * SIZE
    assert works(box, root, done["release"], ("node01", "node02"))
    for name in ("node01", "node02"):
        assert on(box, name, "sh", "-c", f"cat {root}/current/share/equal | wc -c").strip() == str(65 << 20)
        assert "transfer" not in on(box, name, "ls", "-A", f"{root}/releases")


def test_without_relay_the_controller_serves_every_node_and_installs_no_key(box, bundles, place):
    folder, root = place
    before = inodes(box)
    done = deploy(folder, bundles[0], "--relay", "off")
    assert 3 * SIZE <= done["bytes_sent"] <= 3.1 * SIZE
    assert works(box, root, done["release"])
    assert inodes(box) == before


def test_node_switched_off_during_transfer_stops_no_other(box, bundles, place):
    folder, root = place
    under_way = Deploying(box, folder, root, bundles[0])
    box.power_off("node02")
    others = ("node01", "node03")
    try:
        code, message = under_way.end()
        assert code == 5
        assert "deploy failed on 1 of 3 nodes" in message
        assert "node02: " in message
        assert relay_keys(box, others) == {}
    finally:
        box.power_on("node02")
    assert set(relay_keys(box)) == {"node02"}, "of its authorized_keys; what lay in memory is gone"
    again = deploy(folder, bundles[0], first=REBOOTED)
    assert again["nodes"] == dict.fromkeys(others, "unchanged") | {"node02": "deployed"}
    assert works(box, root, again["release"])
    assert run("verify", "-q", cwd=folder).returncode == 0


def test_a_node_that_reboots_during_a_deploy_is_finished_by_the_next_run(box, bundles, place):
    """It answers again at once, but its earlier writes may be lost: this run must not report it as done."""
    folder, root = place
    under_way = Deploying(box, folder, root, bundles[0])
    box.power_off("node02")
    box.power_on("node02")
    code, message = under_way.end()
    assert code == 5
    assert "deploy failed on 1 of 3 nodes" in message
    assert "node02: it was switched off or restarted during the transfer" in message
    again = deploy(folder, bundles[0], first=REBOOTED)
    assert again["nodes"] == dict.fromkeys(("node01", "node03"), "unchanged") | {"node02": "deployed"}
    assert works(box, root, again["release"])
    assert run("verify", "-q", cwd=folder).returncode == 0


def test_controller_killed_during_transfer(box, bundles, place):
    folder, root = place
    under_way = Deploying(box, folder, root, bundles[0])
    under_way.child.kill()
    assert relay_keys(box) != {}
    again = deploy(folder, bundles[0])
    assert set(again["nodes"].values()) == {"deployed"}
    assert again["bytes_sent"] <= 1.1 * SIZE
    assert works(box, root, again["release"])
    assert run("verify", "-q", cwd=folder).returncode == 0


def test_the_next_release_s_deploy_removes_the_keys_of_a_killed_one(box, bundles, place):
    folder, root = place
    under_way = Deploying(box, folder, root, bundles[0])
    under_way.child.kill()
    assert relay_keys(box) != {}
    second = deploy(folder, bundles[1])
    assert works(box, root, second["release"])


def test_the_keys_of_a_running_push_stay(box, bundles, place):
    folder, root = place
    loaded = load(folder / "inventory.yaml")
    pushing = keys.RelayKey.new().line(loaded, "/data/.clusterctl-push-0123456789ab")
    killed = keys.RelayKey.new().line(loaded, f"{root}/releases")
    file = "/root/.ssh/authorized_keys"
    on(box, "node01", "sh", "-c", f"cp {file} {file}.before && printf '%s\\n' '{pushing}' '{killed}' >>{file}")
    try:
        deploy(folder, bundles[0])
        assert pushing in on(box, "node01", "cat", file)
        assert killed not in on(box, "node01", "cat", file)
        on(box, "node01", "sh", "-c", f"echo '{killed}' >>{file}")
        assert deploy(folder, bundles[0])["changed"] is False
        assert pushing in on(box, "node01", "cat", file)
        assert killed not in on(box, "node01", "cat", file)
    finally:
        on(box, "node01", "mv", f"{file}.before", file)


def test_limit_deploys_to_a_new_node_and_to_a_replaced_one(box, bundles, place):
    folder, root = place
    first = deploy(folder, bundles[0], "--limit", "node[01-02]")
    assert first["nodes"] == dict.fromkeys(NAMES[:2], "deployed")
    assert box.enter("node03", ["ls", root]).returncode != 0
    joined = deploy(folder, bundles[0], "--limit", "node03")
    assert joined["nodes"] == {"node03": "deployed"}
    assert joined["release"] == first["release"]
    assert works(box, root, first["release"])
    second = deploy(folder, bundles[1])
    on(box, "node02", "sh", "-c", f"chmod -R u+w {root}; rm -rf {root}")  # another machine under the same name
    filled = deploy(folder, bundles[1])
    assert filled["nodes"] == dict.fromkeys(("node01", "node03"), "unchanged") | {"node02": "deployed"}
    assert works(box, root, second["release"])
    assert run("verify", "-q", cwd=folder).returncode == 0
    assert on(box, "node02", "ls", f"{root}/releases").split() == sorted([second["release"], f"{second['release']}.ok"])
