"""The script that reads a node's facts, under three shells, with and without optional programs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from provision.inventory.new_nodes import read_facts
from provision.render import render

SHELLCHECK = Path(sys.executable).with_name("shellcheck")
SCRIPT = render("enrol/ask.sh.j2")
NEEDED = ("uname", "sed", "timeout", "sleep", "sh")


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Runs the script with some programs only. Returns the facts, and stderr."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in NEEDED:
        (programs / name).symlink_to(shutil.which(name))

    def run(shell, **others):
        for name, text in others.items():
            (programs / name.replace("_", "-")).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name.replace("_", "-")).chmod(0o755)
        # the script's own addition to PATH must find nothing more
        script = SCRIPT.replace("PATH=$PATH:/usr/sbin:/sbin", "")
        assert script != SCRIPT
        words = shell.split()
        argv = [shutil.which(words[0]), *words[1:]]
        done = subprocess.run(
            [*argv, "-c", script],
            env={"PATH": str(programs), "SSH_CONNECTION": "10.0.0.1 4711 10.0.0.2 22"},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        return read_facts(done.stdout), done.stderr

    return run


@pytest.mark.parametrize("shell", ["dash", "bash --posix", "busybox sh"])
def test_host_gpus_and_addresses_are_reported(ask, shell):
    gpus = "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'; echo '  MIG 1g.18gb     Device  0: (UUID: MIG-1)'"
    addresses = r"echo '1: lo    inet 127.0.0.1/8 scope host lo\       valid_lft forever preferred_lft forever'"
    facts, message = ask(shell, nvidia_smi=gpus, ip=addresses)
    assert message == ""
    assert (facts.host, facts.reached, facts.gpus) == (os.uname().nodename, "10.0.0.2", ("NVIDIA H200",))
    assert {interface.name for interface in facts.interfaces} == {
        path.name for path in Path("/sys/class/net").iterdir()
    }
    assert [str(address) for each in facts.interfaces for address in each.addresses] == ["127.0.0.1/8"]


def test_without_iproute2_the_kernel_is_asked(ask):
    before = addresses()
    facts, message = ask("dash", nvidia_smi="exit 9")
    assert message == ""
    assert before & addresses() <= {(each.name, str(at)) for each in facts.interfaces for at in each.addresses}


def test_shellcheck(tmp_path):
    (tmp_path / "a.sh").write_text(SCRIPT)
    done = subprocess.run([SHELLCHECK, "-s", "sh", tmp_path / "a.sh"], capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""


def addresses():
    """The networks of this machine's interfaces; other tests make and remove some meanwhile."""
    argv = ["ip", "-o", "-4", "address", "show", "up"]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    found = {tuple(line.split()[1:4:2]) for line in lines}
    return {(name, address) for name, address in found if name != "lo" and not address.endswith("/32")}
