"""An inventory in, the steps of every service out: what each node would be asked, to be read in review.

``CLUSTERCTL_UPDATE_GOLDEN=1 scripts/test golden`` writes the files anew. The functions that the steps call are those of
``templates/services/library.sh.j2``.
"""

import os
from pathlib import Path

import pytest

from provision import services
from provision.inventory import load
from provision.model import Inventory
from provision.services import plans

HERE = Path(__file__).parent / "services"
CASES = sorted(path.stem for path in HERE.glob("*.yaml"))
NODES = """\
prefix: /opt/llm/current
nodes:
  gpu[01-03]: {address: '10.0.0.[1-3]', data_address: '10.1.0.[1-3]'}
services:
"""


def text_of(inventory: Inventory, name: str) -> str:
    """The steps of one service, stage by stage; equal nodes once."""
    parts = []
    for title, plan in (
        ("apply", plans.planned(inventory, inventory.nodes, (name,))),
        ("verify", plans.verifying(inventory, inventory.nodes, (name,))),
    ):
        for stage, of_nodes in plan.steps.items():
            for steps in dict.fromkeys(of_nodes.values()):
                names = " ".join(node for node, each in of_nodes.items() if each == steps)
                parts.append(f"# ===== {title}, stage {stage}: {names}\n")
                parts += [f"# --- {s.name}\n# unless\n{s.unless}\n# do\n{s.do}\n" for s in steps]
    return "\n".join(part.rstrip("\n") for part in parts) + "\n"


@pytest.mark.parametrize("case", CASES)
def test_steps(case, tmp_path):
    """A case is named SERVICE or SERVICE-WHAT, its file holds the service's options."""
    name = case.partition("-")[0]
    path = tmp_path / "inventory.yaml"
    path.write_text(NODES + (HERE / f"{case}.yaml").read_text(), encoding="utf-8")
    text = text_of(load(path), name)
    expected = HERE / f"{case}.sh"
    if os.environ.get("CLUSTERCTL_UPDATE_GOLDEN"):
        expected.write_text(text, encoding="utf-8")
    assert text == expected.read_text(encoding="utf-8")


def test_every_service_has_a_case_and_every_file_belongs_to_one():
    # What os_packages asks of a node is in its bundle: tests/sh/test_os_packages_scripts.py has one.
    assert {case.partition("-")[0] for case in CASES} == set(services.ORDER) - {"os_packages"}
    assert {path.stem for path in HERE.glob("*.sh")} == set(CASES)
