"""The measures on sandbox nodes: real firewall rules and routes, shifted clocks, folders shared, local and hung."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from relaying import share_folder

from provision import inventory as inventory_file
from provision.checks import Plan, judged, load
from provision.checks.kit.measures import heard, offset
from provision.model import Node, TrainDefaults
from provision.session import Conversation, Session
from provision.ssh.remote import Connections
from provision.tasks.measures import clock, ports, shares

LATE = 30  # seconds that something may take on a busy machine


@pytest.fixture(scope="module")
def pool(sandbox):
    with Connections(inventory_file.load(sandbox.inventory)) as pool:
        yield pool


def plan(pool, **changes):
    inventory = replace(pool.inventory, **changes)
    return Plan(inventory, inventory.nodes)


def found(check, seen, answers):
    seen = replace(seen, limits=load(check).limits)
    return {finding.node: finding for finding in judged(check, seen, answers)}


def verdicts(check, seen, answers):
    return {name: finding.verdict for name, finding in found(check, seen, answers).items()}


def in_network(box, name, *argv, stdin=None):
    """A program of this machine in a node's network."""
    into = ["nsenter", "--target", str(box.init_process(name).pid), "--net", "--", *argv]
    done = subprocess.run(into, input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def firewall(box, name, *rules, hook="input"):
    """A node's firewall, which lets ssh through and applies ``rules`` to the rest."""
    if shutil.which("nft") is None:
        pytest.fail("nft is missing: apt-get install nftables")
    lines = [
        "table inet cc {",
        f"chain c {{ type filter hook {hook} priority 0",
        "ct state established,related accept",
        "tcp dport 22 accept",
        *rules,
        "}",
        "}",
    ]
    in_network(box, name, "nft", "-f", "-", stdin="\n".join(lines) + "\n")
    try:
        yield
    finally:
        in_network(box, name, "nft", "delete", "table", "inet", "cc")


# --- ports ---------------------------------------------------------------------------------------


def test_every_node_reaches_every_other(pool, sandbox):
    seen = plan(pool)
    answers = ports.measure(seen, Session(pool.inventory, seen.nodes, connections=pool))
    for check in ("net.master", "net.ephemeral"):
        assert verdicts(check, seen, answers) == dict.fromkeys(answers, "OK")
    for node in seen.nodes:
        mine = heard(answers[node.name])
        assert mine.own == node.address
        assert {one.seen for one in mine.tried} == {one.source for one in mine.tried} == {node.address}
        assert len(mine.tried) == 4 + (node != seen.nodes[0])
    assert_nobody_listens(sandbox, seen, answers)


def assert_nobody_listens(box, seen, answers):
    until = time.monotonic() + LATE
    for node in seen.nodes:
        lines = [line.split() for line in answers[node.name].lines if line.startswith("listen ")]
        places = [f":{int(each[2]):04X} " for each in lines if each[3] == "open"]
        assert places
        while any(place in line and " 0A " in line for line in listening(box, node.name) for place in places):
            assert time.monotonic() < until, f"{node.name} listens on"
            time.sleep(0.05)


def listening(box, name):
    pid = box.init_process(name).pid
    return [line for file in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{file}").read_text().splitlines()]


def test_dropped_refused_and_rerouted_connections_are_distinguished(pool, sandbox):
    first, second, third = (node.name for node in pool.inventory.nodes)
    by_name = {node.name: node.address for node in pool.inventory.nodes}
    seen = plan(pool)
    # Together, since to see that nothing comes costs its time once. The third's other address is the wrong interface's.
    other = by_name[third].rsplit(".", 1)[0] + ".253"
    route = (f"{by_name[first]}/32", "dev", "eth0", "src", other)
    in_network(sandbox, third, "ip", "address", "add", f"{other}/16", "dev", "eth0")
    in_network(sandbox, third, "ip", "route", "add", *route)
    try:
        with firewall(sandbox, second, "tcp dport 1024-65535 drop"), firewall(sandbox, first, "tcp dport 29500 reject"):
            answers = ports.measure(seen, Session(pool.inventory, seen.nodes, connections=pool))
    finally:
        in_network(sandbox, third, "ip", "route", "delete", *route)
        in_network(sandbox, third, "ip", "address", "delete", f"{other}/16", "dev", "eth0")
    ephemeral = found("net.ephemeral", seen, answers)
    assert {name: finding.verdict for name, finding in ephemeral.items()} == {
        first: "OK",
        second: "FAIL",
        third: "WARN",
    }
    assert "no answer (dropped)" in ephemeral[second].observed
    assert f"{first} is reached from {other}, not from {by_name[third]}" in ephemeral[third].observed
    master = found("net.master", seen, answers)
    assert {name: finding.verdict for name, finding in master.items()} == {first: "FAIL", second: "OK", third: "OK"}
    assert heard(answers[second]).to(first, "master").state == "refused"


def test_a_master_port_that_is_in_use(pool, sandbox):
    first, second, third = (node.name for node in pool.inventory.nodes)
    program = """use IO::Socket::INET;
        my $s = IO::Socket::INET->new(Listen => 9, LocalPort => 4711, ReuseAddr => 1) or die;
        while (my $c = $s->accept) { close $c }"""
    started = sandbox.enter(first, ["sh", "-c", 'perl -e "$0" >/dev/null 2>&1 & echo $!', program])
    try:
        until = time.monotonic() + LATE
        while not any(":1267 " in line and " 0A " in line for line in listening(sandbox, first)):
            assert time.monotonic() < until
            time.sleep(0.02)
        seen = plan(pool, train=TrainDefaults(port=4711))
        answers = ports.measure(seen, Session(pool.inventory, seen.nodes, connections=pool))
    finally:
        sandbox.enter(first, ["kill", started.stdout.strip()])
    master = found("net.master", seen, answers)
    assert {name: finding.verdict for name, finding in master.items()} == {first: "FAIL", second: "OK", third: "OK"}
    assert f"port 4711 is taken by perl (process {started.stdout.strip()})" in master[first].observed


def test_listener_exits_when_its_connection_breaks(sandbox):
    with Connections(inventory_file.load(sandbox.inventory)) as broken:
        seen = plan(broken)
        node = seen.nodes[0]
        ear = Conversation(node, broken.__getitem__, ports.listen_script(seen, node, "0123"), beat=1.0)
        ear.start()
        assert ear.wait_for("ready", LATE)
        places = [f":{port:04X} " for each in ports.open_ports(ear.lines).values() for port in each]
        assert len(places) == 3
        broken[node].transport.sock.close()  # no goodbye, as when the controller is killed
        until = time.monotonic() + LATE
        while any(place in line and " 0A " in line for line in listening(sandbox, node.name) for place in places):
            assert time.monotonic() < until, "it listens on"
            time.sleep(0.05)
        ear.close()


def test_unreachable_node_is_reported(pool):
    first = pool.inventory.nodes[0]
    nobody = Node("nobody", first.address, port=1)  # refused at once
    seen = Plan(pool.inventory, (first, nobody))
    for measure in (ports.measure, clock.measure):
        answers = measure(seen, Session(pool.inventory, seen.nodes, connections=pool))
        assert "nobody" in answers["nobody"].err
    assert verdicts("clock.skew", seen, answers) == {first.name: "OK", "nobody": "UNKNOWN"}


# --- clock ---------------------------------------------------------------------------------------


def test_skew_is_found_within_its_error_bars_with_and_without_nanoseconds(pool, sandbox):
    first, second, third = (node.name for node in pool.inventory.nodes)
    places = {name: sandbox.node_root(name) / "usr/local/bin/date" for name in (second, third)}
    # There is one clock for all nodes of a sandbox, so a node's answer is shifted; busybox knows no nanoseconds.
    places[second].write_text('#!/bin/sh\nexec /usr/bin/date -d "+5 seconds" "$@"\n')
    shutil.copy(shutil.which("busybox"), places[third])
    try:
        for place in places.values():
            place.chmod(0o755)
        seen = plan(pool)
        answers = clock.measure(seen, Session(pool.inventory, seen.nodes, connections=pool))
    finally:
        for place in places.values():
            place.unlink()
    offsets = {name: offset(answer) for name, answer in answers.items()}
    for name, true in ((first, 0), (second, 5), (third, 0)):
        assert abs(offsets[name].seconds - true) <= offsets[name].error + 0.001, (name, offsets[name])
    assert offsets[third].error < 0.5  # ten samples give a narrower bound than one of whole seconds
    assert "whole-seconds" in answers[third].out
    assert "whole-seconds" not in answers[first].out
    skew = found("clock.skew", seen, answers)
    assert skew[second].verdict == "FAIL"
    shown = re.match(r"\+(\d\.\d) s ", skew[second].observed)
    assert shown, skew[second].observed
    assert abs(float(shown[1]) - 5) <= sum(each.error for each in offsets.values()) + 0.05  # it is rounded to a tenth
    assert skew[first].verdict == skew[third].verdict == "OK"


# --- shares --------------------------------------------------------------------------------------


@contextmanager
def shared(box, folder, names, place):
    """A folder of this machine on some nodes, and a separate empty one on each of the others."""
    for each in box.nodes:
        (box.node_root(each.name) / place.lstrip("/")).mkdir()
    share_folder(box, folder, names, place)
    try:
        yield
    finally:
        for name in names:
            box.enter(name, ["umount", "-l", place])


@contextmanager
def hung(box, name, place):
    """A mount on a node that never answers: FUSE whose other end reads nothing. Unmounted at the end."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
    child = os.fork()
    if not child:
        libc = ctypes.CDLL(None, use_errno=True)
        namespace = os.open(f"/proc/{box.init_process(name).pid}/ns/mnt", os.O_RDONLY)
        done = not libc.setns(namespace, 0x20000)
        done = done and not libc.mount(b"gone:/data", os.fsencode(place), b"fuse", 0, options.encode())
        os._exit(0 if done else 1)
    assert os.waitpid(child, 0)[1] == 0, "FUSE cannot be mounted"
    try:
        yield
    finally:
        os.close(device)  # waiting processes get an error
        box.enter(name, ["umount", "-l", place])


def test_a_share_that_is_fresh_one_that_is_local_and_one_that_hangs(pool, sandbox, tmp_path):
    first, second, third = (node.name for node in pool.inventory.nodes)
    fresh, silent = tmp_path / "fresh", tmp_path / "silent"
    fresh.mkdir()
    silent.mkdir()
    seen = plan(pool, services={"nfs": {"exports": ["/srv/fresh", "/srv/mixed"]}})
    with (
        shared(sandbox, fresh, [first, second, third], "/srv/fresh"),
        shared(sandbox, silent, [first], "/srv/mixed"),
        hung(sandbox, third, "/srv/mixed"),
    ):
        answers = shares.measure(seen, Session(pool.inventory, seen.nodes, connections=pool))
        findings = found("fs.fresh", seen, answers)
        assert {name: finding.verdict for name, finding in findings.items()} == {
            first: "OK",
            second: "FAIL",
            third: "FAIL",
        }
        assert "/srv/mixed is on local disk (overlay" in findings[second].observed
        assert "/srv/mixed (gone:/data): reading got no answer in time" in findings[third].observed
        for name in (first, second, third):  # every node sees the first share correctly
            lines = answers[name].lines
            assert "wrote 0 fine" in lines
            assert "back 0 fine" in lines
    for folder in (fresh, silent, *(sandbox.node_root(name) / "srv/mixed" for name in (second, third))):
        assert list(folder.iterdir()) == []
