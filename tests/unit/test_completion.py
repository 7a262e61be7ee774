"""``clusterctl completion``: the words of a shell's Tab key, requested as in the shells' scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from provision.cli import cli
from provision.cli.program import EXAMPLES, GROUPS

INVENTORY = """
prefix: /opt/llm/current
nodes: {"gpu[01-02]": "127.0.0.[1-2]", storage: 127.0.0.3}
groups: {rack1: "gpu[01-02]"}
"""
PROGRAM = Path(sys.executable).with_name("clusterctl")


@pytest.fixture
def offered(run, monkeypatch):
    """The values that bash's script is given for the last word; the folder is the current one."""

    def offered(*words):
        monkeypatch.setenv("_CLUSTERCTL_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", "\n".join(("clusterctl", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        code, out, err = run()
        assert (code, err) == (0, "")
        return [line.partition(",")[2] for line in out.splitlines() if line]

    return offered


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    for run in ("20261122-235943-train-8f68", "20261123-004858-sft-9b5a"):
        folder = tmp_path / "runs" / run
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
    return tmp_path


def test_commands(cluster, offered):
    assert offered("re") == ["rehearse", "releases", "report", "resume"]
    assert offered("sandbox", "") == ["down", "list", "up"]
    assert "--restarts" in offered("train", "--re")


def test_nodes_and_groups(cluster, offered):
    assert offered("check", "--limit", "") == ["gpu01", "gpu02", "storage", "@rack1"]
    assert offered("check", "--exclude", "gpu01,st") == ["gpu01,storage"]
    assert offered("logs", "--node", "gpu02") == ["gpu02"]


def test_nodes_of_another_inventory(cluster, offered):
    other = cluster / "other.yaml"
    other.write_text("prefix: /opt/llm/current\nnodes: {head: 127.0.0.1}\n")
    assert offered("check", "-i", "other.yaml", "--limit", "") == ["head"]


def test_runs_the_newest_first(cluster, offered):
    assert offered("stop", "") == ["20261123-004858-sft-9b5a", "20261122-235943-train-8f68"]
    assert offered("status", "20261122") == ["20261122-235943-train-8f68"]


def test_patterns_of_pack_env_are_not_completed_as_nodes(cluster, offered):
    assert offered("pack-env", "--exclude", "") == []


def test_nothing_without_an_inventory(tmp_path, offered):
    assert offered("check", "--limit", "") == []
    assert offered("rollback", "--to", "") == []


def test_no_releases_where_no_node_answers(tmp_path, offered):
    (tmp_path / "inventory.yaml").write_text("prefix: /opt/llm/current\nnodes: {n: '127.0.0.1:1'}\n")
    assert offered("rollback", "--to", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_calls_clusterctl(run, shell):
    code, out, err = run("completion", shell)
    assert (code, err) == (0, "")
    assert f"_CLUSTERCTL_COMPLETE={shell}_complete" in out


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_completes_with_the_script(cluster):
    script = subprocess.run([PROGRAM, "completion", "bash"], check=True, capture_output=True, text=True).stdout
    program = script + '\nCOMP_WORDS=(clusterctl check --limit sto); COMP_CWORD=3\n_clusterctl_completion "$PROGRAM"\n'
    program += 'echo "${COMPREPLY[@]}"\n'
    result = subprocess.run(
        ["bash", "-c", program],
        check=True,
        capture_output=True,
        text=True,
        cwd=cluster,
        env={**os.environ, "PROGRAM": str(PROGRAM)},
        timeout=60,
    )
    assert result.stdout == "storage\n"


def test_an_unknown_shell_is_refused(run):
    code, _, err = run("completion", "tcsh")
    assert code == 2
    assert "'tcsh' is not one of bash, fish, zsh" in err


def test_the_groups_of_the_help_name_every_command_once():
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == cli.list_commands(None)


def test_the_help_shows_groups_and_examples(run):
    _, out, _ = run("--help")
    assert [line[:-1] for line in out.splitlines() if line in {f"{title}:" for title in GROUPS}] == list(GROUPS)
    _, out, _ = run("sandbox", "up", "--help")
    assert out.endswith(f"Example:\n    {EXAMPLES['sandbox up'][0]}\n")
