"""The agents' link over 127.0.0.1: membership, relayed messages, and the kinds of silence."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module
from agents import plan_of
from link_cluster import (
    PATIENCE,
    TOKEN,
    clock_of_links,
    clusters,
    come,
    coming,
    eventually,
    kinds,
    proxies,
)

from trainer.agent.link import LinkError, door, meeting
from trainer.agent.link.endpoint import WAITING, Peer
from trainer.agent.link.link import Link
from trainer.agent.link.protocol import (
    Caller,
    Connection,
    Host,
    InvalidMessageError,
    RefusedError,
    UnknownPeerError,
    check_welcome,
    encode,
    parse,
)


@pytest.fixture(params=[None, 1], ids=["all to the hub", "through one"])
def cluster(request):
    """Makes clusters: all agents are connected to the hub, or one is, and passes on the frames of the others."""
    with clusters(most=request.param) as make:
        yield make


@pytest.fixture
def clock(monkeypatch):
    return clock_of_links(monkeypatch)


@pytest.fixture
def proxy():
    with proxies() as make:
        yield make


# --- meeting -----------------------------------------------------------------------------------------------------


def test_sixteen_agents_meet_at_once_and_all_get_the_decision_of_rank_0(cluster, monkeypatch):
    monkeypatch.setattr(meeting, "LOOK", 600.0)  # waiting threads do not poll: a message wakes them
    agents = cluster(16)
    asked = []
    for rank in reversed(range(16)):  # rank 0 comes last
        agents.start(rank)
    results = agents.meet(lambda offers: asked.append(offers) or {"port": 1, "copy": {3: ["x"]}})
    assert asked == [{rank: {"from": rank} for rank in range(16)}]
    assert list(results.values()) == [{"port": 1, "copy": {"3": ["x"]}}] * 16


def test_agents_meet_again_and_again(cluster):
    agents = cluster(3)
    for rank in range(3):
        agents.start(rank)
    for number in range(5):
        assert agents.meet(lambda _, number=number: {"n": number}) == {rank: {"n": number} for rank in range(3)}


def test_an_agent_that_comes_back_to_a_hub_is_heard(cluster):
    """In an election an agent may leave a hub that it reaches slowly, and find no other: it comes back."""
    agents = cluster(3)
    hub, _, back = (agents.start(rank) for rank in range(3))
    assert agents.meet(lambda offers: {"from": sorted(offers)}) == {rank: {"from": [0, 1, 2]} for rank in range(3)}
    back.send("note", text="before")
    assert coming(hub, "note")["text"] == "before"
    back.move(1)  # nobody listens there
    back.move(0)
    back.send("note", text="after")
    assert coming(hub, "note")["text"] == "after"
    results = agents.meet(lambda offers: {"again": sorted(offers)}, patience=30.0)
    assert results == {rank: {"again": [0, 1, 2]} for rank in range(3)}


def test_an_answer_to_an_earlier_offer_is_none_for_a_later_one(cluster):
    agents = cluster(2)
    hub, back = (agents.start(rank) for rank in range(2))
    agents.meet(lambda _: {"meeting": 1})
    back.move(0)
    eventually(lambda: back.endpoint.hub.connection is not None)
    hub.endpoint.send_to(1, {"kind": "_answer", "number": 1, "decision": {"meeting": 1}})
    assert agents.meet(lambda _: {"meeting": 2}, patience=30.0) == {rank: {"meeting": 2} for rank in range(2)}


def test_an_offer_reaches_a_hub_that_listens_again(cluster):
    """As in an election, in which an agent that was not elected leaves, and listens again when its turn comes."""
    agents = cluster(2)
    hub, other = agents.start(0), agents.start(1)
    found = []
    waiting = threading.Thread(target=lambda: found.append(other.meet({}, lambda _: {}, 600.0)))
    waiting.start()
    eventually(lambda: hub.meeting.offers)
    hub.move(0)
    assert hub.meet({}, lambda offers: {"count": len(offers)}, PATIENCE) == {"count": 2}
    waiting.join(PATIENCE)
    assert found == [{"count": 2}]


def test_one_node_needs_no_link():
    link = Link(plan_of(), lambda: None)
    link.start()
    link.share("/nowhere")
    link.send("failed", rank=0, text="x")
    assert link.meet({"a": 1}, lambda offers: {"got": offers}) == {"got": {"0": {"a": 1}}}
    link.fetch([])
    assert link.take() == []
    link.close()


def test_over_ipv6(cluster):
    try:
        agents = cluster(2, host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    for rank in range(2):
        agents.start(rank)
    assert agents.meet() == {0: {}, 1: {}}


def test_a_missing_node_is_named_with_the_nodes_that_joined(cluster):
    agents = cluster(3)
    hub = agents.start(0)
    agents.start(1)
    with socket.create_connection(("127.0.0.1", agents.link["port"])) as scanner:
        scanner.sendall(b"GET / HTTP/1.0\r\n\r\n")
        eventually(lambda: hub.endpoint.door.rejections)
        results = agents.meet(patience=0.1, before_rank_0=lambda: 1 in hub.meeting.offers)
    port = agents.link["port"]
    assert str(results[0]) == (
        f"no connection from n2 to 127.0.0.1:{port}: is a firewall in between, or did the agent not start? "
        "Other connections: 127.0.0.1 sent b'GET / HTTP/1.0\\r'."
    )
    assert str(results[1]) == f"n0: {results[0]}"
    assert isinstance(results[0], LinkError)
    assert hub.take() == []


def test_unready_node_is_distinguished_from_a_missing_one(cluster):
    agents = cluster(2)
    hub = agents.start(0)
    agents.start(1)
    eventually(lambda: hub.endpoint.peers[1].connection)
    with pytest.raises(LinkError, match="n1 is connected, but not ready"):
        hub.meet({}, lambda _: {}, 0.1)


def test_client_reports_why_it_cannot_connect(cluster):
    agents = cluster(2)
    link = agents.start(1)
    eventually(lambda: link.endpoint.why)
    with pytest.raises(LinkError, match=r"n1 cannot reach n0 \(rank 0\): nothing listens at 127.0.0.1:\d+"):
        link.meet({}, lambda _: {}, 0.1)


def test_rank_0_on_the_wrong_machine(cluster):
    agents = cluster(2)
    with pytest.raises(LinkError, match=r"rank 0 cannot listen at 192.0.2.1:\d+: .*Is this node rank 0"):
        agents.start(0, host="192.0.2.1")


def test_cancelled_meeting_blocks_no_agent_and_the_next_one_works(cluster):
    agents = cluster(3)
    hub, other = agents.start(0), agents.start(1)
    with pytest.raises(LinkError, match="cancelled"):
        other.meet({}, lambda _: {}, 20, alive=lambda: False)
    results = {}
    del agents.links[0]
    thread = threading.Thread(target=lambda: results.update(agents.meet()))
    thread.start()
    with pytest.raises(LinkError, match="cancelled"):
        # until the second offer: the first one may arrive before it is withdrawn
        hub.meet({}, lambda _: {}, 600, alive=lambda: getattr(hub.meeting.offers.get(1), "number", 0) < 2)
    thread.join(PATIENCE)  # its own patience is ten times that
    assert str(results[1]) == "n0: cancelled"
    agents.links[0] = hub
    agents.start(2)
    assert agents.meet(lambda offers: {"ok": len(offers)}) == {rank: {"ok": 3} for rank in range(3)}


def test_exception_of_decide_ends_the_meeting_on_all_nodes(cluster):
    agents = cluster(2)
    for rank in range(2):
        agents.start(rank)

    def decide(offers):
        raise ValueError("no checkpoint is complete")

    results = agents.meet(decide)
    assert isinstance(results[0], ValueError)
    assert isinstance(results[1], LinkError)
    assert str(results[1]) == "n0: no checkpoint is complete"


# --- who belongs -------------------------------------------------------------------------------------------------


def test_the_same_rank_twice_is_named_on_both_sides(cluster):
    agents = cluster(3)
    hub, first = agents.start(0), agents.start(1)  # the first one stays connected
    eventually(lambda: hub.endpoint.peers[1].connection)
    agents.start(1)
    agents.links["first"] = first
    second = agents.links.pop(1)
    printed = "two nodes have the same rank: 127.0.0.1 and 127.0.0.1 both claim to be rank 1 (n1)"
    with pytest.raises(LinkError) as refused:
        second.meet({}, lambda _: {}, PATIENCE)
    second.close()
    assert str(refused.value) == printed
    with pytest.raises(LinkError) as refused:
        hub.meet({}, lambda _: {}, PATIENCE)
    assert str(refused.value) == printed


def test_a_wrong_token_is_reported_on_both_sides_and_disturbs_no_other_node(cluster):
    agents = cluster(3)
    hub = agents.start(0)
    agents.start(1)
    stranger = agents.start(2, token="f" * 64)
    eventually(lambda: hub.endpoint.door.rejections and stranger.endpoint.why)
    del agents.links[2]
    results = agents.meet(patience=0.1)
    with pytest.raises(LinkError, match="does not know this run's token"):
        stranger.meet({}, lambda _: {}, 0.1)
    agents.links[2] = stranger
    assert "127.0.0.1 claimed to be rank 2 of run r1, but has another token" in str(results[0])


def test_garbage_and_half_open_connections_are_dropped_and_do_not_disturb(cluster, monkeypatch):
    monkeypatch.setattr(door, "DEADLINE", 600.0)  # no pending connection's time is up
    agents = cluster(2)
    hub = agents.start(0)
    where = ("127.0.0.1", agents.link["port"])
    callers = [socket.create_connection(where) for _ in range(100)]  # more than there is room for
    callers[-1].sendall(b"x" * 5000)  # no line, and too long
    callers[-2].sendall(b"[1]\n")
    callers[-3].sendall(Caller(TOKEN, "r1", 1).first())
    callers[-4].sendall(Caller(TOKEN, "r1", 1).first() + b"0" * 64 + b"\n")
    agents.start(1)
    try:
        assert agents.meet() == {0: {}, 1: {}}
        for caller in (callers[-1], callers[-2], callers[0]):
            caller.settimeout(PATIENCE)
            with contextlib.suppress(ConnectionResetError):
                assert caller.recv(100) == b""  # dropped at once; the first to make room
        for newcomer in hub.endpoint.door.pending:
            newcomer.deadline = 0.0
        callers[-4].settimeout(PATIENCE)
        with contextlib.suppress(ConnectionResetError):
            while callers[-4].recv(100):  # it was silent for too long
                pass
    finally:
        for caller in callers:
            caller.close()
    assert hub.take() == []


def test_both_sides_prove_the_token_without_sending_it():
    caller, host = Caller(TOKEN, "r1", 1), Host(TOKEN)
    first = caller.first()
    second = host.take(first)
    third = caller.take(second)
    assert host.take(third) == b""
    assert host.claim == ("r1", 1)
    assert TOKEN.encode() not in first + second + third
    head = caller.session.sent.head(b"x")
    host.session.received.check(head[4:], b"x")
    with pytest.raises(RefusedError, match="no"):
        check_welcome({"refused": "no"})


def test_proof_is_valid_only_for_its_transcript():
    caller, host = Caller(TOKEN, "r1", 1), Host(TOKEN)
    answer = host.take(caller.first().replace(b" r1 1 ", b" r1 2 "))  # a host between them changes the rank
    with pytest.raises(UnknownPeerError, match="does not know this run's token"):
        caller.take(answer)
    with pytest.raises(UnknownPeerError, match="does not know this run's token"):
        host.take(answer.split()[-1] + b"\n")  # the host's own proof, turned round
    assert host.session is caller.session is None


@pytest.mark.parametrize("line", [b"x\n", b"[]\n", b'{"link": 1}\n', b"\xff\n", b"[" * 500, b"x" * 9000])
def test_invalid_line_of_the_handshake_is_refused(line):
    with _connected(512) as (connection, other), contextlib.closing(other):
        other.sendall(line)
        connection.fill()
        with pytest.raises((InvalidMessageError, UnknownPeerError)):
            Host(TOKEN).take(connection.line() or b"")


@pytest.mark.parametrize("payload", [b"x", b"[]", b'"a"', b"\xff", b"[" * 5000, b"[" + b"{}," * (1 << 20) + b"{}]"])
def test_invalid_message_is_refused(payload):
    with pytest.raises(InvalidMessageError, match="sent a message that"):
        parse(payload)


@contextlib.contextmanager
def _connected(limit):
    """A connection, and the socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        connection = Connection(server.accept()[0], limit)
    try:
        yield connection, other
    finally:
        connection.close()
        other.close()


# --- messages ----------------------------------------------------------------------------------------------------


def test_a_failure_reaches_all_others_at_once_with_its_sender(cluster, clock):
    agents = cluster(5)
    woken = threading.Event()
    for rank in range(5):
        agents.start(rank, wake=woken.set if rank == 4 else lambda: None)
    agents.meet()
    clock.stop()  # with no heartbeat
    agents.links[2].send("failed", failed=7, text="rank 7 ended")
    assert woken.wait(PATIENCE)
    for rank in (0, 1, 3, 4):
        message = coming(agents.links[rank], "failed")
        assert message == {"kind": "failed", "failed": 7, "text": "rank 7 ended", "node": "n2", "rank": 2}
    agents.links[0].send("stop", save=True, who="x")
    for rank in (1, 2, 3, 4):
        message = coming(agents.links[rank], "stop")
        assert message == {"kind": "stop", "save": True, "who": "x", "node": "n0", "rank": 0}
    assert agents.links[2].take() == []  # its own messages are not sent back


def test_a_sender_cannot_speak_for_another(cluster):
    agents = cluster(3)
    for rank in range(3):
        agents.start(rank)
    agents.meet()
    agents.links[1].send("failed", node="n2", rank=2, text="x")
    message = coming(agents.links[2], "failed")
    assert (message["node"], message["rank"]) == ("n1", 1)


def test_large_messages_arrive_complete_and_in_order(cluster):
    agents = cluster(3)
    for rank in range(3):
        agents.start(rank)
    agents.meet()
    for number in range(5):
        agents.links[1].send("stacks", number=number, text="x" * (3 << 20))
    for number in range(5):
        message = coming(agents.links[2], "stacks")
        assert (message["number"], len(message["text"])) == (number, 3 << 20)


def test_last_message_arrives_and_a_goodbye_is_no_failure(cluster, clock):
    agents = cluster(3, lost_after=3.0)
    for rank in range(3):
        agents.start(rank)
    agents.meet()
    agents.links[1].send("ended", rc=0)
    agents.links.pop(1).close()
    assert coming(agents.links[2], "ended")["rc"] == 0
    clock.stop()
    clock.advance(8.0, agents.links[0], agents.links[2])
    assert kinds(agents.links[0]) == ["ended"]
    assert kinds(agents.links[2]) == []


@pytest.mark.parametrize("closing", [0, 1])
def test_closing_does_not_wait_for_acknowledged_messages(cluster, closing):
    agents = cluster(2)
    for rank in range(2):
        agents.start(rank)
    agents.meet()
    agents.links[closing].send("ended", rc=0)
    assert coming(agents.links[1 - closing], "ended")["rc"] == 0
    agents.links.pop(closing).endpoint.close(600.0)  # longer than a test may take


def test_closing_does_not_wait_for_a_peer_that_has_left(cluster):
    agents = cluster(2)
    for rank in range(2):
        agents.start(rank)
    agents.meet()
    agents.links.pop(1).close()
    hub = agents.links.pop(0)
    eventually(lambda: hub.endpoint.peers[1].left)
    hub.send("ended", rc=0)  # no peer is connected: it stays unacknowledged
    hub.endpoint.close(600.0)


def test_full_queue_keeps_the_first_messages_and_drops_later_ones():
    peer = Peer(1, "n1")
    assert peer.queue(encode({"kind": "failed"}))
    while peer.queue(encode({"kind": "stacks", "text": "x" * (1 << 20)})):
        pass
    assert peer.size <= WAITING
    assert parse(peer.unacknowledged[0][1]) == {"kind": "failed"}
    assert not Peer(1, "n1").queue(encode({"text": "x" * (17 << 20)}))


# --- silence -----------------------------------------------------------------------------------------------------


def test_a_killed_agent_is_reported_to_all_within_seconds(cluster, clock):
    agents = cluster(3)
    for rank in (0, 2):
        agents.start(rank)
    child = agents.child(1)
    assert set(map(str, agents.meet().values())) == {"{}"}
    assert child.stdout.readline() == b"met\n"
    here = (agents.links[0], agents.links[2])
    clock.stop()
    child.kill()
    eventually(lambda: agents.links[0].endpoint.peers[1].closed)
    clock.advance(2.7, *here)
    assert kinds(here[0]) == []
    clock.advance(0.6, *here)
    assert coming(here[0], "gone") == {"kind": "gone", "node": "n1", "rank": 1}
    assert coming(here[1], "gone")["node"] == "n1"


def test_death_of_rank_0_is_reported_to_all_others(cluster, clock):
    agents = cluster(3)
    child = agents.child(0)
    for rank in (1, 2):
        agents.start(rank)
    agents.meet()
    clock.stop()
    child.kill()
    for rank in (1, 2):
        here = agents.links[rank]
        eventually(lambda here=here: here.endpoint.hub.closed)
    clock.advance(3.3, *agents.links.values())
    for rank in (1, 2):
        assert coming(agents.links[rank], "gone", node="n0")["rank"] == 0
    with pytest.raises(LinkError, match=r"the agent of n0 \(rank 0\) exited"):
        agents.links[1].meet({}, lambda _: {}, PATIENCE)


@pytest.mark.parametrize("stopped", [0, 1])
def test_stopped_agent_is_lost_and_back_but_never_gone(cluster, clock, stopped):
    agents = cluster(2, lost_after=3.0)
    here = agents.start(1 - stopped)
    child = agents.child(stopped, lost_after=600.0)
    agents.meet()
    peer = here.endpoint.peers[stopped]

    def nine_seconds_pass():
        for _ in range(9):  # far more than lost_after
            clock.advance(1.0, here)
            before = clock.monotonic()
            clock.until(lambda before=before: peer.last_arrival > before, here)

    clock.stop()
    nine_seconds_pass()
    assert kinds(here) == []
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    clock.advance(0.02, here)  # its earlier messages
    since = peer.last_arrival
    clock.advance(since + 2.9 - clock.monotonic(), here)
    assert kinds(here) == []
    clock.advance(0.5, here)
    assert coming(here, "lost")["silent"] >= 3.0
    clock.advance(4.0, here)  # long enough for a second connection to be tried
    assert kinds(here) == []
    child.send_signal(signal.SIGCONT)
    clock.until(lambda: come(here), here)
    assert coming(here, "back")["node"] == f"n{stopped}"
    nine_seconds_pass()
    assert kinds(here) == []


@pytest.mark.parametrize("cluster", [None], indirect=True)  # through another agent the network would not matter
def test_messages_survive_a_network_that_forwards_nothing_for_a_while(cluster, clock, proxy):
    agents = cluster(3, lost_after=3.0)
    between = proxy(agents.link["port"])
    agents.start(0)
    agents.start(1)
    agents.start(2, port=between.port)
    agents.meet()
    clock.stop()
    here = agents.links.values()
    between.flowing.clear()
    clock.advance(4.2, *here)
    assert coming(agents.links[0], "lost")["node"] == "n2"
    assert coming(agents.links[1], "lost")["node"] == "n2"
    assert coming(agents.links[2], "lost")["node"] == "n0"
    for number in range(3):
        agents.links[2].send("note", number=number)
        agents.links[0].send("note", number=number)
    clock.advance(7.0, *here)
    assert [kinds(link) for link in here] == [[], ["note"] * 3, []]
    between.flowing.set()
    for rank, other in ((0, "n2"), (2, "n0")):
        clock.until(lambda rank=rank: len(come(agents.links[rank])) >= 4, *here)
        seen = come(agents.links[rank])
        assert sorted(message["kind"] for message in seen) == ["back", "note", "note", "note"]
        assert [message["number"] for message in seen if message["kind"] == "note"] == [0, 1, 2]
        assert {message["node"] for message in seen} == {other}
        seen.clear()
    assert coming(agents.links[1], "back")["node"] == "n2"
    clock.advance(0.6, *here)
    assert kinds(agents.links[0]) == []


def test_repeatedly_broken_connections_lose_and_duplicate_no_message(cluster, proxy):
    agents = cluster(2)
    between = proxy(agents.link["port"])
    agents.start(0)
    agents.start(1, port=between.port)
    agents.meet()
    for number in range(200):
        agents.links[0].send("note", number=number, text="x" * 5000)
        agents.links[1].send("note", number=number, text="x" * 5000)
        if number % 20 == 10:
            between.cut()
        time.sleep(0.005)
    for rank in (0, 1):
        seen = []
        eventually(lambda rank=rank, seen=seen: seen.extend(agents.links[rank].take()) or len(seen) >= 200)
        assert [message["number"] for message in seen if message["kind"] == "note"] == list(range(200))


def test_a_delayed_agent_blames_no_node(cluster, clock):
    agents = cluster(2, lost_after=3.0)
    held, other = agents.start(0), agents.start(1)
    agents.meet()
    clock.stop()
    until = threading.Event()
    held.endpoint.loop.post(until.wait)  # as if this process had been stopped
    clock.advance(5.1, other)
    assert coming(other, "lost")["node"] == "n0"
    until.set()
    clock.until(lambda: come(other), held, other)
    assert coming(other, "back")["node"] == "n0"
    clock.advance(3.0, held, other)
    assert kinds(held) == []


@pytest.mark.parametrize("dead", [0, 1])
def test_another_process_reports_the_end_of_a_killed_agent(cluster, dead):
    agents = cluster(3)
    for rank in {0, 1, 2} - {dead}:
        agents.start(rank)
    child = agents.child(dead)
    agents.meet()
    agents.links[2].send("note")
    child.kill()
    child.wait()
    successor = Link(agents.plan(dead), lambda: None)
    successor.start()
    successor.send("failed", text="the agent was killed")
    successor.close()
    for rank in {0, 1, 2} - {dead}:
        message = coming(agents.links[rank], "failed")
        assert (message["node"], message["text"]) == (f"n{dead}", "the agent was killed")


def test_an_error_in_the_link_is_reported(cluster):
    agents = cluster(2)
    link = agents.start(1)
    link.endpoint.loop.post(lambda: 1 / 0)
    assert "ZeroDivisionError" in coming(link, "broken")["text"]


def test_idle_agents_cost_next_to_nothing(cluster):
    """They wake for a look at the clock four times a second, and for heartbeats: more would be a loop that spins."""
    agents = cluster(2)
    rounds = []
    for rank in range(2):
        selector = agents.start(rank).endpoint.loop.selector
        selector.select = lambda left, select=selector.select: rounds.append(1) or select(left)
    agents.meet()
    time.sleep(0.5)  # the messages to acknowledge
    rounds.clear()
    began = time.monotonic()
    time.sleep(1.5)
    assert len(rounds) / (time.monotonic() - began) / 2 < 20
