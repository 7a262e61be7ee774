"""The steps of the service opensm on simulated hosts: its own scripts under dash, opensm and the tools for real.

systemctl is a stand-in that really starts and stops opensm (``scripts/lab/standin_systemctl.sh``).
"""

import json
import os
import signal
import subprocess
from pathlib import Path, PurePosixPath

import pytest
from ib_fabric import star

from provision.model import Inventory, Node, Step
from provision.script import parse
from provision.services import opensm
from provision.services.kit import plans
from provision.services.kit.scripts import apply_script, undo_step, verify_script

HOSTS = ["node01", "node02", "node03"]


class Cluster:
    """Three nodes, and what ``clusterctl services`` would do on each of them."""

    def __init__(self, fabric, *, unit="opensm.service", oneshot=False, node=None):
        self.fabric, self.unit = fabric, unit
        self.units = {host: fabric.systemd(host, unit, oneshot=oneshot) for host in HOSTS}
        nodes = tuple(Node(host, host) for host in HOSTS)
        options = opensm.Options(node=node)
        self.inventory = Inventory(Path("i"), PurePosixPath("/opt/x"), nodes, services={"opensm": options})

    def apply(self, host, *, dry_run=False):
        steps = self._steps(plans.plan_services, host)
        return self._run(host, apply_script(steps, "t", dry_run=dry_run, state=self._state(host)))

    def verify(self, host):
        """The problems, by step."""
        results = self._run(host, verify_script(self._steps(plans.plan_verification, host), "t"))
        return {name: detail for name, (state, detail) in results.items() if state != "ok"}

    def undo(self, host):
        state = self._state(host)
        step = undo_step("opensm")
        return self._run(host, apply_script([Step(step.name, step.do, f"[ ! -d {state}/opensm ]")], "t", state=state))

    def states(self, host, **options):
        return {name: state for name, (state, _) in self.apply(host, **options).items()}

    def running(self, host):
        return self.fabric.run(host, "systemctl", "is-active", self.unit).stdout.strip()

    def pid(self, host):
        return int((self.units[host] / f"{self.unit}.pid").read_text())

    def crash(self, host):
        os.kill(self.pid(host), signal.SIGKILL)

    def port(self, host):
        return self.fabric.run(host, "cat", "/sys/class/infiniband/ibsim0/ports/1/state").stdout.strip()

    def _steps(self, what, host):
        plan = what(self.inventory, self.inventory.nodes, ("opensm",))
        return [step for stage in plans.STAGES for step in plan.steps.get(stage, {}).get(host, ())]

    def _run(self, host, text):
        done = self.fabric.sh(host, text)
        results = parse("t", done.stdout)
        assert results, done.stderr
        return {each.name.removeprefix("opensm: "): (each.state, each.detail) for each in results}

    def _state(self, host):
        return PurePosixPath(self.fabric.home(host) / "state/services")


def test_apply_activates_ports_once_and_undo_reverts_it(make):
    cluster = Cluster(make(star(HOSTS)), node="node02")
    would = cluster.states("node02", dry_run=True)
    assert (would["running"], would["answers"]) == ("would change", "would change")
    assert (cluster.running("node02"), cluster.port("node03")) == ("inactive", "2: INIT")
    assert cluster.states("node02")["running"] == "changed"
    assert set(cluster.states("node02").values()) == {"ok"}
    assert [cluster.port(host) for host in HOSTS] == ["4: ACTIVE"] * 3
    assert [cluster.running(host) for host in HOSTS] == ["inactive", "active", "inactive"]
    assert (cluster.units["node02"] / "opensm.service.enabled").exists()
    for host in ("node01", "node03"):
        assert set(cluster.states(host).values()) == {"ok"}
    assert {host: cluster.verify(host) for host in HOSTS} == {host: {} for host in HOSTS}
    assert cluster.undo("node02") == {"undo": ("changed", "")}
    assert cluster.running("node02") == "inactive"
    assert not (cluster.units["node02"] / "opensm.service.enabled").exists()
    assert cluster.undo("node02") == {"undo": ("ok", "")}


def test_the_unit_of_ofed_is_found(make):
    cluster = Cluster(make(star(HOSTS)), unit="opensmd.service")
    assert cluster.states("node01")["running"] == "changed"
    assert (cluster.running("node01"), cluster.port("node03")) == ("active", "4: ACTIVE")


def test_dead_opensm_of_an_active_unit_is_restarted(make):
    """Debian's unit is a oneshot: it stays active after the opensm that it started has exited."""
    cluster = Cluster(make(star(HOSTS)), oneshot=True)
    cluster.apply("node01")
    first = cluster.pid("node01")
    cluster.crash("node01")
    assert cluster.running("node01") == "active"
    assert cluster.verify("node03") == {
        "the subnet manager answers": "the subnet manager of ibsim0 port 1 does not answer"
    }
    states = cluster.states("node01")
    assert (states["running"], states["answers"]) == ("ok", "changed")
    assert cluster.pid("node01") != first
    assert cluster.verify("node03") == {}


def test_ports_that_wait_elsewhere_are_configured(make):
    """A manager that runs and answers and has missed a node: what `systemctl restart opensmd` is typed for."""
    cluster = Cluster(make(star(HOSTS)))
    cluster.apply("node01")
    cluster.fabric.console('Unlink "node03"[1]')
    cluster.fabric.console('ReLink "node03"[1]')
    assert cluster.verify("node03") == {"ports with a link are Active": "ibsim0 port 1 is INIT"}
    assert cluster.apply("node01", dry_run=True)["answers"] == ("would change", "")
    assert cluster.states("node01")["answers"] == "changed"
    assert cluster.port("node03") == "4: ACTIVE"
    assert cluster.verify("node03") == {}


def test_a_manager_elsewhere_is_named_and_stopped(make):
    cluster = Cluster(make(star(HOSTS)))
    cluster.apply("node01")
    cluster.fabric.run("node03", "systemctl", "enable", "opensm.service")
    cluster.fabric.run("node03", "systemctl", "start", "opensm.service")
    assert cluster.verify("node03") == {
        "no other subnet manager": "a second subnet manager is running here; the one on node01 is enough"
    }
    assert cluster.states("node03") == {"no other subnet manager": "changed", "ports are Active": "ok"}
    assert [cluster.running(host) for host in HOSTS] == ["active", "inactive", "inactive"]
    assert cluster.verify("node03") == {}
    cluster.undo("node03")
    assert cluster.running("node03") == "active"


def test_slow_worn_and_unplugged_cables_are_named_with_both_ends(make):
    cluster = Cluster(make(star(HOSTS, links={"node02": "w=1"})))
    cluster.apply("node01")
    cluster.fabric.console('PerformanceSet "node03"[1] PortCounters.SymbolErrorCounter=17')
    assert cluster.verify("node01") == {
        "links run at full rate": "node02 port 1 to SW1 port 2 runs at 1X 2.5 Gb/s a lane: "
        "replace its cable or transceiver",
        "links have no errors": "node03 port 1: [SymbolErrorCounter == 17] on its cable to SW1 port 3: "
        "clean, reseat, then replace it",
    }
    cluster.fabric.console('Unlink "node03"[1]')
    assert cluster.verify("node03") == {"cables carry a signal": "ibsim0 port 1 is Polling"}


def test_a_node_without_infiniband_is_refused_before_anything_is_started(make, monkeypatch):
    cluster = Cluster(make(star(HOSTS)))
    plain = cluster.fabric.environment("node01")
    del plain["LD_PRELOAD"]  # the real machine, which has none
    if any(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("this machine has InfiniBand itself")
    monkeypatch.setattr(cluster.fabric, "environment", lambda _host="": plain)
    results = cluster.apply("node01")
    assert list(results) == ["InfiniBand"]
    assert "this node has no InfiniBand port" in results["InfiniBand"][1]
    assert cluster.running("node01") == "inactive"


def test_a_missing_opensm_is_reported(make):
    cluster = Cluster(make(star(HOSTS)))
    (cluster.units["node01"] / "opensm.service").unlink()
    results = cluster.apply("node01")
    assert results["installed"][0] == "failed"
    assert "opensm is not installed" in results["installed"][1]


@pytest.mark.parametrize("shell", [["dash"], ["bash", "--posix"], ["busybox", "sh"]], ids=lambda argv: argv[0])
def test_every_shell_reads_the_scripts(shell):
    """Only dash can run them on ibsim; the others must understand them as well."""
    inventory = Inventory(
        Path("i"), PurePosixPath("/opt/x"), (Node("a", "a"), Node("b", "b")), services={"opensm": opensm.Options()}
    )
    for what in (plans.plan_services, plans.plan_verification):
        plan = what(inventory, inventory.nodes, ("opensm",))
        for of_nodes in plan.steps.values():
            for steps in of_nodes.values():
                done = subprocess.run(
                    [*shell, "-n"], input=apply_script(steps, "t"), text=True, capture_output=True, check=False
                )
                assert (done.returncode, done.stderr) == (0, "")


def test_unknown_node_is_an_inventory_error():
    inventory = Inventory(Path("i"), PurePosixPath("/opt/x"), (Node("node01", "node01"),))
    assert list(opensm.problems(opensm.Options(node="node9"), inventory)) == [("node", "no node is called node9")]
    assert json.loads(opensm.Options().model_dump_json()) == {"node": None}
