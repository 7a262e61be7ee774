"""The script that becomes root, where the ssh user is root already; with sudo: ``tests/nodes/test_become.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from provision.render import render
from provision.ssh.wire import AS_ROOT, BOOTSTRAP, Framed, frame

SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def script(*, quietly=True):
    return render("ssh/become.sh.j2", token="T", as_root=AS_ROOT, quietly=quietly)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("login", ["dash", "bash --posix", "busybox sh", "tcsh", "fish"])
def test_root_script_reads_exactly_its_input(login):
    words = login.split()
    done = subprocess.run(
        [*words, "-c", BOOTSTRAP],
        input=frame(script(), "outer") + frame("echo $#; cat; exit 3", "inner") + b"\0input\n\n",
        capture_output=True,
        check=False,
        timeout=60,
    )
    out, err = Framed("inner"), Framed("inner")
    out.feed(done.stdout)
    err.feed(done.stderr)
    assert (out.text(), out.rc, err.text(), err.rc) == ("0\n\0input\n\n", 3, "", 3)
    assert out.group
    assert b"@clusterctl:T:ready:" in done.stderr


@pytest.mark.parametrize("quietly", [True, False])
def test_shellcheck(quietly, tmp_path):
    (tmp_path / "a.sh").write_text(script(quietly=quietly))
    (tmp_path / "root.sh").write_text(AS_ROOT)
    for name in ("a.sh", "root.sh"):
        argv = [SHELLCHECK, "-s", "sh", tmp_path / name]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.stdout + done.stderr == ""
