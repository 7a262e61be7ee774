"""The command line on this machine: no traceback for anything that a user can cause."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from provision.env.bundle.reader import open_bundle
from provision.errors import UsageError
from provision.model import Node, Step
from provision.tasks.deploy import write_scripts
from provision.tool import pack as tool_pack
from provision.tool.contents import Contents, Item

LONG = "x" * 300  # no file can have this name: root may read everything, and yet this is an OSError
INVENTORY = "prefix: /opt/llm/current\nnodes: {n: 127.0.0.1}\n"


@pytest.fixture
def run(run, tmp_path, monkeypatch):
    """Runs a command in a folder with an inventory, which is also the home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    return run


@pytest.fixture
def env(tmp_path):
    """The least that is an environment."""
    prefix = tmp_path / "envs" / "least"
    (prefix / "conda-meta").mkdir(parents=True)
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python").symlink_to(sys.executable)
    return prefix


@pytest.mark.parametrize(
    ("argv", "printed"),
    [
        (["pack-env", f"./{LONG}"], f"cannot read .*{LONG}: file name too long"),
        (["pack-env", LONG], "there is no conda environment named"),
        (["pack-env", f"{LONG}.ccb", "--format", "conda-pack"], "there is no conda environment named"),
        (["pack-env", "envs/least", "-o", LONG], f"cannot write {LONG}: File name too long"),
        (["pack-env", "envs/least", "-o", f"{LONG}.tar", "--format", "conda-pack"], "cannot write .*: File name too"),
        (["pack-env", "envs/least", "-o", "envs/least/x.tar", "--format", "conda-pack"], "inside the environment"),
        (["pack-tool", "-o", LONG], f"cannot write {LONG}: File name too long"),
        (["pack-tool", "-o", "envs"], "envs is a folder"),
        (["deploy", f"{LONG}.tar.gz"], "cannot read .*: File name too long"),
        (["deploy", f"{LONG}.ccb"], "cannot read .*: File name too long"),
        (["inspect", LONG], "cannot read .*: File name too long"),
        (["diff", LONG, LONG], "cannot read .*: File name too long"),
    ],
    ids=lambda value: " ".join(value).replace(LONG, "LONG") if isinstance(value, list) else "",
)
def test_a_path_that_cannot_be_used_is_named(run, env, monkeypatch, argv, printed):
    monkeypatch.setattr(tool_pack, "contents", lambda _python: Contents({}, (2, 17)))
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert re.search(rf"^error: .*{printed}", err, re.MULTILINE), err


@pytest.mark.parametrize(
    ("argv", "printed"),
    [
        (["deploy", "missing.ccb"], "missing.ccb"),
        (["deploy"], "no bundle"),
        (["deploy", "--limit", "nobody"], "nobody"),
        (["deploy", "--inventory", "nothing.yaml"], "nothing.yaml"),
        (["deploy", "--scripts", "x"], "--dry-run"),
        (["pack-env", "/nonexistent/env"], "/nonexistent/env"),
        (["pack-env", "/usr"], "conda-meta"),
        (["train", "--nodes", "3"], "3"),
        (["train", "--nodes", "0"], "0"),
        (["train"], "no training configuration"),
        (["train", "missing.yaml"], "missing.yaml"),
        (["frobnicate"], "frobnicate"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_named(run, argv, printed):
    code, _, err = run(*argv)
    assert code in ({2, 3} if "missing.ccb" in argv else {2}), err
    assert printed in " ".join(err.split())


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
@pytest.mark.parametrize("where", ["x.tar.gz", "locked/x.tar.gz"])
def test_an_unreadable_archive_is_named(run, monkeypatch, where):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own folders are root's alone
        monkeypatch.chdir(folder)
        Path(folder).chmod(0o755)
        Path("inventory.yaml").write_text(INVENTORY)
        Path("locked").mkdir(mode=0o700)
        Path(where).touch(mode=0o600)
        assert run("deploy", where)[0] == 3  # which loads every module: they may lie where only root looks
        os.seteuid(65534)
        try:
            code, _, err = run("deploy", where)
        finally:
            os.seteuid(0)
    assert (code, err) == (2, f"error: cannot read {where}: Permission denied\n")


@pytest.mark.parametrize(
    ("error", "printed"),
    [
        (PermissionError(13, "Permission denied", "/x/y"), "cannot use /x/y: Permission denied"),
        (OSError(5, "Input/output error"), "Input/output error"),
        (OSError("a word of its own"), "a word of its own"),
    ],
)
def test_unexpected_system_error_is_shown_without_a_traceback(run, monkeypatch, error, printed):
    def refuse(*_args, **_options):
        raise error

    monkeypatch.setattr("provision.tasks.bundles.inspect", refuse)
    assert run("inspect", "x") == (2, "", f"error: {printed}\n")
    code, out, _ = run("inspect", "x", "--json")
    assert (code, json.loads(out)["error"]["message"]) == (2, printed)


def test_scripts_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write the scripts to .*/file: File exists"):
        write_scripts(tmp_path / "file", [Node("n", "n")], "true", [Step("s", "true")])
    with pytest.raises(UsageError, match=r"cannot write the scripts to .*/file/in: Not a directory"):
        write_scripts(tmp_path / "file" / "in", [Node("n", "n")], "true", [Step("s", "true")])
    write_scripts(tmp_path / "new" / "folder", [Node("n", "n")], "true", [Step("s", "true")])
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["n-1-gather.sh", "n-2-activate.sh"]


def test_an_environment_is_packed_with_the_tool_that_deploys_it_beside_it(run, env, tmp_path, monkeypatch):
    tool = {"clusterctl": Item(b'#!/bin/sh\necho I run: "$@"\n', executable=True)}
    monkeypatch.setattr(tool_pack, "contents", lambda _python: Contents(tool, (2, 17)))
    (tmp_path / "stick").mkdir()
    code, out, err = run("pack-env", "envs/least", "-o", "stick/least.ccb", "--with-tool", "--json")
    assert code == 0, err
    printed = json.loads(out)
    assert (printed["bundle"], printed["tool"]["file"]) == ("stick/least.ccb", "stick/clusterctl.run")
    open_bundle(tmp_path / "stick" / "least.ccb")
    assert sorted(path.name for path in (tmp_path / "stick").iterdir()) == ["clusterctl.run", "least.ccb"]
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    argv = ["sh", tmp_path / "stick" / "clusterctl.run", "deploy", "least.ccb"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "I run: deploy least.ccb\n"), done.stderr
