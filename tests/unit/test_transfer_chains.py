"""The order in which nodes pass bytes on, and the node to blame for a chain that ended early."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provision.model import Node, Part
from provision.ssh.wire import NodeUnreachable
from provision.transfer import Target
from provision.transfer.chain import Failure, Outcome
from provision.transfer.nodes import STRIKES, Member, assign_blame
from provision.transfer.prepare import RelayNode, form_chains, hops


def places(text):
    """``a b- -c``: b cannot pass on, no node can log in to c."""
    return [RelayNode(word.strip("-"), not word.endswith("-"), not word.startswith("-")) for word in text.split()]


@pytest.mark.parametrize(
    ("nodes", "refused", "chains"),
    [
        ("a", "", "a"),
        ("a b", "", "ab"),
        ("a b", "ab", "ba"),
        ("a b", "ab ba", "a,b"),
        ("a b c", "", "abc"),
        ("a b- c", "", "acb"),
        ("a b- c- d", "", "adb,c"),
        ("a -b c", "", "bac"),
        ("-a b c", "", "abc"),
        ("a- b- c-", "", "a,b,c"),
        ("a b c", "ab", "acb"),
        ("a b c", "ab cb", "bac"),
        ("a b c", "ab cb ba", "ac,b"),
        ("a b c d", "bc", "abdc"),
        ("a b c d", "bc dc", "cabd"),
        ("-a -b c", "", "ac,b"),
    ],
)
def test_lanes(nodes, refused, chains):
    pairs = {tuple(pair) for pair in refused.split()}
    found = form_chains(places(nodes), pairs, relay=True)
    assert sorted("".join(chain) for chain in found) == sorted(chains.split(","))


def test_without_relay_every_node_has_a_separate_lane():
    assert form_chains(places("a b c d"), set(), relay=False) == [["a"], ["b"], ["c"], ["d"]]


names = st.integers(1, 8).map(lambda count: "abcdefgh"[:count])


@given(st.data(), names)
@settings(deadline=None)
def test_every_node_is_in_one_lane_and_every_route_is_allowed(data, nodes):
    flags = st.tuples(st.booleans(), st.booleans())
    found = [RelayNode(name, *data.draw(flags)) for name in nodes]
    pairs = [(a, b) for a in nodes for b in nodes if a != b]
    refused = data.draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    chains = form_chains(found, refused, relay=True)
    assert sorted(name for chain in chains for name in chain) == list(nodes)
    by_name = {place.name: place for place in found}
    for before, behind in hops(chains):
        assert by_name[before].passes
        assert by_name[behind].receives
        assert (before, behind) not in refused


# --- who is to blame -----------------------------------------------------------------------------------


def crew(count=3):
    members = []
    for number in range(count):
        member = Member(Target(Node(f"n{number}", ""), "/f", "/i", "plain", has_ssh=True), number)
        member.passes = member.receives = True
        member.update([Part("a", "tar", 10, lambda: iter(()))])
        members.append(member)
    return members


def test_a_lost_connection_closes_the_channel_and_blames_no_node():
    members, refused = crew(), set()
    (message,) = assign_blame(members, Outcome(lost={"n0": "Connection reset"}), refused, 60)
    assert refused == {("n0", "n1")}
    assert message == "n1: the connection from n0 was lost: Connection reset; trying another route"
    assert [member.error for member in members] == [None, None, None]


def test_node_does_not_relay_after_two_failed_routes():
    members, refused = crew(), set()
    assign_blame(members, Outcome(lost={"n0": "x"}), refused, 60)
    assert members[0].passes
    assert members[1].receives
    assign_blame([members[0], members[2]], Outcome(lost={"n0": "x"}), refused, 60)
    assert not members[0].passes
    assert not members[0].may_pass
    assert members[2].receives


def test_a_node_that_fails_itself_explains_why_it_was_lost():
    members, refused = crew(), set()
    outcome = Outcome(lost={"n0": "exit code 3"}, failed={"n1": Failure("/i", (0, 5), "tar: No space left on device")})
    (message,) = assign_blame(members, outcome, refused, 60)
    why = "no space left on the device (/i); at least 10 B were needed, and a rerun continues"
    assert message == f"n1: {why}"
    assert members[1].error.reason == why
    assert refused == set()


def test_other_failures_are_tried_again_and_then_given_up():
    members = crew(1)
    for attempt in range(STRIKES):
        assert members[0].error is None, attempt
        assign_blame(members, Outcome(failed={"n0": Failure("/i", (1, 1), "zstd: boom")}), set(), 60)
    assert members[0].error.reason == "zstd: boom"


def test_attempts_with_progress_do_not_count():
    (member,) = crew(1)
    parts = [Part(str(number), "tar", 1, lambda: iter(())) for number in range(10)]
    for lacking in range(10, 0, -1):
        member.update(parts[:lacking])
        member.strike("x")
    assert member.error is None
    for _ in range(STRIKES - 1):
        member.strike("x")
    assert member.error


def test_damaged_units_disable_their_route():
    members, refused = crew(), set()
    (message,) = assign_blame(members, Outcome(bad={"n2"}), refused, 60)
    assert refused == {("n1", "n2")}
    assert message == "n2: a unit arrived damaged; trying another route"


def test_a_stalled_node_is_named():
    members, refused = crew(), set()
    (message,) = assign_blame(members, Outcome(stalled="n1"), refused, 60)
    assert message == "n1: it sent no report for 60 s; trying another route"
    assert refused == {("n0", "n1")}


def test_unexplained_failure_retries_the_first_node():
    members = crew()
    error = NodeUnreachable(members[0].target.node, "the connection was lost")
    assert assign_blame(members, Outcome(error=error), set(), 60) == ["n0: the connection was lost; trying again"]
    (message,) = assign_blame(members, Outcome(code=137), set(), 60)
    assert message == "n0: its transfer process was killed (exit code 137); trying again"
    assign_blame(members, Outcome(code=137), set(), 60)
    assert members[0].error


def test_missing_parts_of_a_node():
    (member,) = crew(1)
    parts = [Part(key, "tar", 10, lambda: iter(()), group=group) for key, group in (("a", "g"), ("b", "g"), ("c", ""))]
    for have, lacking in (({"a"}, {"b", "c"}), ({"g"}, {"c"}), ({"c", "x"}, {"a", "b"})):
        member.facts = type(member.facts)(have=frozenset(have))
        member.update(parts)
        assert member.lacking == lacking
