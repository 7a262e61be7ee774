"""The nfs service: options, refusals, and the steps of each node."""

from pathlib import Path

import pytest

from provision.errors import InventoryError
from provision.inventory import load
from provision.services.kit import plans

NODES = "prefix: /opt/llm/current\nnodes:\n  gpu[01-03]: {address: '10.0.0.[1-3]', data_address: '10.1.0.[1-3]'}\n"


def read(folder, options):
    path = Path(folder) / "inventory.yaml"
    path.write_text(f"{NODES}services:\n  nfs: {options}\n", encoding="utf-8")
    return load(path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("{exports: [data]}", "data is not an absolute path"),
        ("{exports: [/data/../etc]}", "contains `..`"),
        ("{exports: [/]}", "/ belongs to the system"),
        ("{exports: [/usr/]}", "/usr belongs to the system"),
        ("{exports: [/etc/share]}", "/etc/share belongs to the system"),
        ("{exports: ['/data/my models']}", "cannot be written to both"),
        ("{exports: ['/data/$(id)']}", "cannot be written to both"),
        ("{exports: [/data, /data/]}", "/data is listed twice"),
        ("{exports: [/data/models, /data]}", "/data/models is in /data"),
        ("{exports: []}", "is empty: list at least one folder"),
        ("{exports: /data}", "must be a list"),
        ("{server: gpu09}", "no node is called gpu09"),
        ("{threads: 0}", "greater than or equal to 1"),
        ("{threads: true}", "must be a whole number"),
        ("{connections: 17}", "less than or equal to 16"),
        ("{path: /data}", "unknown key"),
        ("{automout: true}", "did you mean automount"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_their_place(options, sentence, tmp_path):
    with pytest.raises(InventoryError) as caught:
        read(tmp_path, options)
    (problem,) = caught.value.problems
    assert sentence in problem
    assert problem.startswith("services.nfs")


def test_neighbours_with_a_common_beginning_do_not_overlap(tmp_path):
    assert read(tmp_path, "{exports: [/data, /data2, /home]}").services["nfs"].exports == ("/data", "/data2", "/home")


def test_the_server_exports_to_every_address_of_the_others_which_mount_its_data_address(tmp_path):
    cluster = read(tmp_path, "{server: gpu02, exports: [/data]}")
    plan = plans.plan_services(cluster, cluster.nodes, ("nfs",))
    assert {stage: plan.nodes(stage) for stage in plan.steps} == {"serve": ("gpu02",), "follow": ("gpu01", "gpu03")}
    serving = "\n".join(step.do for step in plan.steps["serve"]["gpu02"])
    for address in ("10.1.0.1", "10.0.0.1", "10.1.0.3", "10.0.0.3"):
        assert f"/data {address}(rw,sync,no_subtree_check,root_squash)" in serving
    assert "10.0.0.2(" not in serving
    assert all("10.1.0.2:/data" in step.do for step in plan.steps["follow"]["gpu01"] if "mounted" in step.name)


def test_a_single_node_serves_and_no_node_mounts(tmp_path):
    path = tmp_path / "inventory.yaml"
    path.write_text("prefix: /opt/llm/current\nnodes: {gpu01: 10.0.0.1}\nservices: {nfs: {}}\n", encoding="utf-8")
    cluster = load(path)
    plan = plans.plan_services(cluster, cluster.nodes, ("nfs",))
    assert list(plan.steps) == ["serve"]
