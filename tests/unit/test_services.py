"""Services as data: which node gets which steps in which stage, and what an inventory may ask for."""

import ast
from pathlib import Path, PurePosixPath

import pytest

from provision import services
from provision.errors import InventoryError, UsageError
from provision.inventory import load
from provision.inventory.schema import Section
from provision.model import Inventory, Node, StepResult
from provision.services import chrony, hosts, limits, tmpfs
from provision.services.kit import plans
from provision.summaries.nodes import services_output
from provision.tasks.services import ServicesResult

NODES = tuple(Node(f"gpu0{n}", f"10.0.0.{n}", f"10.1.0.{n}") for n in (1, 2, 3))


def cluster(**asked):
    return Inventory(Path("i.yaml"), PurePosixPath("/opt/llm/current"), NODES, services=asked)


@pytest.mark.parametrize("name", services.names())
def test_every_service_has_the_required_names(name):
    module = services.get(name)
    assert module.ABOUT
    assert issubclass(module.Options, Section)
    assert all(callable(getattr(module, each)) for each in ("problems", "plan", "verify"))


def test_a_service_comes_after_those_it_needs():
    order = services.ordered()
    assert sorted(order) == list(services.names())
    for name in order:
        assert all(order.index(before) < order.index(name) for before in services.get(name).AFTER)


@pytest.mark.parametrize("name", [name for name in services.names() if name != "os_packages"])
def test_names_of_steps_are_unique_and_stages_are_known(name):
    module = services.get(name)
    options = module.Options()
    for duty in [
        *module.plan(options, cluster(**{name: options})),
        *module.verify(options, cluster(**{name: options})),
    ]:
        assert duty.stage in plans.STAGES
        assert duty.node in {node.name for node in NODES}
        assert len({step.name for step in duty.steps}) == len(duty.steps)


def test_the_head_serves_and_the_others_follow():
    plan = plans.plan_services(cluster(chrony=chrony.Options(head="gpu02")), NODES, ("chrony",))
    assert {stage: plan.nodes(stage) for stage in plan.steps} == {"serve": ("gpu02",), "follow": ("gpu01", "gpu03")}
    assert "server 10.1.0.2 iburst" in plan.steps["follow"]["gpu01"][2].do
    assert "allow 10.1.0.3" in plan.steps["serve"]["gpu02"][2].do


def test_a_plan_for_some_nodes_still_knows_all_of_them():
    plan = plans.plan_services(cluster(hosts=hosts.Options()), NODES[1:2], ("hosts",))
    assert plan.nodes("base") == ("gpu02",)
    assert "10.1.0.3 gpu03" in plan.steps["base"]["gpu02"][0].do


def test_services_keep_their_order_for_any_inventory():
    asked = cluster(chrony=chrony.Options(), limits=limits.Options(), hosts=hosts.Options())
    assert plans.choose(asked) == ("hosts", "limits", "chrony")
    assert plans.choose(asked, ("chrony", "hosts")) == ("hosts", "chrony")
    assert plans.choose(cluster()) == ()


def test_service_missing_in_the_inventory_is_refused_with_a_hint():
    with pytest.raises(UsageError, match=r"does not configure the service limits") as caught:
        plans.choose(cluster(hosts=hosts.Options()), ("limits",))
    assert "limits: {}" in caught.value.hint
    with pytest.raises(UsageError, match="ntp is not a service") as caught:
        plans.choose(cluster(), ("ntp",))
    assert "chrony" in caught.value.hint


def test_hosts_needs_numbers(tmp_path):
    path = tmp_path / "inventory.yaml"
    path.write_text("prefix: /opt/llm/current\nnodes: {gpu01: gpu01.lan, gpu02: 10.0.0.2}\nservices: {hosts: {}}\n")
    with pytest.raises(InventoryError) as caught:
        load(path)
    assert caught.value.problems == (
        "services.hosts (line 3): gpu01's address gpu01.lan is not an IP address, as /etc/hosts requires",
    )


def test_a_size_of_shared_memory_is_a_share_or_a_size():
    assert limits.Options.model_validate({"shm": "50%"}).shm == "50%"
    for wrong in ("0G", "-1G", "1.5G", "500%%", 12, "$(reboot)"):
        with pytest.raises(ValueError, match="size of a tmpfs"):
            limits.Options.model_validate({"shm": wrong})
        with pytest.raises(ValueError, match="size of a tmpfs"):
            tmpfs.Options.model_validate({"size": wrong})
    assert tmpfs.Options().size == "50%"


def test_summary_folds_nodes_and_names_differences():
    good, bad = StepResult("hosts: names", "ok"), StepResult("hosts: names", "would change")
    result = ServicesResult(("hosts",), {"gpu01": (good,), "gpu02": (good,), "gpu03": (bad,)}, dry_run=True)
    data, text = services_output(result, "status")
    assert text == "hosts  gpu[01-02]: up to date\n       gpu03: differs: names"
    assert data["changed"] is True
    assert data["nodes"]["gpu03"]["steps"][0]["state"] == "would change"
    assert services_output(result, "apply")[1].splitlines()[-1] == "dry run: nothing was written on any node"


def test_summary_of_a_verification_has_the_messages_of_nodes():
    wrong = StepResult("nfs: fresh", "failed", "no token\nwithin 5 s")
    result = ServicesResult(("nfs",), {"gpu01": (wrong,), "gpu02": (StepResult("nfs: fresh", "ok"),)})
    assert services_output(result, "verify")[1] == (
        "nfs  gpu01: does not work: fresh: no token within 5 s\n     gpu02: works"
    )


def test_nothing_to_undo_is_one_line():
    ok = tuple(StepResult(f"{name}: undo", "ok") for name in services.ordered())
    result = ServicesResult(services.ordered(), {"gpu01": ok, "gpu02": ok})
    assert services_output(result, "undo")[1] == "gpu[01-02]: nothing to undo"


def test_tasks_name_no_service():
    """What a service needs beyond its steps is data, such as its packages; no task has a rule for one service."""
    tasks = Path(services.__file__).parents[1] / "tasks"
    for path in (tasks / "services.py", tasks / "deploy.py"):
        named = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not named & set(services.names()), path
