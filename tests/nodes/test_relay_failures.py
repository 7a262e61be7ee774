"""A relay around failures: the other nodes get everything, and only bytes in transit are sent again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from relaying import Nodes, Payload, kill
from training import wait_until

from provision import inventory as inventory_file
from provision.model import Notice, Progress
from provision.session import Lock, Session
from provision.ssh import openssh
from provision.ssh.remote import Connections
from provision.transfer import chain, clean, keys, prepare

PAYLOAD = Payload(16)
SMALL = Payload(6, part=1 << 20)  # where the number of bytes that are sent again is not the subject
UNIT = 1 << 20  # a node starts about ten processes for each
SPARE = 1
HOP = 4 << 20  # what may be on its way between two nodes: the unit that waits, ssh's window of 2 MiB, pipes


@pytest.fixture
def make(make_sandbox, monkeypatch):
    """Makes nodes whose deaths are noticed soon."""
    monkeypatch.setattr(keys, "ALIVE", 1)
    monkeypatch.setattr(prepare, "PING", 3.0)
    monkeypatch.setattr(prepare, "SPARE", SPARE)
    pools = []

    def made(count, **options):
        box = make_sandbox(count, **options)
        inventory = inventory_file.load(box.inventory)
        inventory = replace(inventory, ssh=replace(inventory.ssh, timeout=4.0))
        pools.append(connections := Connections(inventory))
        return Nodes(box, inventory, connections)

    yield made
    for pool in pools:
        pool.close()


class When:
    """Calls a function once, when a share of all bytes has arrived. Keeps the events."""

    def __init__(self, part, act):
        self.part, self.act = part, act
        self.told = []
        self.lock = threading.Lock()

    def __call__(self, event):
        with self.lock:
            self.told.append(event)
            if self.act and isinstance(event, Progress) and event.done >= self.part * event.total > 0:
                act, self.act = self.act, None
                act()

    @property
    def notices(self):
        return [event.text for event in self.told if isinstance(event, Notice)]


def test_node_switched_off_during_transfer(make):
    nodes = make(4)
    when = When(0.3, lambda: nodes.box.power_off("node02"))
    done = nodes.send(PAYLOAD, unit=UNIT, emit=when)
    assert when.act is None
    assert {name for name, error in done.errors.items() if error} == {"node02"}
    assert "node02" in str(done.errors["node02"])
    assert nodes.identical(PAYLOAD, "node01", "node03", "node04")
    assert done.sent <= PAYLOAD.size() + 4 * HOP
    assert nodes.traces("node01", "node03", "node04") == {}
    assert any("node02: the connection from node01 was lost" in text for text in when.notices), when.notices


def test_first_node_switched_off_during_transfer(make):
    nodes = make(4)
    when = When(0.3, lambda: nodes.box.power_off("node01"))
    done = nodes.send(PAYLOAD, unit=UNIT, emit=when, stall=4)
    assert {name for name, error in done.errors.items() if error} == {"node01"}
    assert nodes.identical(PAYLOAD, "node02", "node03", "node04")
    assert done.sent <= PAYLOAD.size() + 4 * HOP


def test_cable_unplugged_during_transfer(make):
    nodes = make(3)
    when = When(0.5, lambda: nodes.box.unplug("node03"))
    done = nodes.send(PAYLOAD, unit=UNIT, emit=when)
    assert {name for name, error in done.errors.items() if error} == {"node03"}
    assert nodes.identical(PAYLOAD, "node01", "node02")
    nodes.box.plug("node03")
    again = nodes.send(PAYLOAD, unit=UNIT)
    assert set(again.errors.values()) == {None}
    assert nodes.identical(PAYLOAD)
    assert again.sent <= 0.9 * PAYLOAD.size()
    assert nodes.traces() == {}


@pytest.mark.parametrize(
    ("what", "name"),
    [("transfer/receive", "node01"), ("sshd: root@notty", "node01"), ("transfer/receive", "node02"),
     ("sshd: root@notty", "node03")],
)  # fmt: skip
def test_process_killed_during_transfer(make, what, name):
    nodes = make(3)
    when = When(0.3, lambda: kill(nodes.box, name, what))
    done = nodes.send(PAYLOAD, unit=UNIT, emit=when)
    assert when.act is None
    assert set(done.errors.values()) == {None}, when.notices
    assert nodes.identical(PAYLOAD)
    assert done.sent <= PAYLOAD.size() + 5 * HOP
    assert nodes.traces() == {}
    assert when.notices


def test_hanging_node(make):
    nodes = make(3)

    def stop():
        kill(nodes.box, "node02", "transfer/receive", signal.SIGSTOP)

    when = When(0.3, stop)
    done = nodes.send(SMALL, unit=UNIT // 2, emit=when, stall=3)
    assert set(done.errors.values()) == {None}, when.notices
    assert nodes.identical(SMALL)
    # Of a node and the one behind it, whose reports pass through it, either may seem to be the cause.
    assert any("sent no report for" in text for text in when.notices), when.notices
    assert nodes.traces() == {}


def test_transfer_to_another_folder_does_not_disturb_a_running_one(make):
    """A deploy and a push, which hold a lock each: the keys and the open ways of one are nothing to the other."""
    nodes = make(3, link="15mbit")
    other = Nodes(nodes.box, nodes.inventory, nodes.connections, root="/opt/b")
    small, beside = Payload(2, seed=2), []

    def meanwhile():
        beside.append(other.send(small, unit=UNIT))
        beside.append(clean(nodes.inventory, nodes.inventory.nodes, nodes.connections, "/opt/c"))

    started = threading.Thread(target=meanwhile)
    when = When(0.1, started.start)
    done = nodes.send(PAYLOAD, unit=UNIT, emit=when)
    started.join()  # as a rule it ends first; on a busy machine this one does, and takes nothing from it either
    assert set(done.errors.values()) == set(beside[0].errors.values()) == set(beside[1].values()) == {None}
    assert when.notices == []
    assert nodes.identical(PAYLOAD)
    assert other.identical(small)
    assert done.sent <= 1.1 * PAYLOAD.size()
    assert beside[0].sent <= 1.1 * small.size()
    assert nodes.traces() == {}


def test_broken_lane_keeps_the_lock_without_the_system_ssh(make, monkeypatch):
    """Then bytes and the lock both travel over paramiko, and to cut the one must not end the other."""
    nodes = make(3)
    monkeypatch.setattr(openssh.shutil, "which", lambda _name: None)
    monkeypatch.setattr(chain, "QUIET", 1.0)
    owner = [nodes.box.node_root(name) / nodes.root[1:] / "x.lock/owner" for name in nodes.names]

    def stop():
        kill(nodes.box, "node01", "transfer/receive", signal.SIGSTOP)

    when = When(0.3, stop)
    session = Session(nodes.inventory, connections=nodes.connections)
    with session.locked(Lock(f"{nodes.root}/x.lock")):
        before = [path.read_text() for path in owner]
        done = nodes.send(SMALL, unit=UNIT // 2, emit=when, stall=3)
        assert [path.read_text() for path in owner] == before
    assert when.act is None
    assert set(done.errors.values()) == {None}, when.notices
    assert nodes.identical(SMALL)
    assert any("sent no report for" in text for text in when.notices), when.notices
    assert not any(path.exists() for path in owner)
    assert nodes.traces() == {}


CONTROLLER = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from relaying import Nodes, Payload
from provision import inventory
from provision.ssh import openssh
from provision.ssh.remote import Connections
loaded = inventory.load(Path({inventory!r}))
with Connections(loaded) as connections:
    nodes = Nodes.__new__(Nodes)
    nodes.inventory, nodes.connections, nodes.folder, nodes.into = loaded, connections, {folder!r}, {into!r}
    print(nodes.send(Payload(16), {options}, emit=lambda event: print(event.done, event.total, flush=True)))
"""


@pytest.mark.parametrize(("relay", "again"), [(True, 2 * HOP), (False, 3 * UNIT)])
def test_controller_is_killed_and_runs_again(make, relay, again):
    nodes = make(3, link="200mbit")
    script = CONTROLLER.format(
        path=sys.path,
        inventory=str(nodes.box.inventory),
        folder=nodes.folder,
        into=nodes.into,
        options=f"unit={UNIT}, relay={relay}",
    )
    before = _uplink(nodes)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as controller:
        for line in controller.stdout:
            done, total = map(int, line.split())
            if done > 0.6 * total:
                break
        controller.kill()
    wait_until(lambda: _has_only_keys(nodes), "no process of the relay is left", 60)
    once = _uplink(nodes) - before
    done = nodes.send(PAYLOAD, unit=UNIT, relay=relay)
    assert set(done.errors.values()) == {None}
    assert nodes.identical(PAYLOAD)
    copies = PAYLOAD.size() * (1 if relay else 3)
    assert once >= 0.5 * copies
    assert _uplink(nodes) - before <= 1.05 * copies + again
    assert nodes.traces() == {}


def _has_only_keys(nodes):
    return all(" clusterctl-relay:" in str(each) for found in nodes.left().values() for each in found)


def _uplink(nodes):
    """Bytes that have left this machine for the nodes."""
    device, _ = nodes.box.state.uplink
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())


FLIP = """#!/bin/sh
# Passes everything on to ssh, but turns one byte of the third unit around.
case "$*" in *probe) exec /usr/bin/ssh.true "$@" ;; esac
perl -e 'binmode STDIN; $|=1; my $at=0; while (sysread(STDIN, my $b, 65536)) {
  my $i = 2500000 - $at; substr($b, $i, 1) ^= "\\x01" if $i >= 0 && $i < length($b);
  $at += length($b); syswrite(STDOUT, $b) }
' | /usr/bin/ssh.true "$@"
"""


def test_a_unit_that_is_changed_in_transit_is_detected(make):
    nodes = make(4)
    ssh = nodes.box.node_root("node02") / "usr/bin/ssh"
    ssh.rename(ssh.with_name("ssh.true"))
    ssh.write_text(FLIP)
    ssh.chmod(0o755)
    when = When(1, None)
    done = nodes.send(PAYLOAD, unit=UNIT, emit=when)
    assert set(done.errors.values()) == {None}, when.notices
    assert nodes.identical(PAYLOAD)
    assert any(text.startswith("node03: a unit arrived damaged") for text in when.notices), when.notices
    assert done.sent <= PAYLOAD.size() + 5 * HOP


def test_full_disks_are_named_and_the_others_are_finished(make):
    nodes = make(4)
    full = {
        "node02": ("size=8m", "no space left on the device"),
        "node03": ("nr_inodes=14", "no inodes left on the device"),
    }
    for name, (what, _) in full.items():
        nodes.box.enter(name, ["mount", "-t", "tmpfs", "-o", what, "tmpfs", nodes.into])
    done = nodes.send(PAYLOAD, unit=UNIT)
    assert {name for name, error in done.errors.items() if error} == set(full)
    for name, (_, reason) in full.items():
        message = re.escape(f"{name}: {reason} ({nodes.into}); ")
        assert re.fullmatch(message + r"at least \d+(\.\d)? MB were needed, .*", str(done.errors[name]))
    assert nodes.identical(PAYLOAD, "node01", "node04")
    assert nodes.traces() == {}


def test_full_disk_of_the_units(make):
    nodes = make(3)
    nodes.box.enter("node03", ["mount", "-t", "tmpfs", "-o", "size=3m,mode=700", "tmpfs", nodes.folder])
    done = nodes.send(PAYLOAD, unit=UNIT)
    assert {name for name, error in done.errors.items() if error} == {"node03"}
    assert str(done.errors["node03"]).startswith(f"node03: no space left on the device ({nodes.folder}); ")
    assert nodes.identical(PAYLOAD, "node01", "node02")


def test_a_node_that_accepts_no_relay_is_reached_directly(make):
    nodes = make(4)
    config = nodes.box.node_root("node02") / "etc/ssh/sshd_config"
    config.write_text(config.read_text() + "AuthorizedKeysFile /etc/ssh/keys\n")
    root = nodes.box.node_root("node02")
    (root / "etc/ssh/keys").write_bytes((root / "root/.ssh/authorized_keys").read_bytes())
    sshd = nodes.box.init_process("node02").pid
    os.kill(sshd, signal.SIGHUP)  # sshd reads its configuration again
    when = When(1, None)
    done = nodes.send(SMALL, unit=UNIT, emit=when)
    assert set(done.errors.values()) == {None}
    assert nodes.identical(SMALL)
    assert done.sent <= 1.1 * SMALL.size()  # it stands first
    assert any("cannot pass bytes on to node02: " in text for text in when.notices), when.notices


def test_nodes_relay_over_the_fast_network_if_present(make):
    nodes = make(4)
    fast = {"node02": "10.99.0.2", "node03": "10.99.0.3", "node04": "10.99.0.4"}
    for name in ("node01", "node02", "node03"):
        into = ["nsenter", "--target", str(nodes.box.init_process(name).pid), "--net"]  # a minimal node has no ip
        subprocess.run([*into, "ip", "address", "add", f"10.99.0.{name[-1]}/24", "dev", "eth0"], check=True)
    chosen = tuple(replace(node, data_address=fast.get(node.name)) for node in nodes.inventory.nodes)
    nodes.inventory = replace(nodes.inventory, nodes=chosen)  # node04's fast port is down
    done = nodes.send(SMALL, unit=UNIT)
    assert set(done.errors.values()) == {None}
    assert nodes.identical(SMALL)
    assert done.sent <= 1.1 * SMALL.size()
    hops = [(nodes.box.node_root(name) / nodes.folder[1:] / "hop").read_text() for name in nodes.names[:3]]
    assert [hop.split()[-2] for hop in hops] == [fast["node02"], fast["node03"], chosen[3].address]


def test_data_that_a_reboot_may_have_lost_is_sent_again(make):
    nodes = make(2)
    parts = SMALL.parts["plain"]
    first = Payload(6, part=1 << 20)
    first.parts = {"plain": parts[:3]}
    assert set(nodes.send(first).errors.values()) == {None}
    folder = nodes.box.node_root("node01") / nodes.folder[1:]
    (fresh,) = folder.glob("fresh.*")
    have = (folder / "have").read_text().split()
    assert sorted(have) == sorted(part.key for part in parts[:3])  # tars that unpack side by side end in any order
    fresh.rename(fresh.with_name("fresh.another-boot"))
    done = nodes.send(SMALL)
    assert nodes.identical(SMALL)
    # The controller sends the payload once: node01 lacks all of it, and node02 receives the rest through the relay.
    assert SMALL.size() <= done.sent <= SMALL.size() + 4096


def test_a_file_that_an_older_release_shares_is_not_written_to(make):
    nodes = make(1)
    root = nodes.box.node_root("node01")
    path = next(path for path in SMALL.files if path.startswith("sub dir/"))
    old = root / nodes.into[1:] / "../old"
    old.write_bytes(b"old content")
    (root / nodes.into[1:] / "sub dir").mkdir()
    os.link(old, root / nodes.into[1:] / path)
    nodes.send(SMALL)
    assert nodes.identical(SMALL)
    assert old.read_bytes() == b"old content"


@pytest.mark.parametrize("shell", ["/usr/bin/tcsh", "/usr/bin/fish"])
def test_other_login_shells(make, shell):
    nodes = make(3)
    for name in nodes.names:
        _copy_shell(shell, nodes.box.node_root(name))
        ran = nodes.box.enter(name, [shell, "-c", "echo $version"])
        assert (ran.returncode, bool(ran.stdout.strip())) == (0, True), ran
        assert nodes.box.enter(name, ["usermod", "--shell", shell, "root"]).returncode == 0
    with Connections(nodes.inventory) as connections:
        nodes.connections = connections
        done = nodes.send(SMALL)
    assert nodes.identical(SMALL)
    assert done.sent <= 1.1 * SMALL.size()


def _copy_shell(shell, root):
    """This machine's shell: a root of Debian packages with both would take a whole debootstrap.

    Its libraries come with it in a folder of their own, so that this machine need not run the nodes' release.
    """
    linked = subprocess.run(["ldd", shell], check=True, capture_output=True, text=True).stdout
    libraries = [Path(path) for path in re.findall(r"(/\S+) \(0x", linked)]
    there = root / "opt/shell"
    there.mkdir()
    for path in (Path(shell), *libraries):
        shutil.copy(path, there / path.name)
    loader = next(path.name for path in libraries if path.name.startswith("ld-"))
    start = f'#!/bin/sh\nexec /opt/shell/{loader} --library-path /opt/shell /opt/shell/{Path(shell).name} "$@"\n'
    (root / shell[1:]).write_text(start)
    (root / shell[1:]).chmod(0o755)
