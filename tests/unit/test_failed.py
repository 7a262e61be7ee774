"""The file for ``--retry-failed``."""

from __future__ import annotations

import json
import signal
from pathlib import PurePosixPath

import pytest

from provision.cli import main
from provision.cli.cluster import FAILED, last_failed, remember_failed
from provision.errors import BundleError, InterruptedByUser, NodesFailedError, PreflightError
from provision.model import Inventory, Node

NODES = tuple(Node(f"gpu{number}", f"10.0.0.{number}") for number in range(1, 5))


@pytest.fixture
def inventory(tmp_path):
    return Inventory(path=tmp_path / "inventory.yaml", prefix=PurePosixPath("/opt/env"), nodes=NODES)


def failed(inventory, command="run"):
    return [node.name for node in last_failed(inventory, command, inventory.nodes)]


def work(inventory, error=None, *, nodes=NODES, command="run", dry_run=False):
    try:
        with remember_failed(inventory, command, nodes, dry_run=dry_run):
            if error:
                raise error
    except type(error or ()):
        pass


def broken(*names, **options):
    return NodesFailedError("x", reasons=dict.fromkeys(names, "why"), **options)


def test_success_keeps_no_file(inventory, tmp_path):
    work(inventory)
    assert list(tmp_path.iterdir()) == []
    assert failed(inventory) == []


def test_failed_nodes_are_kept_until_they_succeed(inventory, tmp_path):
    work(inventory, broken("gpu2", "gpu4"))
    assert failed(inventory) == ["gpu2", "gpu4"]
    assert [node.name for node in last_failed(inventory, "run", NODES[:3])] == ["gpu2"]
    work(inventory, nodes=NODES[:2])
    assert failed(inventory) == ["gpu4"]
    work(inventory, nodes=NODES[3:])
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_the_inventory_no_longer_has_is_forgotten(inventory, tmp_path):
    work(inventory, broken("gpu4"))
    smaller = Inventory(path=inventory.path, prefix=inventory.prefix, nodes=NODES[:3])
    work(smaller, nodes=NODES[:1])
    assert list(tmp_path.iterdir()) == []


def test_failed_nodes_are_kept_per_command_and_inventory(inventory, tmp_path):
    other = Inventory(path=tmp_path / "other.yaml", prefix=PurePosixPath("/opt/env"), nodes=NODES)
    work(inventory, broken("gpu1"))
    work(inventory, broken("gpu2"), command="deploy")
    work(other, broken("gpu3"))
    assert (failed(inventory), failed(inventory, "deploy"), failed(other)) == (["gpu1"], ["gpu2"], ["gpu3"])
    work(inventory)
    assert (failed(inventory), failed(inventory, "deploy"), failed(other)) == ([], ["gpu2"], ["gpu3"])


@pytest.mark.parametrize(
    "error",
    [
        PreflightError("x", reasons={"gpu1": "why"}),
        InterruptedByUser("interrupted"),
        KeyboardInterrupt(),
        broken("gpu1", nothing_done=True),
    ],
)
def test_command_that_changed_nothing_failed_on_all_nodes(inventory, error):
    work(inventory, error, nodes=NODES[:3])
    assert failed(inventory) == ["gpu1", "gpu2", "gpu3"]


def test_an_error_about_no_node_and_a_dry_run_change_nothing(inventory):
    work(inventory, broken("gpu1"))
    work(inventory, BundleError("damaged"))
    work(inventory, dry_run=True)
    work(inventory, broken("gpu3"), dry_run=True)
    assert failed(inventory) == ["gpu1"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"inventory.yaml": 3}', '{"inventory.yaml": {"run": 3}}', "\0"])
def test_foreign_file_is_ignored(inventory, tmp_path, text):
    (tmp_path / FAILED).write_text(text)
    assert failed(inventory) == []
    work(inventory, broken("gpu1"))
    assert failed(inventory) == ["gpu1"]
    assert json.loads((tmp_path / FAILED).read_text())


@pytest.mark.parametrize("command", ["deploy", "run"])
def test_command_reports_that_there_is_nothing_to_retry(command, tmp_path, capsys):
    path = tmp_path / "inventory.yaml"
    path.write_text("prefix: /opt/llm/current\nnodes: {n: 127.0.0.1}\n")
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as end:
            main([command, "--inventory", str(path), "--retry-failed", "--limit", "n", "x"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert end.value.code == 0
    message = capsys.readouterr().out
    assert message == f"nothing to retry: the last {command} failed on none of the selected nodes\n"


def test_a_folder_that_cannot_be_written_to_keeps_nothing(inventory, tmp_path):
    (tmp_path / FAILED).mkdir()
    work(inventory, broken("gpu1"))
    assert failed(inventory) == []
    assert [path.name for path in tmp_path.iterdir()] == [FAILED]
