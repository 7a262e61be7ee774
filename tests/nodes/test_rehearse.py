"""``rehearse`` on two nodes: every fault in one rehearsal of a job that saves to a small disk, and an interrupt."""

import json
import re
import shutil
import signal
import subprocess

import command
import pytest
from training import PLAIN, wait_until

from provision.rehearsal.faults import NAMES

pytestmark = [pytest.mark.root, pytest.mark.timeout(400)]

JOB = ("steps.py", "--", "--steps", "100000", "--save-every", "10", "--output", "/data/out")
QUICK = ("--lost-after", "3", "--gpus-per-node", "1", "--output", "/data/out")


@pytest.fixture(scope="module")
def nodes(require_sandbox, tmp_path_factory):
    """Two nodes with this machine's root, its Python as the environment, and a disk of 32 MB for checkpoints."""
    from provision import sandbox as sandboxes

    folder = tmp_path_factory.mktemp("rehearse")
    with sandboxes.up(
        sandboxes.Options(nodes=2, name=f"rehearse-{folder.name[-6:]}", directory=folder, rootfs="host")
    ) as box:
        script = (
            "mkdir -p /opt/plain/current/bin /data && ln -sf $(command -v python3) /opt/plain/current/bin/python &&"
            " mount -t tmpfs -o size=32m tmpfs /data && mkdir /data/out && echo mine >/data/out/real"
        )
        for node in box.nodes:
            on(box, node.name, script)
        text = box.inventory.read_text()
        box.inventory.write_text(re.sub(r"^prefix: .*$", "prefix: /opt/plain/current", text, flags=re.MULTILINE))
        shutil.copytree(PLAIN, folder, dirs_exist_ok=True)
        yield box


def on(box, node, script):
    result = box.enter(node, ["sh", "-c", script])
    assert result.returncode == 0, result.stderr
    return result.stdout


def assert_clean(box):
    """Nothing of a rehearsal is left: no process, no rule, no ballast, no output, no run; the real output is."""
    for node in box.nodes:
        left = on(
            box,
            node.name,
            "grep -lsz -e ^CLUSTERCTL_RUN= /proc/[0-9]*/environ; grep -lszFx cc-rehearsal /proc/[0-9]*/cmdline;"
            " nft list tables; ls -A /data; ls -A /data/out; ls /opt/plain/runs",
        )
        assert left.split() == ["out", "real"], left


def test_every_fault_is_injected_survived_and_undone(nodes):
    result = command.run(
        "rehearse", "--yes", "--json", "--minutes", "2", *QUICK, *JOB, cwd=nodes.directory, timeout=360
    )
    assert result.returncode == 0, result.stderr + result.stdout
    found = json.loads(result.stdout)
    by = {each["fault"]: each for each in found["faults"]}
    assert set(by) == set(NAMES)
    resumed = {"kill-agent", "cut-network"}
    assert {name: each["outcome"] for name, each in by.items()} == {
        name: "resumed" if name in resumed else "survived" for name in NAMES
    }, result.stdout
    for name in NAMES:
        assert 0 <= by[name]["recovery_seconds"] < 120
    for name in ("kill-rank", "kill-agent", "stop-rank", "cut-network", "kill-launcher"):
        assert 0 <= by[name]["repeated_steps"] <= 20, by[name]  # it saves every ten steps
        assert "continued from checkpoint-" in by[name]["text"]
    assert by["tear-checkpoint"]["repeated_steps"] >= 1
    assert "SIGKILL" in by["kill-rank"]["text"]
    assert "SIGSTOP" in by["stop-rank"]["text"]
    assert "checkpoint skipped: checkpoint-" in by["tear-checkpoint"]["text"]
    assert "no heartbeat" in by["cut-network"]["text"]
    folder = nodes.directory / "runs" / found["run"]
    assert sorted(path.name for path in folder.iterdir()) == ["certificate.html", "certificate.json"]
    kept = json.loads((folder / "certificate.json").read_text())
    assert kept == {key: value for key, value in found.items() if key != "certificate"}
    assert_clean(nodes)


def test_an_interrupt_undoes_the_fault_and_removes_the_run(nodes):
    argv = ["rehearse", "--yes", "--minutes", "2", "--faults", "fill-disk", *QUICK, *JOB]
    process = subprocess.Popen(
        [command.CLUSTERCTL, *argv],
        cwd=nodes.directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        filled = "find /data -name .clusterctl-ballast"
        wait_until(lambda: on(nodes, nodes.nodes[0].name, filled) or process.poll() is not None, "a full disk", 60)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "its faults are undone, and its run is removed" in output
    assert_clean(nodes)
