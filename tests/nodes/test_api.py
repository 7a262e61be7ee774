"""``provision.api`` on real nodes: the cells of docs/api.md that deploy, and the same release again."""

import os
import re
from pathlib import Path

import pytest
from tiny_env import inventory, make_env, on

from provision import api
from provision import sandbox as sandboxes

pytestmark = pytest.mark.root

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
CELL = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def box(tmp_path_factory, require_sandbox):
    with sandboxes.up(
        sandboxes.Options(nodes=2, name=f"api-test-{os.getpid()}", directory=tmp_path_factory.mktemp("api"))
    ) as box:
        yield box


def test_the_cells_deploy_and_a_second_deploy_changes_nothing(box, tmp_path, monkeypatch, capsys):
    folder = inventory(box, tmp_path / "notebook")
    make_env(folder / "envs/llm")
    monkeypatch.chdir(folder)
    names = {}
    for code, shown in CELL.findall(PAGE.read_text(encoding="utf-8"))[:2]:
        exec(compile(code, "docs/api.md", "exec"), names)
        assert capsys.readouterr().out == shown
    release = names["deployed"].release_id
    for node in box.nodes:
        assert on(box, node.name, "readlink", "-f", "/opt/llm/current").strip() == f"/opt/llm/releases/{release}"
    events = []
    again = api.deploy("llm.ccb", limit="node01", on_event=events.append)
    assert (again.changed, again.bytes_sent, set(again.states)) == (False, 0, {"node01"})
    assert "examine" in {getattr(event, "stage", "") for event in events}
    assert not api.runs().runs
