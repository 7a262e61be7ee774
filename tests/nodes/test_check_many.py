"""``clusterctl check`` on 64 nodes: a dead one and one whose nvidia-smi hangs do not delay the others."""

import json
from collections import Counter

import pytest
from command import run
from standin import install, nvidia_smi

from provision import checks

DEAD, HANGS = "node05", "node23"
ASKED = 4  # seconds that the inventory gives a connection


@pytest.fixture(scope="module")
def answer(require_sandbox, tmp_path_factory):
    """The one run of this file: all checks of level 0 on 64 nodes."""
    from provision import sandbox

    with sandbox.up(sandbox.Options(nodes=64, name=None, directory=tmp_path_factory.mktemp("many"))) as box:
        healthy = nvidia_smi()
        for node in box.nodes:
            hangs = "#!/bin/sh\necho 'NVIDIA-SMI 580'\nexec sleep 3600\n"
            install(box, node.name, hangs if node.name == HANGS else healthy)
        box.power_off(DEAD)
        text = box.inventory.read_text(encoding="utf-8")
        box.inventory.write_text(text.replace("ssh: {", f"ssh: {{timeout: {ASKED}, "), encoding="utf-8")
        done = run("check", "--json", cwd=box.directory, timeout=280)
        dead = run("check", "--only", "cpu.count", "--limit", "node[04-05]", cwd=box.directory)
        box.inventory.write_text(text, encoding="utf-8")  # so that it goes with the sandbox
    return done, json.loads(done.stdout), dead


def test_the_dead_node_is_named_and_all_others_have_answered(answer):
    done, data, _dead = answer
    assert list(data["unreachable"]) == [DEAD]
    assert len(data["nodes"]) == 63
    assert done.returncode == 4  # for what hangs; 5 is for the dead one alone
    assert DEAD in done.stderr
    asked = [check for check in data["checks"] if checks.load(check).level == 0]
    assert len(asked) >= 50
    assert Counter(finding["node"] for finding in data["findings"]) == dict.fromkeys(data["nodes"], len(data["checks"]))


def test_the_tool_that_hangs_is_named_on_its_node_only(answer):
    _done, data, _dead = answer
    silent = [finding for finding in data["findings"] if "no answer from" in finding["observed"]]
    assert {finding["node"] for finding in silent} == {HANGS}
    assert {finding["check"] for finding in silent} >= {"gpu.driver", "gpu.mig", "gpu.nvlink"}
    assert all(checks.load(finding["check"]).tool == "nvidia-smi" for finding in silent)
    verdicts = {finding["check"]: finding["verdict"] for finding in silent}
    assert verdicts["gpu.driver"] == "FAIL"
    assert set(verdicts.values()) <= {"FAIL", "UNKNOWN"}


def test_the_gpus_of_all_other_nodes_are_known(answer):
    _done, data, _dead = answer
    for check in ("gpu.driver", "gpu.temp", "gpu.nvlink"):
        found = {each["node"]: each["verdict"] for each in data["findings"] if each["check"] == check}
        assert {verdict for node, verdict in found.items() if node != HANGS} <= {"OK", "N/A"}, check
    other = {each["verdict"] for each in data["findings"] if each["node"] == HANGS and each["check"] == "mem.shm"}
    assert other == {each["verdict"] for each in data["findings"] if each["check"] == "mem.shm"}


def test_a_dead_node_alone_fails_with_its_own_message(answer):
    _done, _data, dead = answer
    assert dead.returncode == 5
    assert "no answer from 1 of 2 nodes" in dead.stderr
    assert "node04: 1 check" in dead.stdout
    assert "--exclude node05" in dead.stderr
