"""A thousand nodes without a machine for each: the model of them, the agents' link, and ``status``."""

from __future__ import annotations

import base64
import json
import resource
import sys
import threading
import time
import zlib
from functools import partial
from pathlib import Path, PurePosixPath

import pytest

from provision.model import Inventory, Node, Result
from provision.session import Session
from provision.session.session import AT_ONCE
from provision.ssh.remote import NodeUnreachable
from provision.summaries.status import status_output
from provision.tasks.runs import NEWEST, PARTS, listed_runs
from provision.tasks.status import status

sys.path.append(str(Path(__file__).parents[2] / "scripts/benchmarks"))  # last, so that it hides no module
sys.path.append(str(Path(__file__).parent))
from agents import free_port, plan_of
from scale_model import CHECK, COMMANDS, STATUS, Command, Costs, Faults, Send, Visit, on_this_machine, simulate

from trainer.agent.link.link import Link

RUN = "20261127-101500-sft-1a2b"
BOOT = "5f0c9a9e-0000-4000-8000-000000000000"


def names(count):
    return [f"node{number:04}" for number in range(1, count + 1)]


# --- the model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_equal_arguments_give_equal_predictions(command):
    first, second = (simulate(COMMANDS[command], names(40), seed=7) for _ in range(2))
    assert first == second
    assert set(first.stages) == {stage.name for stage in COMMANDS[command].stages}


def test_the_controllers_core_bounds_many_nodes_and_waves_bound_slow_ones():
    quick = simulate(Command(0.0, (Visit("x", here=0.01),)), names(500), Costs(connect_here=0.0, jitter=0.0))
    assert quick.stages["x"] == pytest.approx(500 * 0.01, rel=0.05)
    slow = simulate(Command(0.0, (Visit("x", waits=2.0),)), names(5 * AT_ONCE), Costs(connect_here=0.0, jitter=0.0))
    assert slow.stages["x"] == pytest.approx(5 * 2.0, rel=0.05)  # the real fan_out starts AT_ONCE at a time


def test_nodes_that_share_cores_take_turns():
    alone = simulate(STATUS, names(64)).seconds
    together = simulate(STATUS, names(64), on_this_machine(Costs(), 2)).seconds
    assert together > 1.5 * alone


def test_fifty_dead_nodes_delay_a_command_by_one_timeout_and_no_more():
    everyone = names(1000)
    healthy = simulate(CHECK, everyone)
    for dead in (everyone[:50], everyone[-50:]):
        found = simulate(CHECK, everyone, faults=Faults(dead=frozenset(dead)))
        assert set(found.failed) == set(dead)
        assert found.seconds < healthy.seconds + 11


def test_a_dead_jump_host_delays_a_command_by_one_timeout():
    everyone, jumps = names(400), [f"jump{number}" for number in range(8)]
    healthy = simulate(STATUS, everyone, jumps=jumps)
    assert healthy.here > simulate(STATUS, everyone).here  # each byte is encrypted twice here
    found = simulate(STATUS, everyone, faults=Faults(dead=frozenset(jumps[:2])), jumps=jumps)
    assert not found.failed
    assert healthy.seconds < found.seconds < healthy.seconds + 11
    none = simulate(STATUS, everyone, faults=Faults(dead=frozenset(jumps)), jumps=jumps)
    assert set(none.failed) == set(everyone)


def test_a_chain_costs_a_unit_for_each_hop_and_is_cut_where_a_login_fails():
    send = Command(0.0, (Send("sending", 400 << 20),))
    costs = Costs(jitter=0.0)
    one, two, many = (simulate(send, names(count), costs).stages["sending"] for count in (1, 2, 101))
    assert two - one == pytest.approx((4 << 20) / costs.link, rel=0.01)
    assert many - one == pytest.approx(100 * (two - one), rel=0.01)
    cut = simulate(send, names(100), costs, Faults(refused=frozenset({("node0050", "node0051")})))
    assert cut.stages["sending"] <= many * 1.01  # form_chains finds another order


# --- the agents' link -----------------------------------------------------------------------------------


def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def in_threads(functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)


class Agents:
    """The links of all agents of a run, and the kinds of the messages that each has received."""

    def __init__(self, count):
        link = {
            "host": "127.0.0.1",
            "port": free_port(),
            "token": "ab" * 32,
            "nodes": names(count),
            "lost_after": 600.0,
        }
        plans = [plan_of(run="r", node=name, node_rank=rank, link=link) for rank, name in enumerate(names(count))]
        self.arrived = threading.Condition()
        self.links = [Link(plan, self.wake) for plan in plans]
        self.kinds = [[] for _ in plans]
        for each in self.links:
            each.start()

    def wake(self):
        with self.arrived:
            self.arrived.notify_all()

    def meet(self):
        decided = {}

        def one(rank):
            decided[rank] = self.links[rank].meet({}, lambda offers: {"count": len(offers)}, 120.0)

        in_threads([partial(one, rank) for rank in range(len(self.links))])
        return decided

    def wait(self, complete):
        until = time.monotonic() + 120
        with self.arrived:
            while True:
                for kinds, each in zip(self.kinds, self.links, strict=True):
                    kinds += [message["kind"] for message in each.take()]
                if complete(self.kinds):
                    return
                assert self.arrived.wait(max(0.0, until - time.monotonic()))


@pytest.fixture
def agents():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    made = Agents(201)
    yield made
    in_threads([each.close for each in made.links])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_two_hundred_agents_meet_and_one_failure_reaches_all(agents):
    began, count = cpu(), len(agents.links)
    assert agents.meet() == {rank: {"count": count} for rank in range(count)}
    agents.links[5].send("failed", attempt=1, failed=5, text="exit code 1")
    agents.wait(lambda kinds: all("failed" in each for rank, each in enumerate(kinds) if rank != 5))
    for each in agents.links[1:]:
        each.send("ended", to=0, text="exit code 1")
    agents.wait(lambda kinds: kinds[0].count("ended") == count - 1)
    assert agents.meet()[0] == {"count": count}
    agents.wait(lambda _: True)  # takes what arrived before the end of the meeting
    assert not any("ended" in each for each in agents.kinds[1:])
    assert cpu() - began < 30  # of 201 agents together; a message from each to each alone is 40,000


# --- status ---------------------------------------------------------------------------------------------


class Remote:
    """A node in memory: answers ``status`` and requests for the time, and its agent those for the whole run."""

    alive = True

    def __init__(self, pool, node, rank):
        self.pool, self.node, self.rank = pool, node, rank

    def run(self, script, *, stdin=None, on_line=None, deadline=None, root=False):
        self.pool.runs[self.node.name] = self.pool.runs.get(self.node.name, 0) + 1
        if "statuses" in script and stdin is None and on_line is not None:
            for line in self.pool.told():
                on_line(line)
            return Result(0, "", "", 0.0)
        if on_line is not None:
            for _ in stdin:
                on_line(f"{time.time():.9f}")
            return Result(0, "", "", 0.0)
        return Result(0, self.answer(), "", 0.0)

    def answer(self):
        state = {
            "run": RUN, "node": self.node.name, "node_rank": self.rank, "nnodes": self.pool.count, "state": "running",
            "pid": 7, "start": "9", "boot_id": BOOT, "uid": 0, "began": 1.0, "step": 10, "total": 100, "loss": 2.5,
        }  # fmt: skip
        stat = "7 (python) S " + " ".join(["0"] * 18) + " 9 0"
        lines = [f"uptime {10_000 + self.rank % 7}.00", "current releases/0123456789ab", "me 0", f"boot {BOOT}"]
        lines += [f"part {RUN}/logs/node{self.rank} root", f"state {json.dumps(state)}", f"stat {stat}"]
        return "\n".join(lines) + "\n"

    def close(self):
        pass


class Pool:
    """``Connections`` to nodes in memory."""

    def __init__(self, inventory, dead, untold):
        self.inventory, self._dead, self._untold = inventory, dead, untold
        self._ranks = {node.name: rank for rank, node in enumerate(inventory.nodes)}
        self.count = len(self._ranks)
        self.runs = {}  # by node, how many scripts ran there over a connection

    def told(self):
        """What the agents tell: of all nodes that are alive, except for some; an agent far behind with its clock."""
        yield json.dumps({"nodes": self.count})
        for node in self.inventory.nodes:
            if node.name not in self._dead | self._untold:
                out = Remote(self, node, self._ranks[node.name]).answer()
                encoded = base64.b64encode(zlib.compress(out.encode())).decode()
                now = time.time()
                there = now - 50 * (node.name == "node0400")
                answer = {"node": node.name, "out": encoded, "sent": now, "taken": there, "given": there}
                yield json.dumps(answer | {"received": now + 0.01})
        yield json.dumps({"node": "stranger", "out": encoded, "sent": 1, "taken": 1, "given": 1, "received": 1})

    def __getitem__(self, node):
        if node.name in self._dead:
            raise NodeUnreachable(node, f"no answer from {node.address} within 10 s")
        return Remote(self, node, self._ranks[node.name])


def ask_all(tmp_path, count, dead=frozenset(), untold=frozenset(), **options):
    inventory = Inventory(
        path=tmp_path / "inventory.yaml",
        prefix=PurePosixPath("/opt/llm/current"),
        nodes=tuple(Node(name, name) for name in names(count)),
    )
    pool = Pool(inventory, dead, untold)
    return status(Session(inventory, connections=pool), **options), pool.runs


@pytest.mark.parametrize("direct", [32, 1000])
def test_status_of_a_thousand_nodes_is_a_few_lines(tmp_path, direct):
    result, _ = ask_all(tmp_path, 1000, set(names(1000)[950:]), direct=direct)
    data, text = status_output(result, time.time())
    lines = text.splitlines()
    assert lines[0] == "node[0001-0950]: release 0123456789ab, up 2 h"
    assert sum("no answer" in line for line in lines) == 1
    assert next(line for line in lines if "no answer" in line).startswith("node[0951-1000]: no answer: ")
    if direct == 1000:
        assert any(line.startswith("clocks: node[0001-0950] agree") for line in lines)
    else:
        assert any(line.startswith("clocks: node[0001-0399,0401-0950] agree") for line in lines)
        assert any(line.startswith("clocks: node0400 is 50.0 s ± ") and line.endswith("behind them") for line in lines)
    assert len(lines) < 10
    run = result.runs[RUN]
    assert (run.state, len(run.parts), run.missing) == ("running", 950, 50)
    assert data["nodes"]["node0001"]["skew"] is None  # a million pairs
    assert len(json.dumps(data)) < 3 << 20


def test_agents_that_tell_of_their_nodes_save_the_connections_to_them(tmp_path):
    untold, dead = {"node0007", "node0100"}, {"node0001", "node0200"}
    result, runs = ask_all(tmp_path, 200, dead, untold)
    assert set(result.unreachable) == dead
    assert set(result.nodes) == set(names(200)) - dead
    assert set(result.offsets) == set(result.nodes)
    # The first three are asked for a run, of which the first is dead; one of them asks the agents.
    assert set(runs) == {"node0002", "node0003", *untold}
    everyone, _ = ask_all(tmp_path, 200, dead, direct=200)
    assert result.runs == everyone.runs
    assert result.nodes == everyone.nodes
    assert result.users == everyone.users
    assert len(ask_all(tmp_path, 200, direct=200)[1]) == 200


def test_the_more_nodes_the_fewer_runs_each_lists():
    assert [listed_runs(count) for count in (1, 16, 163)] == [NEWEST] * 3
    assert all(count * listed_runs(count) <= PARTS for count in range(163, 2048))
    assert listed_runs(100_000) == 8
