"""Data files of services: options and nodes in, scripts or problems out. A new file in ``services/`` is a new test.

A file is named SERVICE.yaml or SERVICE-CASE.yaml and holds part of an inventory:

``options``
    what is below ``services: SERVICE:``.
``nodes`` (optional)
    the inventory's nodes; three nodes with two addresses each if missing.
``problems`` (optional)
    every mistake that the loader reports, without line numbers. Without this key the options are valid, and the file
    with the ending .sh has every step.

``CLUSTERCTL_UPDATE_GOLDEN=1 scripts/test golden`` writes the expected results again. The functions that the steps call
are in ``templates/services/library.sh.j2``.
"""

import os
import re
from pathlib import Path

import pytest
import yaml

from provision import services
from provision.errors import InventoryError
from provision.inventory import load
from provision.model import Inventory
from provision.services.kit import plans

HERE = Path(__file__).parent / "services"
CASES = sorted(path.stem for path in HERE.glob("*.yaml"))
NODES = {"gpu[01-03]": {"address": "10.0.0.[1-3]", "data_address": "10.1.0.[1-3]"}}
UPDATE = bool(os.environ.get("CLUSTERCTL_UPDATE_GOLDEN"))


def text_of(inventory: Inventory, name: str) -> str:
    """The steps of one service, stage by stage. Nodes with equal steps share one entry."""
    parts = []
    for title, plan in (
        ("apply", plans.plan_services(inventory, inventory.nodes, (name,))),
        ("verify", plans.plan_verification(inventory, inventory.nodes, (name,))),
    ):
        for stage, of_nodes in plan.steps.items():
            for steps in dict.fromkeys(of_nodes.values()):
                names = " ".join(node for node, each in of_nodes.items() if each == steps)
                parts.append(f"# ===== {title}, stage {stage}: {names}\n")
                parts += [f"# --- {s.name}\n# unless\n{s.unless}\n# do\n{s.do}\n" for s in steps]
    return "\n".join(part.rstrip("\n") for part in parts) + "\n"


@pytest.mark.parametrize("case", CASES)
def test_case(case, tmp_path):
    name, file = case.partition("-")[0], HERE / f"{case}.yaml"
    given = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert set(given) <= {"options", "nodes", "problems"}
    inventory = {
        "prefix": "/opt/llm/current",
        "nodes": given.get("nodes", NODES),
        "services": {name: given["options"]},
    }
    path = tmp_path / "inventory.yaml"
    path.write_text(yaml.safe_dump(inventory), encoding="utf-8")
    if "problems" in given:
        with pytest.raises(InventoryError) as caught:
            load(path)
        found = [re.sub(r" \(line \d+\):", ":", problem, count=1) for problem in caught.value.problems]
        if UPDATE:
            file.write_text(yaml.safe_dump({**given, "problems": found}, sort_keys=False, width=1000), encoding="utf-8")
        else:
            assert found == given["problems"]
        return
    text = text_of(load(path), name)
    expected = HERE / f"{case}.sh"
    if UPDATE:
        expected.write_text(text, encoding="utf-8")
    assert text == expected.read_text(encoding="utf-8")


def test_every_service_has_a_case_and_every_script_belongs_to_one():
    # The steps of os_packages depend on a bundle's content: tests/sh/test_os_packages_scripts.py has them.
    assert {case.partition("-")[0] for case in CASES} == set(services.names()) - {"os_packages"}
    assert {path.stem for path in HERE.glob("*.sh")} <= set(CASES)
