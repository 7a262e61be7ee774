"""Nodes with a real sudo: the minimal root has none."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

FREE = "trainer ALL=(ALL) NOPASSWD: ALL\n"
ASKING = "trainer ALL=(ALL) ALL\n"


def install(box):
    """Install Debian's sudo on every node of a sandbox; it allows nothing to any user yet."""
    for node in box.nodes:
        shutil.copy(_package(), box.node_root(node.name) / "tmp/sudo.deb")
        done = box.enter(node.name, ["dpkg", "-i", "/tmp/sudo.deb"])
        assert done.returncode == 0, done.stderr


def allow(box, *texts):
    """Write what sudo allows: one text of sudoers for all nodes, or one for each."""
    for node, text in zip(box.nodes, texts * (len(box.nodes) // len(texts)), strict=True):
        file = box.node_root(node.name) / "etc/sudoers.d/test"
        file.write_text(text)
        file.chmod(0o440)


@cache
def _package():
    """The package of the release that this machine and minimal nodes have."""
    folder = Path(tempfile.mkdtemp(prefix="clusterctl-sudo-"))
    atexit.register(shutil.rmtree, folder)
    folder.chmod(0o755)
    argv = ["apt-get", "download", "-q", "sudo"]
    if subprocess.run(argv, cwd=folder, capture_output=True, check=False).returncode:
        subprocess.run(["apt-get", "update", "-q"], capture_output=True, check=True)
        subprocess.run(argv, cwd=folder, capture_output=True, check=True)
    (package,) = folder.glob("*.deb")
    return package
