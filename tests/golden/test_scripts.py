"""Inventory and bundle in, scripts out: what a node would be sent, to be read in review.

``CLUSTERCTL_UPDATE_GOLDEN=1 scripts/test golden`` writes the files anew.
"""

import os
from pathlib import Path, PurePosixPath

import pytest

from provision.env import release
from provision.env.manifest import Entry, Manifest, PrefixFiles
from provision.model import Inventory, Node
from provision.script import compile_steps

HERE = Path(__file__).parent / "scripts"


def scripts(prefix):
    inventory = Inventory(Path("inventory.yaml"), PurePosixPath(prefix), (Node("node01", "10.0.0.1"),))
    manifest = Manifest(
        name="llm",
        tool="0.1.0",
        created="2026-11-21T08:00:00Z",
        platform="linux-64",
        python="3.11.7",
        source_prefix="/envs/llm",
        chunks=(),
        prefix_files=PrefixFiles(0, 0, 0, "", ""),
        files=tuple(Entry(f"bin/{name}", "file", 0o755, 0, 1, "a" * 64) for name in ("deepspeed", "torchrun")),
        relocations=(("/envs/llm", ""),),
        versions={"torch": "2.13.0", "deepspeed": "0.19.8"},
    )
    send, activate = release.steps(inventory, manifest)
    return {
        "examine": release.examine(inventory, manifest),
        "send": compile_steps(send, token="TOKEN"),
        "activate": compile_steps(activate, token="TOKEN"),
        "activate-dry-run": compile_steps(activate, token="TOKEN", dry_run=True),
    }


@pytest.mark.parametrize("case", ["plain", "nasty"])
@pytest.mark.parametrize("stage", ["examine", "send", "activate", "activate-dry-run"])
def test_script(case, stage):
    prefix = {"plain": "/opt/llm/current", "nasty": '/opt/it\'s $(id) "x"/current'}[case]
    text = scripts(prefix)[stage]
    path = HERE / f"deploy-{stage}-{case}.sh"
    if os.environ.get("CLUSTERCTL_UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
