"""Faults injected into one node of sixteen: ``clusterctl check`` names each of them there, and none on another node.

nvidia-smi's output is an edited recording of a real one; every other fault is real.
"""

import json
import os
import subprocess

import pytest
from command import run
from standin import install, nvidia_smi

NODE = "node07"

# By check: the verdict, words that the finding must hold, and sh that makes it so on the node; "" where nvidia-smi or
# the line before does. The nodes have no ip: it is the machine's, in the node's network.
FAULTS = {
    "gpu.driver": ("FAIL", "570.1", ""),
    "gpu.persist": ("WARN", "GPU 1", ""),
    "gpu.eccmode": ("WARN", "GPU 1", ""),
    "gpu.mig": ("FAIL", "GPU 1", ""),
    "gpu.temp": ("FAIL", "97", ""),
    "gpu.pcie": ("FAIL", "8", ""),
    "gpu.remap": ("FAIL", "row", ""),
    "gpu.throttle": ("FAIL", "slowdown", ""),
    "clock.future": ("WARN", "/var/log", "touch -d '+2 days' /var/log"),
    "cpu.allowed": ("WARN", "0", "taskset -p 1 1"),  # sshd is process 1, and sessions inherit from it
    "env.noexec": ("FAIL", "/tmp", "mount -t tmpfs -o noexec,mode=1777 tmpfs /tmp"),
    "env.vars": ("FAIL", "NCCL_P2P_DISABLE=1", "echo NCCL_P2P_DISABLE=1 >/etc/nccl.conf"),
    "fs.inodes": (
        "FAIL",
        "inodes",
        "mkdir -p /opt/llm; mount -t tmpfs -o noexec,size=64m,nr_inodes=500 tmpfs /opt/llm",
    ),
    "fs.noexec": ("FAIL", "/opt/llm", ""),  # the same mount
    "fs.space": ("FAIL", "/opt/llm", ""),  # the same mount
    "lim.nofile": ("FAIL", "1024", "prlimit --pid 1 --nofile=1024:1024"),
    "lim.nproc": ("FAIL", "1000", "prlimit --pid 1 --nproc=1000:1000"),
    "mem.shm": ("FAIL", "64.0 MiB", "mount -o remount,size=64m /dev/shm"),
    "mem.shmleft": ("WARN", "nccl-fWk3", "echo old >/dev/shm/nccl-fWk3; touch -d '-1 hour' /dev/shm/nccl-fWk3"),
    "net.dns": ("FAIL", "node03", "sed -i '1i 10.1.1.1 node03' /etc/hosts"),
    "net.docker0": ("FAIL", "docker0", "ip link add docker0 up type bridge && ip addr add 10.80.0.25/29 dev docker0"),
    "net.hostname": ("FAIL", "127.0.1.1", "sed -i '1i 127.0.1.1 node07' /etc/hosts"),
    "net.loopback": ("FAIL", "lo", "ip link set lo down"),
    "net.mtu": ("FAIL", "1400", "ip link set eth0 mtu 1400"),
    "net.proxy": ("WARN", "10.1.1.1", "echo 'export https_proxy=http://10.1.1.1:3128' >>/root/.bashrc"),
    "offline.env": ("WARN", "USE_MODELSCOPE_HUB", "echo 'export USE_MODELSCOPE_HUB=1' >>/root/.bashrc"),
    "os.reboot": ("WARN", "reboot", "touch /run/reboot-required"),
    "os.release": ("WARN", "debian 13", "sed -i 's/bookworm/trixie/; s/12/13/' /etc/os-release"),
    "os.tools": ("FAIL", "od", "mv /usr/bin/od /usr/bin/od.away"),
    "proc.orphans": ("FAIL", "20261122-1", "CLUSTERCTL_RUN=20261122-1 setsid sleep 3600 >/dev/null 2>&1 </dev/null &"),
}

# What this machine has differs: these thresholds hold on every node but the one that was made worse.
CHECKS = """
checks:
  fs.space: {free_gib: 0.2}
  fs.inodes: {files: 1000, free_percent: 0}
  fs.tmp: {free_gib: 0.01}
  lim.nofile: {files: 4096}
"""


@pytest.fixture(scope="module")
def before_and_after(require_sandbox, tmp_path_factory):
    """The findings by check and node, before anything was injected and after everything was."""
    from provision import sandbox

    with sandbox.up(sandbox.Options(nodes=16, name=None, directory=tmp_path_factory.mktemp("faults"))) as box:
        made = box.inventory.read_text(encoding="utf-8")
        for node in box.nodes:
            install(box, node.name, nvidia_smi())
        box.inventory.write_text(made + CHECKS, encoding="utf-8")
        before = findings(box, 0)
        # With lo down a look-up waits for a name server on it, and the whole check for that: nodes ask none here.
        box.enter(NODE, ["sh", "-c", "echo 'hosts: files' >/etc/nsswitch.conf"])
        subnet = box.subnet.rpartition(".0.0/")[0]
        for _, _, script in FAULTS.values():
            argv = ["sh", "-c", script.replace("10.80", subnet)]
            if script.startswith("ip "):
                argv = ["nsenter", "--target", str(box.init_process(NODE).pid), "--net", *argv]
                done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
            else:
                done = box.enter(NODE, argv, timeout=60)
            assert not done.returncode, (script, done.stderr)
        edited = [
            ("driver_version", "570.1"),
            ("persistence_mode", "Disabled"),
            ("ecc.mode.current", "Disabled"),
            ("mig.mode.current", "Enabled"),
            ("temperature.gpu", "97"),
            ("pcie.link.width.current", "8"),
        ]
        install(box, NODE, nvidia_smi(changed=edited, also=[("gpu.remap", 0), ("gpu.throttle", 0)]))
        after = findings(box, 4)
        box.inventory.write_text(made, encoding="utf-8")  # so that it goes with the sandbox
    return before, after


def findings(box, code):
    done = run("check", "--json", cwd=box.directory, timeout=280)
    all_found = json.loads(done.stdout)["findings"]
    assert done.returncode == code, (done.stderr, [each for each in all_found if each["verdict"] == "FAIL"])
    found = {}
    for each in all_found:
        found.setdefault(each["check"], {})[each["node"]] = each
    return found


def test_at_least_twenty_faults_are_tested():
    assert len(FAULTS) >= 20


@pytest.mark.parametrize("check", FAULTS)
def test_a_fault_is_named_on_its_node_and_on_no_other(before_and_after, check):
    before, after = before_and_after
    if check == "cpu.allowed" and len(os.sched_getaffinity(0)) < os.cpu_count():
        pytest.skip("the tests run on some processors of this machine only, and so does every node")
    verdict, message, _ = FAULTS[check]
    assert {each["verdict"] for each in before[check].values()} <= {"OK", "N/A"}, before[check][NODE]
    found = after[check].pop(NODE)
    assert (found["verdict"], message in found["observed"]) == (verdict, True), found
    assert found["expected"]
    assert found["why"]
    assert found["fix"]
    assert {node: each["observed"] for node, each in after[check].items() if each["verdict"] not in {"OK", "N/A"}} == {}


def test_the_other_nodes_have_no_findings(before_and_after):
    before, after = before_and_after
    of_the_moment = {"cpu.load", "fs.dstate", "net.slowdns"}  # a busy machine is enough
    changed = {
        (check, node): each["observed"]
        for check, found in after.items()
        for node, each in found.items()
        if node != NODE and each["verdict"] != before[check][node]["verdict"] and check not in of_the_moment
    }
    assert changed == {}
