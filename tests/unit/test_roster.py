"""Which nodes take part in a run, and what a launcher's words become: pure functions."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import plan_of

from trainer.agent.contract.plan import SEVERAL, WORDS, WORLD_INFO, Members
from trainer.agent.link import LinkError
from trainer.agent.run_files import NodePlan
from trainer.agent.supervisor import roster as rosters
from trainer.agent.supervisor.decisions import check_start, decide_end, decide_start
from trainer.agent.supervisor.roster import Roster, change

NAMES = ("n0", "n1", "n2", "n3", "n4")
ROSTER = Roster(NAMES, (0, 1, 2), {})
ENDED = {"rc": 1, "signal": None, "stopped": False, "left": [], "step": 3}


@st.composite
def roster_and_here(draw):
    count = draw(st.integers(1, 8))
    active = draw(st.integers(1, count))
    here = draw(st.sets(st.integers(0, count - 1)))
    return Roster(tuple(f"n{each}" for each in range(count)), tuple(range(active)), {}), here


@given(roster_and_here(), st.none() | st.integers(1, 8))
def test_a_change_keeps_ranks_and_uses_each_node_once(given_, least):
    roster, here = given_
    found = change(roster, here, least)
    members = found.roster.members
    assert len(set(members)) == len(members) <= len(roster.members)
    assert set(members) <= here
    assert set(found.roster.excluded) == set(range(len(roster.names))) - here
    if len(members) == len(roster.members):
        assert all(new == old for new, old in zip(members, roster.members, strict=True) if old in here)
        assert found.problem is None
    if found.problem is None:
        assert len(members) >= (len(roster.members) if least is None else min(least, len(roster.members)))


@given(roster_and_here())
def test_two_parts_are_never_both_enough(given_):
    roster, here = given_
    others = set(range(len(roster.names))) - here
    assert not (roster.enough(here) and roster.enough(others))
    assert roster.enough(set(range(len(roster.names))))


def test_excluded_nodes_do_not_count_for_the_majority():
    smaller = Roster(NAMES, (3, 4, 2), {0: "lost", 1: "lost"})
    assert smaller.enough({2, 3})
    assert not smaller.enough({0, 1, 2})


def linked(position=0, **fields):
    others = [[f"10.0.0.{number + 1}", 5] for number in range(1, 5)]
    link = {"host": "10.0.0.1", "port": 4, "token": "t", "nodes": NAMES, "others": others}
    needed = {"node": NAMES[position], "node_rank": position, "link": link, "nnodes": 3, "processes": 2}
    return NodePlan(plan_of(**(needed | fields)), Path("/nowhere"), Path("/nowhere/plan.json"))


def test_the_first_spare_that_is_here_replaces_a_lost_node():
    offers = {position: {"processes": 2, "port": 9} for position in (0, 2, 4)}
    found = check_start(linked(), decide_start(linked(), offers, 2, resume=False, reasons={1: "no power"}))
    assert (found["members"], found["processes"], found["world_size"]) == ([0, 4, 2], [2, 2, 2], 6)
    assert found["replaced"] == [{"node": "n1", "rank": 1, "why": "no power", "by": "n4"}]
    assert sorted(found["excluded"]) == ["1", "3"]
    assert rosters.from_decision(ROSTER, found).nodes == ("n0", "n4", "n2")


def test_a_spare_that_lost_a_gpu_takes_no_rank_and_stays_a_spare():
    offers = {position: {"processes": 2, "port": 9} for position in (0, 2, 3, 4)}
    offers[3]["unfit"] = "it has lost GPU 1"
    found = check_start(linked(), decide_start(linked(), offers, 2, resume=False))
    assert (found["members"], found["unfit"]) == ([0, 4, 2], {"3": "it has lost GPU 1"})
    roster = rosters.from_decision(ROSTER, json.loads(json.dumps(found)))
    assert (roster.spares, roster.ready) == ([3], [])
    again = change(roster, {0, 2, 3, 4}, None, {}, {4: "slow"})
    assert (again.roster.members, again.roster.unfit) == ((0, 4, 2), {3: "it has lost GPU 1"})
    lost = change(roster, {0, 2, 3}, None)
    assert lost.problem == "no spare is left for n4; n3 takes no rank: it has lost GPU 1"
    for wrong in ({"9": "x"}, {"3": 5}, ["x"], {"-1": "x"}):
        with pytest.raises(LinkError):
            check_start(linked(), dict(found, unfit=wrong))
    with pytest.raises(LinkError, match="of n3 has an invalid reason to give the node no rank"):
        decide_start(linked(), {0: offers[0], 3: dict(offers[3], unfit=5)}, 2, resume=False)


def test_rank_0_moves_with_the_port_of_its_new_node():
    offers = {position: {"processes": 2, "port": 100 + position} for position in (1, 2, 3, 4)}
    found = decide_start(linked(1, port=7), offers, 2, resume=False)
    assert (found["members"], found["port"]) == ([3, 1, 2], 103)


def test_a_lost_node_is_no_restart_and_needs_a_spare():
    ended = {position: {"processes": 2, "outcome": dict(ENDED)} for position in (0, 2)}
    spares = {position: {"processes": 2, "outcome": ENDED | {"spare": True}} for position in (3, 4)}
    verdict = decide_end(linked(), ended | spares, None, more=False)
    assert (verdict["state"], verdict["replaces"], verdict["why"]["node"]) == ("again", True, "n1")
    verdict = decide_end(linked(), ended, None, more=True)
    assert (verdict["state"], verdict["replaces"]) == ("failed", False)
    assert verdict["why"]["text"].endswith("no spare is left for n1")
    assert decide_end(linked(min_nodes=2), ended, None, more=False)["replaces"] is True
    complete = ended | {1: ended[0]}
    assert decide_end(linked(), complete | spares, None, more=False)["state"] == "failed"
    assert decide_end(linked(), complete | spares, None, more=True)["replaces"] is False


def test_a_spare_does_not_count_in_the_outcome():
    done = {position: {"processes": 2, "outcome": ENDED | {"rc": 0}} for position in range(3)}
    idle = {3: {"processes": 2, "outcome": ENDED | {"rc": None, "step": None, "spare": True}}}
    assert decide_end(linked(), done | idle, None, more=True)["state"] == "finished"


# --- the words of a plan --------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from(WORDS) | st.just(f"{SEVERAL}--multi") | st.text(max_size=8), min_size=1, max_size=6),
    st.integers(1, 4),
    st.data(),
)
def test_every_word_is_filled_and_others_stay(words, count, data):
    nodes = NAMES[:count]
    processes = tuple(data.draw(st.integers(1, 8)) for _ in nodes)
    rank = data.draw(st.integers(0, count - 1))
    slots = {name: list(range(8)) for name in NAMES}
    plan = linked(NAMES.index(nodes[rank]), argv=words, slots=slots, port=99, nnodes=5, processes=processes[rank]).data
    found = plan.for_attempt(Members(nodes, processes, "10.0.0.9"), 123, "eth1")
    assert not set(found.argv) & set(WORDS)
    values = {
        "{port}": "123",
        "{master}": "10.0.0.9",
        "{nnodes}": str(count),
        "{node_rank}": str(rank),
        "{first_rank}": str(sum(processes[:rank])),
        "{world_size}": str(sum(processes)),
        "{even_size}": str(processes[rank] * count),
    }
    kept = [word for word in words if sum(processes) > 1 or not word.startswith(SEVERAL)]
    for before, after in zip(kept, found.argv, strict=True):
        if before == WORLD_INFO:
            table = json.loads(base64.urlsafe_b64decode(after.partition("=")[2]))
            assert table == {name: list(range(8)) for name in nodes}
        else:
            assert after == values.get(before, before.removeprefix(SEVERAL))
    assert (found.node_rank, found.nnodes, found.first_rank) == (rank, count, sum(processes[:rank]))
    assert found.env["NODE_RANK"] == str(rank)


@pytest.mark.parametrize(
    ("interface", "shown"),
    [("eth1", {"A": "eth1", "B": "=eth1", "C": "my {interface}"}), (None, {"C": "my {interface}"})],
)
def test_an_interface_that_is_not_known_is_not_set(interface, shown):
    plan = plan_of(env={"A": "{interface}", "B": "={interface}", "C": "my {interface}"})
    env = plan.for_attempt(plan.members, interface=interface).env
    assert {name: env[name] for name in "ABC" if name in env} == shown


# --- condemned nodes -----------------------------------------------------------------------------------


@given(roster_and_here(), st.sets(st.integers(0, 7)))
def test_only_spares_that_are_here_take_the_places_of_condemned_nodes(given_, condemned):
    roster, here = given_
    without = change(roster, here, None)
    found = change(roster, here, None, {}, dict.fromkeys(condemned, "slow"))
    left = found.roster.excluded.keys() - without.roster.excluded.keys()
    assert left <= condemned & set(roster.members) & here
    assert len(found.roster.members) == len(without.roster.members)
    assert found.problem == without.problem
    assert len(left) == min(
        len(without.roster.spares), len(condemned & set(without.roster.members) & set(roster.members))
    )


def test_a_condemned_node_gives_no_files_and_costs_no_restart():
    slow = {"node": "n1", "rank": None, "text": "slow", "signal": None, "time": 1.0, "condemned": True}
    offers = {each: {"outcome": ENDED, "processes": 1} for each in range(5)}
    verdict = decide_end(linked(), offers, slow, more=False, roster=ROSTER)
    assert (verdict["state"], verdict["replaces"], verdict["why"]["node"]) == ("again", True, "n1")
    start = decide_start(linked(), {each: {"processes": 1} for each in range(5)}, 2, False, ROSTER, {}, {1: "slow"})
    assert (start["members"], start["excluded"]) == ([0, 3, 2], {"1": "slow"})
    assert [(each["node"], each["by"]) for each in start["replaced"]] == [("n1", "n3")]


@pytest.mark.parametrize(("stuck", "state"), [(1, "again"), (0, "failed")])
def test_processes_that_cannot_be_ended_matter_only_on_nodes_that_stay(stuck, state):
    failed = {"node": "n1", "rank": 1, "text": "killed", "signal": None, "time": 1.0}
    offers = {each: {"outcome": ENDED, "processes": 1} for each in range(5)}
    offers[stuck]["outcome"] = dict(ENDED, left=[123])
    offers[1]["condemned"] = "it has lost GPU 1"
    assert decide_end(linked(), offers, failed, more=False, roster=ROSTER)["state"] == state
