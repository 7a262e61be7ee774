"""Faults that stop a run, from tables of nodes' answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from provision.checks import Answer
from provision.model import Finding, Node
from provision.run import Facts, readiness
from provision.run.readiness import Content
from provision.run.readiness import compare_content as compare
from provision.run.readiness import parse_content as parse

GIB = 1 << 30


def node(number, **other):
    return Node(f"node0{number}", f"10.0.0.1{number}", **other)


def facts(rank, **other):
    return replace(
        Facts(
            rank=rank,
            hostname=f"node0{rank + 1}",
            master="10.0.0.11",
            master_ip="10.0.0.11",
            ip=f"10.0.0.1{rank + 1}",
            interface="eth0",
            port=29500 if rank == 0 else None,
            disk_free=100 * GIB,
            boot_id=f"boot{rank}",
        ),
        **other,
    )


NODES = (node(1), node(2), node(3))
GOOD = {each.name: facts(rank) for rank, each in enumerate(NODES)}


def seen(findings, *verdicts):
    """``{node: what was observed}`` of these verdicts."""
    return {each.node: each.observed for each in findings if each.verdict in (verdicts or ("FAIL",))}


def with_facts(name, **other):
    return {**GOOD, name: replace(GOOD[name], **other)}


def test_good_nodes_are_fine():
    for findings in (
        readiness.reachable(NODES, GOOD),
        readiness.machines(NODES, GOOD),
        readiness.releases(NODES, dict.fromkeys(GOOD, "a")),
        readiness.room(NODES, GOOD),
        readiness.runs(NODES, GOOD, {}),
    ):
        assert seen(findings, "FAIL", "WARN", "UNKNOWN") == {}


@pytest.mark.parametrize(
    ("name", "other", "words"),
    [
        ("node01", {"port_free": False, "error": "port 29500 is in use"}, "port 29500 is in use"),
        ("node02", {"error": "no route to rank 0 at 10.0.0.11: Network is unreachable"}, "no route to rank 0"),
        ("node02", {"interface": "lo", "master_ip": "127.0.1.1"}, "10.0.0.11 resolves to 127.0.1.1"),
        ("node03", {"rank": 1}, "reports rank 1; the node has rank 2"),
    ],
)
def test_node_without_a_route_to_rank_0(name, other, words):
    found = seen(readiness.reachable(NODES, with_facts(name, **other)))
    assert list(found) == [name]
    assert words in found[name]


def test_a_host_name_that_resolves_to_itself_is_reported_but_stops_nothing():
    findings = list(readiness.reachable(NODES, with_facts("node01", hostname_resolves="loopback")))
    assert seen(findings) == {}
    assert list(seen(findings, "WARN")) == ["node01"]
    assert "/etc/hosts" in next(each.fix for each in findings if each.verdict == "WARN")


def test_single_node_may_use_loopback():
    alone = (node(1),)
    found = readiness.reachable(alone, {"node01": facts(0, interface="lo", hostname_resolves="loopback")})
    assert seen(found, "FAIL", "WARN") == {}


def test_two_names_for_one_machine():
    twins = with_facts("node03", boot_id="boot1", ip="10.0.0.12")
    assert seen(readiness.machines(NODES, twins)) == {"node03": "is the same machine as node02"}


def test_two_nodes_on_one_kernel_with_different_addresses_are_distinct():
    assert seen(readiness.machines(NODES, with_facts("node03", boot_id="boot1"))) == {}


@pytest.mark.parametrize(
    ("releases", "bad"),
    [("aab", ["node03"]), ("baa", ["node01"]), ("abc", ["node01", "node02", "node03"]), ("aaa", [])],
)
def test_environments_that_differ(releases, bad):
    found = seen(readiness.releases(NODES, dict(zip(GOOD, releases, strict=True))))
    assert list(found) == bad


def test_a_full_disk_and_a_small_one():
    found = list(readiness.room(NODES, with_facts("node02", disk_free=1 << 20)))
    assert seen(found) == {"node02": "0.0 GiB free for the run's folder"}
    found = list(readiness.room(NODES, with_facts("node02", disk_free=GIB)))
    assert list(seen(found, "WARN")) == ["node02"]


BEST = {"load_best_model_at_end": True, "deepspeed": "ds.json", "output_dir": "out"}


def test_the_best_model_of_a_deepspeed_run_needs_a_shared_disk():
    found = seen(readiness.best_model(NODES, BEST, is_shared=False))
    assert set(found) == {each.name for each in NODES[1:]}
    assert all("needs the checkpoints of node01" in text for text in found.values())


@pytest.mark.parametrize(
    ("settings", "is_shared"),
    [
        (BEST, True),
        ({**BEST, "output_dir": "/mnt/out"}, False),
        ({**BEST, "save_on_each_node": True}, False),
        ({**BEST, "deepspeed": None}, False),
        ({**BEST, "load_best_model_at_end": False}, False),
        ({}, False),
    ],
)
def test_other_runs_need_no_shared_disk(settings, is_shared):
    assert list(readiness.best_model(NODES, settings, is_shared=is_shared)) == []


def test_more_processes_than_gpus_fail_on_nodes_with_gpus():
    nodes = (node(1, gpus=4), node(2, gpus=2))
    reported = {"node01": facts(0, gpus=2), "node02": facts(1)}
    assert seen(readiness.room(nodes, reported)) == {"node01": "has 2 GPUs, but the inventory says gpus: 4"}


def run(agent=True, visible=None, pids=(11, 12)):
    return {"run": "20261122-sft-1234", "user": "alice", "agent": agent, "pids": list(pids), "visible": visible}


@pytest.mark.parametrize(
    ("gpus", "other", "mine", "verdict", "words"),
    [
        (8, run(), None, "FAIL", "20261122-sft-1234 of alice is running on the same GPUs"),
        (8, run(visible="0,1"), "2,3", "WARN", "on other GPUs"),
        (8, run(visible="0,1"), "1,2", "FAIL", "on the same GPUs"),
        (8, run(visible="0,1"), None, "FAIL", "on the same GPUs"),
        (0, run(), None, "WARN", "on the same cores"),
        (
            8,
            run(agent=False),
            None,
            "FAIL",
            "2 processes left of run 20261122-sft-1234 of alice, whose agent no longer exists",
        ),
        (0, run(agent=False, pids=[7]), None, "WARN", "1 process left of run"),
    ],
)
def test_another_run(gpus, other, mine, verdict, words):
    reported = with_facts("node02", gpus=gpus, runs=(other,))
    (finding,) = readiness.runs(NODES, reported, {"node02": mine} if mine else {})
    assert (finding.node, finding.verdict) == ("node02", verdict)
    assert words in finding.observed
    assert "clusterctl stop 20261122-sft-1234" in finding.fix


APPS = """\
gpu 0, GPU-aaaa
gpu 1, GPU-bbbb
process alice, 4242, 40123, GPU-aaaa, /usr/bin/python3
process alice, 4242, 300, GPU-bbbb, /usr/bin/python3
process root, 99, 26, GPU-bbbb, nvidia-cuda-mps-server
"""


# An H100 with driver 580, on which a program holds one GiB.
REAL = """\
gpu 0, GPU-7afe5c92-d457-6af2-6184-ca769545c675
process root, 431, 1542, GPU-7afe5c92-d457-6af2-6184-ca769545c675, python3
"""


@pytest.mark.parametrize(
    ("text", "reported", "visible", "words"),
    [
        (REAL, {}, {}, "process 431 (python3) of root holds 1542 MiB of GPU 0"),
        (APPS, {}, {}, "process 4242 (python3) of alice holds 40423 MiB of GPU 0, 1"),
        (APPS, {}, {"node02": "1"}, "holds 300 MiB of GPU 1"),
        (APPS, {}, {"node02": "GPU-bb"}, "holds 300 MiB of GPU 1"),
        (APPS, {"runs": (run(pids=[4242]),)}, {}, ""),
        ("gpu 0, GPU-aaaa\nprocess bob, 7, [N/A], GPU-aaaa, train\n", {}, {}, "process 7 (train) of bob holds memory"),
        ("gpu 0, GPU-aaaa\nprocess root, 9, 255, GPU-aaaa, dcgm\n", {}, {}, ""),
        ("gpu 0, GPU-aaaa\n", {}, {}, ""),
    ],
)
def test_programs_on_the_gpus(text, reported, visible, words):
    answers = {"node02": Answer(text), "node03": Answer(state="absent")}
    found = seen(readiness.busy(NODES, answers, with_facts("node02", gpus=2, **reported), visible))
    assert list(found) == (["node02"] if words else [])
    assert words in found.get("node02", "")


def test_fewer_processes_than_gpus_take_the_first_ones():
    nodes = (node(1, gpus=1),)
    text = "gpu 0, GPU-aaaa\ngpu 1, GPU-bbbb\nprocess bob, 7, 5000, GPU-bbbb, train\n"
    assert seen(readiness.busy(nodes, {"node01": Answer(text)}, {"node01": facts(0, gpus=2)}, {})) == {}


def tried(state):
    return Answer(
        f"self 10.0.0.12\ntried node01 master 29500 open 10.0.0.12 10.0.0.12\ntried node01 link 20001 {state}\n"
    )


@pytest.mark.parametrize(
    ("two", "three", "bad"),
    [
        ("open a a", "open a a", []),
        ("timeout", "open a a", ["node02"]),
        ("open a a", "refused", ["node03"]),
        ("timeout", "timeout", ["node01"]),  # no node gets through: it is rank 0's
    ],
)
def test_the_port_of_rank_0s_agent(two, three, bad):
    answers = {"node01": Answer("listen link 20001 open\n"), "node02": tried(two), "node03": tried(three)}
    found = seen(readiness.linked(NODES, answers, 20001))
    assert list(found) == bad
    assert all("20001" in text for text in found.values())


def finding(check, verdict="FAIL", name="node01"):
    return Finding(check, name, verdict, "something", fix="do it")


@pytest.mark.parametrize(
    ("check", "gpus", "before", "after"),
    [
        ("fs.stale", 0, "FAIL", "FAIL"),
        ("gpu.xid", 8, "FAIL", "WARN"),
        ("ib.state", 8, "FAIL", "WARN"),
        ("mem.shm", 8, "FAIL", "FAIL"),
        ("mem.shm", 0, "FAIL", "WARN"),
        ("lim.memlock", 0, "WARN", "OK"),
        ("lim.memlock", 8, "FAIL", "FAIL"),
        ("gpu.used", 8, "UNKNOWN", "UNKNOWN"),
    ],
)
def test_verdicts_of_checks_for_a_run(check, gpus, before, after):
    (each,) = readiness.weighed([finding(check, before)], with_facts("node01", gpus=gpus))
    assert each.verdict == after


def test_only_failures_stop_a_node_and_each_reason_has_a_fix():
    findings = [
        finding("fs.stale", name="node02"),
        finding("net.iface", name="node02"),
        finding("gpu.used", "WARN"),
        finding("gpu.xid", "UNKNOWN"),
    ]
    assert readiness.reasons(NODES, findings) == {"node02": "something; do it (fs.stale)\nsomething; do it (net.iface)"}


def test_ranks_that_have_changed():
    assert readiness.renumbered(NODES[1:], NODES) == "node02 is rank 0, node03 is rank 1"
    assert readiness.renumbered(NODES[:2], NODES) == ""


# --- content -------------------------------------------------------------------------------------

MODEL = Content("folder", "", "n1", "c1", files=2, bytes=30, entries={"config.json": "10 aa", "model.bin": "20 bb"})
OTHER = replace(MODEL, content="c2", entries={**MODEL.entries, "config.json": "10 cc"})
CUT = replace(MODEL, names="n2", content="c3", entries={**MODEL.entries, "model.bin": "15 dd"})
LESS = replace(MODEL, names="n3", content="c4", files=1, entries={"config.json": "10 aa"})
LATE = replace(MODEL, content="c5", partial=True, entries={"config.json": "10 aa", "model.bin": "20 -"})
MANY = Content("folder", "", "n9", "c9", files=999, bytes=30)


@pytest.mark.parametrize(
    ("contents", "bad", "words"),
    [
        ([MODEL, MODEL, MODEL], [], ""),
        ([MODEL, Content(), Content()], ["node02", "node03"], "/data/llama is missing; it exists on node01 only"),
        ([Content(), Content(), Content()], ["node01", "node02", "node03"], "/data/llama is missing"),
        ([MODEL, OTHER, MODEL], ["node02"], "has different content in config.json, compared with node[01,03]"),
        ([MODEL, MODEL, CUT], ["node03"], "has 15 bytes, not 20, in model.bin, compared with node[01-02]"),
        ([LESS, MODEL, MODEL], ["node01"], "lacks model.bin, compared with node[02-03]"),
        ([MODEL, LESS, LESS], ["node01"], "has the extra file model.bin"),
        ([MODEL, LATE, MODEL], [], ""),  # as far as it was read
        ([MODEL, OTHER, CUT], ["node01", "node02", "node03"], "compared with node02"),  # the right one is unknown
        ([MODEL, MODEL, Content("unread", "Permission denied")], ["node03"], "Permission denied"),
        ([MODEL, MODEL, Content("hung", "no answer within 3 s")], ["node03"], "no answer within 3 s"),
        ([MODEL, MODEL, Content("file", files=1)], ["node03"], "is a file, not a folder"),
        (
            [MANY, MANY, replace(MANY, names="n8", files=998)],
            ["node03"],
            "has different names or sizes (998 files, not 999)",
        ),
        ([MANY, MANY, replace(MANY, content="c8")], ["node03"], "has different content"),
        ([MANY, MANY, replace(MANY, content="c8", partial=True)], [], ""),
    ],
)
def test_content_that_differs(contents, bad, words):
    found = seen(compare("/data/llama", dict(zip(GOOD, contents, strict=True)), what="model_name_or_path"))
    assert list(found) == bad
    if bad:
        assert words in found[bad[0]]
        assert "model_name_or_path /data/llama" in found[bad[0]]


def test_two_nodes_that_differ_both_fail():
    assert list(seen(compare("/data", {"node01": MODEL, "node02": OTHER}))) == ["node01", "node02"]


@pytest.mark.parametrize("text", ["", "not JSON", "[]", '{"/data": 1}', '{"/data": [1]}'])
def test_invalid_answer_of_the_agent_is_empty(text):
    assert parse(text) == {}
