"""Agents that pass on the frames of others: who serves whom, and what happens when one of them or a connection ends."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module
from link_cluster import PATIENCE, TOKEN, clock_of_links, clusters, come, coming, eventually, free_port, kinds, proxies

from trainer.agent.contract.plan import STAR
from trainer.agent.contract.plan import Link as Addresses
from trainer.agent.link import CopyError, spoke
from trainer.agent.link import hub as hubs
from trainer.agent.link.copies import read_line
from trainer.agent.link.endpoint import WAITING
from trainer.agent.link.link import Link
from trainer.agent.link.protocol import Caller, Connection, InvalidMessageError, Route, Stream, routed, split_routed
from trainer.agent.link.relay import Relay, address_of


@pytest.fixture(autouse=True)
def patience(request, monkeypatch):
    """On a busy machine an agent would give up a relay that is only slow. Tests with a clock need some of the times."""
    monkeypatch.setattr(spoke, "REACH", PATIENCE)
    if "clock" not in request.fixturenames:
        monkeypatch.setattr(spoke, "STALE_RELAY", PATIENCE)
        monkeypatch.setattr(hubs, "FRESH", PATIENCE)


@pytest.fixture
def cluster():
    with clusters() as make:
        yield make


@pytest.fixture
def clock(monkeypatch):
    return clock_of_links(monkeypatch)


@pytest.fixture
def proxy():
    with proxies() as make:
        yield make


def relays(link):
    """By rank: the rank of the agent through which it is connected to this hub; None: it has its own connection."""
    peers = link.endpoint.peers.values()
    direct = {id(peer.connection): peer.rank for peer in peers if isinstance(peer.connection, Connection)}
    return {
        peer.rank: direct.get(id(peer.connection.carrier)) if isinstance(peer.connection, Route) else None
        for peer in peers
        if peer.connection is not None
    }


def join(agents, *ranks):
    """Start these agents one after the other, so that the first ones are connected to the hub."""
    hub = agents.links.get(0) or agents.start(0)
    for rank in ranks:
        agents.start(rank)
        eventually(lambda rank=rank: rank in relays(hub))
    return hub


def served_by(port, rank, **hello):
    """A connection to the relay at a port, of an agent of the run that the test controls; after its first message."""
    sock = socket.create_connection(("127.0.0.1", port), PATIENCE)
    caller = Caller(TOKEN, "r1", rank)
    sock.sendall(caller.first())
    sock.sendall(caller.take(read_line(sock)))
    stream = Stream(sock, caller.session)
    stream.send({"rank": rank, "instance": "of the test", "purpose": "link", "of": "", "received": 0, **hello})
    return stream


def numbers(link, node):
    """The numbers of the notes of a node that have come to a link."""
    return [each["number"] for each in come(link) if each["kind"] == "note" and each["node"] == node]


# --- who serves whom ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "width"), [(2, 2), (STAR, STAR), (STAR + 1, 9), (1000, 32), (1025, 33)])
def test_each_agent_serves_as_many_as_there_are_at_the_hub(nodes, width):
    link = Addresses("h", 1, TOKEN, tuple(map(str, range(nodes))))
    assert link.width == width
    assert link.width == nodes or (link.width - 1) ** 2 < nodes <= link.width**2


def test_the_first_agents_join_the_hub_and_serve_the_others_in_turn(cluster):
    agents = cluster(9, most=2)
    hub = join(agents, *range(1, 9))
    assert collections.Counter(relays(hub).values()) == {None: 2, 1: 3, 2: 3}
    assert set(agents.meet(lambda offers: {"from": sorted(offers)})[8]["from"]) == set(range(9))


def test_seventy_agents_need_nine_connections_of_the_hub(cluster):
    agents = cluster(STAR + 6)
    for rank in range(STAR + 6):
        agents.start(rank)
    hub = agents.links[0]
    eventually(lambda: len(relays(hub)) == STAR + 5)
    counted = collections.Counter(relays(hub).values())
    assert counted.pop(None) == 9
    assert max(counted.values()) <= 8
    assert set(map(str, agents.meet(lambda offers: {"count": len(offers)}).values())) == {"{'count': 70}"}
    agents.links[69].send("failed", text="a rank failed")
    for rank in range(69):
        assert coming(agents.links[rank], "failed")["rank"] == 69


def test_an_agent_that_cannot_reach_its_relay_joins_the_hub(cluster, monkeypatch):
    listen = Relay.listen

    def behind_a_firewall(relay, host):
        listen(relay, host)
        with socket.socket() as sock:
            sock.bind((host, 0))
            return sock.getsockname()[1]  # nothing listens there

    monkeypatch.setattr(Relay, "listen", behind_a_firewall)
    agents = cluster(4, most=1)
    assert relays(join(agents, 1, 2, 3)) == {1: None, 2: None, 3: None}
    assert len(agents.meet()) == 4


def test_a_relay_that_accepts_and_never_answers_costs_its_deadline(cluster, clock, monkeypatch):
    monkeypatch.setattr(spoke, "REACH", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(Relay, "listen", lambda *_: silent.getsockname()[1])
        agents = cluster(3, most=1)
        hub = join(agents, 1)
        clock.stop()
        late = agents.start(2)
        clock.until(lambda: late.endpoint.attempt is not None and late.endpoint.attempt.relayed, *agents.links.values())
        clock.advance(2.5, *agents.links.values())
        clock.until(lambda: relays(hub).get(2, "none") is None, *agents.links.values())


# --- messages ----------------------------------------------------------------------------------------------------


def test_messages_pass_in_all_directions_once_and_in_order(cluster):
    agents = cluster(5, most=1)
    join(agents, 1, 2, 3, 4)
    for number in range(50):
        for link in agents.links.values():
            link.send("note", number=number)
    for rank, link in agents.links.items():
        for other in set(agents.links) - {rank}:
            eventually(lambda link=link, other=other: len(numbers(link, f"n{other}")) == 50)
            assert numbers(link, f"n{other}") == list(range(50))


def test_a_message_to_one_agent_reaches_no_other(cluster):
    agents = cluster(5, most=2)
    join(agents, 1, 2, 3, 4)
    agents.links[3].send("secret", to=4)
    agents.links[3].send("open")
    for rank in (0, 1, 2, 4):
        coming_first = coming(agents.links[rank], "secret" if rank == 4 else "open")
        assert coming_first["rank"] == 3
    assert [kinds(agents.links[rank]) for rank in (0, 1, 2, 4)] == [[], [], [], ["open"]]


def test_large_messages_of_many_agents_share_the_connection_of_their_relay(cluster):
    agents = cluster(5, most=1)
    join(agents, 1, 2, 3, 4)
    text = "x" * (6 << 20)
    for rank in (2, 3, 4):
        agents.links[rank].send("big", text=text)
    agents.links[0].send("big", text=text)
    for rank, link in agents.links.items():
        heard = sorted(coming(link, "big")["rank"] for _ in range(4 if rank == 1 else 3))
        assert heard == sorted({0, 2, 3, 4} - {rank})


def test_broken_connections_between_relay_and_hub_lose_and_duplicate_no_message(cluster, proxy):
    agents = cluster(4, most=1)
    between = proxy(agents.link["port"])
    hub = agents.start(0)
    agents.start(1, port=between.port)
    eventually(lambda: 1 in relays(hub))
    join(agents, 2, 3)
    assert relays(hub) == {1: None, 2: 1, 3: 1}
    for number in range(300):
        for rank in (0, 2, 3):
            agents.links[rank].send("note", number=number)
        if number % 60 == 30:
            between.cut()
            eventually(lambda: len(relays(hub)) == 3)
    for rank, other in ((0, 2), (0, 3), (2, 0), (2, 3), (3, 0), (3, 2), (1, 0), (1, 2)):
        eventually(lambda rank=rank, other=other: len(numbers(agents.links[rank], f"n{other}")) >= 300)
        assert numbers(agents.links[rank], f"n{other}") == list(range(300))
    assert {each["kind"] for link in agents.links.values() for each in come(link)} == {"note"}


def test_an_agent_that_reads_nothing_does_not_delay_what_its_relay_passes_to_others(cluster):
    agents = cluster(4, most=1)
    hub = join(agents, 1)
    stream = served_by(hub.endpoint.peers[1].relays, 2)
    eventually(lambda: relays(hub).get(2) == 1)
    join(agents, 3)
    for _ in range(1 + WAITING // (1 << 20)):
        hub.send("big", text="x" * (1 << 20), to=2)
    hub.send("note")
    assert coming(agents.links[3], "note")
    assert relays(hub)[3] == 1
    stream.sock.close()


# --- ends --------------------------------------------------------------------------------------------------------


def test_agents_whose_relay_is_killed_come_to_the_hub_and_are_never_missed(cluster, clock):
    agents = cluster(5, most=1)
    hub = agents.start(0)
    child = agents.child(1)
    eventually(lambda: 1 in relays(hub))
    join(agents, 2, 3, 4)
    assert relays(hub) == {1: None, 2: 1, 3: 1, 4: 1}
    for number in range(20):
        agents.links[2].send("note", number=number)
    child.kill()
    for number in range(20, 40):
        agents.links[2].send("note", number=number)
    eventually(lambda: set(relays(hub)) == {2, 3, 4} and None in relays(hub).values())
    for rank in (0, 3, 4):
        eventually(lambda rank=rank: len(numbers(agents.links[rank], "n2")) == 40)
        assert numbers(agents.links[rank], "n2") == list(range(40))
    for link in agents.links.values():
        assert coming(link, "gone")["node"] == "n1"
        assert kinds(link) in ([], ["note"] * 40)
    hub.exclude({1: "it has ended"})
    assert hub.wait(lambda: True, 0)
    for link in agents.links.values():
        link.send("still here")
    for link in agents.links.values():
        assert len({coming(link, "still here")["rank"] for _ in range(3)}) == 3


def test_agents_whose_relay_is_stopped_move_before_they_count_as_lost(cluster, clock):
    agents = cluster(4, lost_after=5.0, most=1)
    hub = agents.start(0)
    child = agents.child(1)
    eventually(lambda: 1 in relays(hub))
    join(agents, 2, 3)
    here = [agents.links[rank] for rank in (0, 2, 3)]
    clock.stop()
    child.send_signal(signal.SIGSTOP)
    clock.until(lambda: relays(hub).get(2) != 1 and relays(hub).get(3) != 1, *here)
    clock.until(lambda: all(come(link) for link in here), *here)
    clock.advance(5.0, *here)
    for link in here:
        assert {(each["kind"], each["node"]) for each in come(link)} == {("lost", "n1")}
        kinds(link)
    child.send_signal(signal.SIGCONT)
    for link in here:
        clock.until(lambda link=link: come(link), *here)
        assert {(each["kind"], each["node"]) for each in come(link)} == {("back", "n1")}


def test_the_death_of_the_hub_reaches_those_behind_a_relay_as_fast_as_the_others(cluster, clock):
    agents = cluster(4, most=1)
    agents.child(0)
    for rank in (1, 2, 3):
        agents.start(rank)
    meeting = [threading.Thread(target=agents.links[rank].meet, args=({}, lambda _: {})) for rank in (1, 2, 3)]
    for thread in meeting:
        thread.start()
    for thread in meeting:
        thread.join(PATIENCE)
    assert sorted(agents.links[rank].endpoint.relayed for rank in (1, 2, 3)) == [False, True, True]
    here = list(agents.links.values())
    clock.stop()
    agents.children[0].kill()
    eventually(lambda: all(link.endpoint.hub.closed for link in here))
    clock.advance(2.5, *here)
    assert [kinds(link) for link in here] == [[], [], []]
    clock.advance(1.0, *here)
    for link in here:
        assert coming(link, "gone")["node"] == "n0"


@pytest.mark.parametrize("stopped", [False, True])
def test_an_agent_behind_a_relay_that_ends_or_stops_is_noticed(cluster, clock, stopped):
    agents = cluster(4, lost_after=5.0, most=1)
    hub = join(agents, 1)
    child = agents.child(3)
    eventually(lambda: relays(hub).get(3) == 1)
    join(agents, 2)
    here = list(agents.links.values())
    clock.stop()
    if stopped:
        child.send_signal(signal.SIGSTOP)
    else:
        child.kill()
        eventually(lambda: hub.endpoint.peers[3].closed)
    kind = "lost" if stopped else "gone"
    clock.until(lambda: all(any(each["kind"] == kind for each in come(link)) for link in here), *here)
    assert {(each["kind"], each["node"]) for link in here for each in come(link)} == {(kind, "n3")}


def test_a_goodbye_passes_and_is_no_failure(cluster, clock):
    agents = cluster(4, most=1)
    hub = join(agents, 1, 2, 3)
    clock.stop()
    agents.links.pop(3).close()
    eventually(lambda: hub.endpoint.peers[3].left)
    agents.links.pop(1).close()  # the relay itself
    here = list(agents.links.values())
    clock.until(lambda: relays(hub).get(2, "none") is None, *here)
    clock.advance(5.0, *here)
    assert [kinds(link) for link in here] == [[], []]


def test_the_goodbye_of_the_hub_reaches_those_behind_a_relay(cluster, clock):
    agents = cluster(3, most=1)
    join(agents, 1, 2)
    clock.stop()
    agents.links.pop(0).close()
    here = list(agents.links.values())
    eventually(lambda: all(link.endpoint.hub.left for link in here))
    clock.advance(5.0, *here)
    assert [kinds(link) for link in here] == [[], []]


def test_another_process_takes_the_place_of_a_killed_agent_behind_a_relay(cluster):
    agents = cluster(3, most=1)
    hub = join(agents, 1)
    child = agents.child(2)
    eventually(lambda: relays(hub).get(2) == 1)
    child.kill()
    eventually(lambda: hub.endpoint.peers[2].closed)
    agents.start(2).send("failed", text="the agent was killed")
    assert coming(hub, "failed")["text"] == "the agent was killed"
    assert coming(agents.links[1], "failed")["node"] == "n2"


@pytest.mark.parametrize("excluded", [1, 2])
def test_an_excluded_agent_is_refused_whether_it_is_a_relay_or_behind_one(cluster, excluded):
    agents = cluster(4, most=1)
    hub = join(agents, 1, 2, 3)
    hub.exclude({excluded: "the run continues without it"})
    assert coming(agents.links[excluded], "refused")["text"] == "the run continues without it"
    others = {1, 2, 3} - {excluded}
    eventually(lambda: set(relays(hub)) == others)
    for rank in others:
        agents.links[rank].send("note")
        assert coming(hub, "note")["rank"] == rank


def test_a_run_moves_to_another_hub_with_its_relays(cluster):
    agents = cluster(5, most=1)
    agents.link["others"] = [["127.0.0.1", free_port()] for _ in range(4)]
    join(agents, 1, 2, 3, 4)
    agents.links.pop(0).endpoint.abandon(PATIENCE)
    moving = [threading.Thread(target=link.move, args=(1,)) for link in agents.links.values()]
    for thread in moving:
        thread.start()
    for thread in moving:
        thread.join(PATIENCE)
    hub = agents.links[1]
    eventually(lambda: collections.Counter(relays(hub).values())[None] == 1 and len(relays(hub)) == 3)
    agents.links[4].send("note")
    for rank in (1, 2, 3):
        assert coming(agents.links[rank], "note")["rank"] == 4


def test_goodbyes_of_all_agents_at_once_reach_a_hub_that_stays(cluster, clock):
    agents = cluster(9, lost_after=5.0, most=2)
    hub = join(agents, *range(1, 9))
    closing = [threading.Thread(target=agents.links.pop(rank).close) for rank in range(1, 9)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(PATIENCE)
    eventually(lambda: all(peer.left for peer in hub.endpoint.peers.values()))
    clock.stop()
    clock.advance(10.0, hub)
    assert kinds(hub) == []


def test_the_last_frames_of_an_agent_pass_although_its_connection_has_ended(cluster):
    """Its relay was stopped meanwhile, and its first write to the agent fails."""
    agents = cluster(3, most=1)
    hub = agents.start(0)
    child = agents.child(1)
    eventually(lambda: 1 in relays(hub))
    join(agents, 2)
    child.send_signal(signal.SIGSTOP)
    for _ in range(5):
        hub.send("note")
    last = agents.links.pop(2)
    last.send("last words")
    last.close()
    child.send_signal(signal.SIGCONT)
    assert coming(hub, "last words")["rank"] == 2
    eventually(lambda: hub.endpoint.peers[2].left)


def test_those_behind_a_relay_notice_that_it_and_the_hub_have_died_together(cluster, clock):
    agents = cluster(4, lost_after=20.0, most=1)
    for rank in (0, 1):
        agents.child(rank)
    join_hub = agents.start(2)
    eventually(lambda: join_hub.endpoint.hub.connection is not None)
    agents.start(3)
    here = [agents.links[2], agents.links[3]]
    eventually(lambda: all(link.endpoint.hub.connection is not None for link in here))
    for child in agents.children:
        child.kill()
    eventually(lambda: all(link.endpoint.hub.closed for link in here))
    clock.stop()
    clock.advance(3.5, *here)
    for link in here:
        assert coming(link, "gone")["node"] == "n0"


def test_an_agent_behind_a_silent_relay_can_be_replaced_by_another_process(cluster, clock):
    agents = cluster(4, lost_after=20.0, most=1)
    hub = agents.start(0)
    relay = agents.child(1)
    eventually(lambda: 1 in relays(hub))
    killed = agents.child(2)
    eventually(lambda: relays(hub).get(2) == 1)
    relay.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, relay.pid, os.WSTOPPED | os.WNOWAIT)
    killed.kill()
    agents.start(2).send("failed", text="the agent was killed")
    clock.stop()
    here = list(agents.links.values())
    clock.until(lambda: any(each["kind"] == "failed" for each in come(hub)), *here)
    assert hub.endpoint.conflict is None


def test_the_same_rank_twice_behind_a_relay_is_a_conflict(cluster):
    agents = cluster(4, most=1)
    hub = join(agents, 1, 2)
    second = Link(agents.plan(2), lambda: None)
    agents.links["second"] = second
    second.start()
    assert coming(second, "refused")["text"].startswith("two nodes have the same rank")
    assert relays(hub)[2] == 1


def test_an_agent_that_joins_while_its_relay_loses_the_hub_joins_later(cluster, proxy):
    """The relay may not pass on what is no answer to the newcomer."""
    agents = cluster(3, most=1)
    between = proxy(agents.link["port"])
    hub = agents.start(0)
    relay = agents.start(1, port=between.port)
    eventually(lambda: 1 in relays(hub))
    between.flowing.clear()
    newcomer = agents.start(2)
    eventually(lambda: newcomer.endpoint.attempt is not None and newcomer.endpoint.attempt.relayed)
    relay.endpoint.loop.post(lambda: relay.endpoint.tick(time.monotonic() + 60.0, 0.0))  # time for a heartbeat
    between.cut()
    between.flowing.set()
    eventually(lambda: {1, 2} <= set(relays(hub)))
    assert newcomer.endpoint.refused is None
    assert len(agents.meet()) == 3


# --- what an agent of the run that is broken or lies can do, and a stranger -------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        [b"@1 {}", b"@999999999 {}"],
        [b'@5 {"hello": {"rank": 0, "instance": "x", "purpose": "link"}}'],
        [b'@5 {"hello": {"rank": 99, "instance": "x", "purpose": "link"}}'],
        [b'@5 {"hello": {"rank": 2, "instance": "another", "purpose": "link"}}'],
        [b'@5 {"hello": []}', b'@5 {"hello": {}}', b'@5 {"hello": {"rank": 3, "purpose": "files"}}'],
        [b'{"alive": [1, -1, "x", null, 1e99, [], {}]}', b'{"alive": 7}', b'{"alive": {}}'],
        [b'{"closed": "x"}', b'{"closed": -1, "by_peer": 7}', b'{"closed": 999}', b'{"close": 1}'],
    ],
)
def test_impossible_lines_of_a_relay_disturb_no_node(cluster, lines, capfd):
    """Rank 1's agent, as a relay, sends them to the hub."""
    agents = cluster(4, most=1)
    hub = join(agents, 1, 2, 3)
    relay = agents.links[1].endpoint

    def say():
        for line in lines:
            relay.hub.connection.send_frame(line)

    relay.loop.post(say)
    for rank in (1, 2, 3):
        agents.links[rank].send("note")
        assert coming(hub, "note")["rank"] == rank
    assert relays(hub) == {1: None, 2: 1, 3: 1}
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("line", [b"@ {}", b"@", b"@x {}", b"@-1 {}", b"@12345678901 {}", b'@1{"n":1}'])
def test_a_frame_without_a_channel_ends_the_connection_of_who_sent_it(cluster, line):
    agents = cluster(3, most=1)
    hub = join(agents, 1, 2)
    before, relay = hub.endpoint.peers[1].connection, agents.links[1].endpoint
    relay.loop.post(lambda: relay.hub.connection.send_frame(line))
    eventually(lambda: hub.endpoint.peers[1].connection not in (None, before) and 2 in relays(hub))
    assert len(agents.meet()) == 3


@pytest.mark.parametrize("payload", [b"x", b"[]", b'{"n": 1, "m": {"kind": 7}}', b"@1 {}", b'{"bye": 1'])
def test_garbage_of_a_served_agent_ends_only_its_own_channel(cluster, payload, capfd):
    agents = cluster(4, most=1)
    hub = join(agents, 1)
    stream = served_by(hub.endpoint.peers[1].relays, 2)
    eventually(lambda: relays(hub).get(2) == 1)
    join(agents, 3)
    carrier = hub.endpoint.peers[1].connection
    stream.write(memoryview(payload))
    eventually(lambda: 2 not in relays(hub))
    agents.links[3].send("note")
    assert coming(hub, "note")["rank"] == 3
    assert hub.endpoint.peers[1].connection is carrier
    assert "Traceback" not in capfd.readouterr().err
    stream.sock.close()


def test_a_flood_of_a_served_agent_waits_in_its_own_memory(cluster):
    agents = cluster(4, most=1)
    agents.child(0)
    relay = agents.start(1)
    eventually(lambda: relay.endpoint.hub.connection is not None)
    agents.children[0].send_signal(signal.SIGSTOP)
    port = eventually(lambda: relay.endpoint.relay.port)
    stream = served_by(port, 2)
    until = time.monotonic() + 2.0
    stream.alive = lambda: time.monotonic() < until

    def flood():
        for _ in range(1000):
            stream.write(memoryview(bytes(1 << 20)))

    with pytest.raises(CopyError, match="cancelled"):  # the relay no longer reads
        flood()
    assert relay.endpoint.hub.connection.waiting < 8 << 20
    stream.sock.close()


def test_a_relay_that_reads_no_answers_fills_no_memory_of_the_hub(cluster):
    agents = cluster(4, most=1)
    hub = agents.start(0)
    stream = served_by(agents.link["port"], 1, relays=7)
    eventually(lambda: 1 in relays(hub))
    assert stream.receive()["welcome"]
    stream.sock.settimeout(1.0)
    connection = hub.endpoint.peers[1].connection
    with contextlib.suppress(CopyError, OSError):
        for channel in range(60_000):
            text = b'@%d {"hello": {"rank": 2, "instance": "x", "purpose": "files"}}' % channel
            stream.write(memoryview(text))
    assert connection.waiting < 1 << 20
    join(agents, 2)
    stream.sock.close()


def test_the_largest_frame_of_a_served_agent_ends_its_connection_and_not_its_relays(cluster):
    agents = cluster(4, most=1)
    hub = join(agents, 1)
    stream = served_by(hub.endpoint.peers[1].relays, 2)
    eventually(lambda: relays(hub).get(2) == 1)
    carrier = hub.endpoint.peers[1].connection
    with contextlib.suppress(CopyError):
        stream.send({"x": "y" * ((16 << 20) - 8)})
    eventually(lambda: 2 not in relays(hub))
    assert hub.endpoint.peers[1].connection is carrier
    stream.sock.close()


def test_a_served_agent_cannot_speak_for_another(cluster):
    agents = cluster(4, most=1)
    hub = join(agents, 1, 2)
    stream = served_by(hub.endpoint.peers[1].relays, 3)
    eventually(lambda: relays(hub).get(3) == 1)
    forged = {"n": 1, "m": {"kind": "failed", "rank": 2, "node": "n2"}, "via": 2, "channel": 1}
    stream.send(forged)
    heard = coming(hub, "failed")
    assert (heard["rank"], heard["node"]) == (3, "n3")
    stream.sock.close()


@pytest.mark.parametrize(
    "through",
    [
        7,
        [],
        ["127.0.0.1"],
        ["127.0.0.1", "7"],
        ["127.0.0.1", True],
        ["host.example", 7],
        [7, 7],
        ["127.0.0.1", -1],
        ["127.0.0.1", 1 << 70],
        ["\x00", 7],
        {"0": 1},
    ],
)
def test_an_impossible_address_of_a_relay_is_refused_without_asking_a_name_server(through):
    with pytest.raises(ValueError):  # noqa: PT011 - of the operating system, too
        address_of(through)


@given(st.binary(max_size=64))
@example(b"@7 {}")
def test_every_payload_has_a_channel_or_is_refused(payload):
    try:
        channel, rest = split_routed(payload)
    except InvalidMessageError:
        return
    assert payload == routed(channel) + rest or payload.startswith(b"@0")


def test_strangers_at_the_port_of_a_relay_get_nothing_and_disturb_no_node(cluster):
    agents = cluster(3, most=1)
    hub = join(agents, 1)
    port = hub.endpoint.peers[1].relays
    strangers = [socket.create_connection(("127.0.0.1", port), PATIENCE) for _ in range(2)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    strangers[1].sendall(Caller("another token", "r1", 2).first())
    answer = read_line(strangers[1])
    assert answer.startswith(b"clusterctl-link")
    strangers[1].sendall(b"0" * 64 + b"\n")
    for stranger in strangers[:2]:
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    strangers += [socket.create_connection(("127.0.0.1", port), PATIENCE) for _ in range(60)]  # and say nothing
    agents.start(2)
    eventually(lambda: relays(hub).get(2) == 1)
    for stranger in strangers:
        stranger.close()
    assert len(agents.meet()) == 3


# --- anything, at any time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_connections_that_break_at_random_lose_duplicate_and_reorder_nothing(cluster, proxy, seed):
    chance = random.Random(seed)
    agents = cluster(8, most=2)
    hub = agents.start(0)
    ways = {}
    for rank in range(1, 8):
        ways[rank] = proxy(agents.link["port"])
        agents.start(rank, port=ways[rank].port)
    eventually(lambda: len(relays(hub)) == 7)
    rounds = 40
    for number in range(rounds):
        for link in agents.links.values():
            link.send("note", number=number, text="x" * chance.choice((1, 1000, 100_000)))
        victim = chance.randrange(1, 8)
        if chance.random() < 0.5:
            ways[victim].cut()  # to the hub, or to nothing if it is behind a relay
        elif (broken := agents.links[victim].endpoint.hub.connection) is not None:
            with contextlib.suppress(OSError):  # it is closed already
                broken.sock.shutdown(socket.SHUT_RDWR)
        if chance.random() < 0.5:  # else the next one comes at once
            eventually(lambda: len(relays(hub)) == 7)
    for rank, link in agents.links.items():
        for other in set(agents.links) - {rank}:
            eventually(lambda link=link, other=other: len(numbers(link, f"n{other}")) >= rounds)
            assert numbers(link, f"n{other}") == list(range(rounds)), (seed, rank, other)
        assert {each["kind"] for each in come(link)} == {"note"}
    assert len(agents.meet()) == 8
