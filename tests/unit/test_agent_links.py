"""The agents' link over 127.0.0.1: who belongs, what is relayed, and what each kind of silence means."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

AGENT = Path(__file__).parents[2] / "trainer" / "agent"
sys.path.append(str(AGENT))  # its modules import one another from there
PYTHON = os.environ.get("AGENT_PYTHON", sys.executable)  # to try the agent under an older Python

from link.frames import Connection, NotOursError, encode, parse  # noqa: E402
from link.links import Link, LinkError  # noqa: E402
from link.peer import WAITING, Peer  # noqa: E402
from link.proof import Caller, Host, RefusedError, StrangerError, admitted  # noqa: E402

TOKEN = "0123456789abcdef" * 4

# An agent of its own: meets, says so, and lives until its stdin ends.
CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
from link.links import Link
link = Link(json.loads(sys.argv[2]), lambda: None)
link.start()
link.meet({}, lambda _: {}, 20)
print("met", flush=True)
sys.stdin.read()
link.close()
"""


def free_port(host="127.0.0.1"):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]


class Cluster:
    """Plans of one run, and the links that a test has made of them."""

    def __init__(self, count, host="127.0.0.1", lost_after=60.0):
        self.names = [f"n{rank}" for rank in range(count)]
        self.link = {"host": host, "port": free_port(host), "token": TOKEN, "nodes": self.names}
        self.link["lost_after"] = lost_after
        self.links = {}
        self.children = []

    def plan(self, rank, **link):
        return {"run": "r1", "node": self.names[rank], "node_rank": rank, "link": self.link | link}

    def start(self, rank, wake=lambda: None, **link):
        made = Link(self.plan(rank, **link), wake)
        made.start()
        self.links[rank] = made
        return made

    def child(self, rank, **link):
        argv = [PYTHON, "-IB", "-c", CHILD, AGENT, json.dumps(self.plan(rank, **link))]
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.children.append(child)
        return child

    def meet(self, decide=lambda _: {}, patience=20.0):
        """All links of this process meet; the results (or what was raised) by rank."""
        results = {}

        def meet(rank, link):
            try:
                results[rank] = link.meet({"from": rank}, decide, patience)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                results[rank] = error

        threads = [threading.Thread(target=meet, args=item) for item in self.links.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    def close(self):
        for child in self.children:
            child.kill()
            child.wait()
            child.stdin.close()
            child.stdout.close()
        closing = [threading.Thread(target=link.close) for link in self.links.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(20)


@pytest.fixture
def cluster(request):
    made = []

    def make(*arguments, **options):
        made.append(Cluster(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def coming(link, kind, seconds=8.0, node=None):
    """The next message of this kind, and the seconds that it took. Others that came before it are dropped."""
    began = time.monotonic()
    kept = link.__dict__.setdefault("kept_by_test", [])
    while time.monotonic() - began < seconds:
        kept += link.take()
        while kept:
            message = kept.pop(0)
            if message["kind"] == kind and node in (None, message.get("node")):
                return message, time.monotonic() - began
        time.sleep(0.01)
    raise AssertionError(f"no {kind!r} came in {seconds} s")


def quiet(link, kinds, seconds):
    """None of these kinds comes."""
    time.sleep(seconds)
    come = link.__dict__.pop("kept_by_test", []) + link.take()
    assert not [message for message in come if message["kind"] in kinds]


# --- meeting -----------------------------------------------------------------------------------------------------


def test_sixteen_agents_meet_in_two_seconds_and_all_get_what_rank_0_decides(cluster):
    agents = cluster(16)
    asked = []
    for rank in reversed(range(16)):  # rank 0 comes last
        agents.start(rank)
    began = time.monotonic()
    results = agents.meet(lambda offers: asked.append(offers) or {"port": 1, "copy": {3: ["x"]}})
    assert time.monotonic() - began < 2
    assert asked == [{rank: {"from": rank} for rank in range(16)}]
    assert list(results.values()) == [{"port": 1, "copy": {"3": ["x"]}}] * 16


def test_agents_meet_again_and_again(cluster):
    agents = cluster(3)
    for rank in range(3):
        agents.start(rank)
    for number in range(5):
        assert agents.meet(lambda _, number=number: {"n": number}) == {rank: {"n": number} for rank in range(3)}


def test_one_node_needs_no_link():
    link = Link({"run": "r", "node": "n0", "node_rank": 0, "link": None}, lambda: None)
    link.start()
    link.share("/nowhere")
    link.tell("failed", rank=0, text="x")
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


def test_who_has_not_come_is_named_with_what_came_instead(cluster):
    agents = cluster(3)
    hub = agents.start(0)
    agents.start(1)
    with socket.create_connection(("127.0.0.1", agents.link["port"])) as scanner:
        scanner.sendall(b"GET / HTTP/1.0\r\n\r\n")
        results = agents.meet(patience=1.0)
    port = agents.link["port"]
    assert str(results[0]) == (
        f"n2 has not come: no connection from it to 127.0.0.1:{port}; is a firewall in between, or did the agent not "
        "start? Others came: 127.0.0.1 said b'GET / HTTP/1.0\\r'."
    )
    assert str(results[1]) == f"n0: {results[0]}"
    assert isinstance(results[0], LinkError)
    assert hub.take() == []


def test_a_node_that_is_not_ready_is_told_from_one_that_has_not_come(cluster):
    agents = cluster(2)
    hub = agents.start(0)
    agents.start(1)
    with pytest.raises(LinkError, match="n1 is here, but not ready"):
        hub.meet({}, lambda _: {}, 1.5)


def test_a_client_says_why_it_cannot_connect(cluster):
    agents = cluster(2)
    link = agents.start(1)
    with pytest.raises(LinkError, match=r"n1 has not met n0 \(rank 0\): nothing listens at 127.0.0.1:\d+"):
        link.meet({}, lambda _: {}, 0.5)


def test_rank_0_on_the_wrong_machine(cluster):
    agents = cluster(2)
    with pytest.raises(LinkError, match=r"rank 0 cannot listen at 192.0.2.1:\d+: .*Is this node rank 0"):
        agents.start(0, host="192.0.2.1")


def test_giving_up_keeps_nobody_waiting_and_the_next_meeting_works(cluster):
    agents = cluster(3)
    hub, other = agents.start(0), agents.start(1)
    with pytest.raises(LinkError, match="it was given up"):
        other.meet({}, lambda _: {}, 20, alive=lambda: False)
    began = time.monotonic()
    results = {}
    del agents.links[0]
    thread = threading.Thread(target=lambda: results.update(agents.meet()))
    thread.start()
    with pytest.raises(LinkError, match="it was given up"):
        hub.meet({}, lambda _: {}, 20, alive=lambda: time.monotonic() < began + 0.5)
    thread.join(20)
    assert str(results[1]) == "n0: it was given up"
    agents.links[0] = hub
    assert time.monotonic() - began < 2
    agents.start(2)
    assert agents.meet(lambda offers: {"ok": len(offers)}) == {rank: {"ok": 3} for rank in range(3)}


def test_what_decide_raises_ends_the_meeting_everywhere(cluster):
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
    with pytest.raises(LinkError, match="n1 is here, but not ready"):
        hub.meet({}, lambda _: {}, 1.0)
    agents.start(1)
    agents.links["first"] = first
    second = agents.links.pop(1)
    said = "two nodes were given the same rank: 127.0.0.1 and 127.0.0.1 both say they are rank 1 (n1)"
    with pytest.raises(LinkError) as refused:
        second.meet({}, lambda _: {}, 10)
    second.close()
    assert str(refused.value) == said
    with pytest.raises(LinkError) as refused:
        hub.meet({}, lambda _: {}, 10)
    assert str(refused.value) == said


def test_a_wrong_token_is_said_on_both_sides_and_disturbs_nobody(cluster):
    agents = cluster(3)
    agents.start(0)
    agents.start(1)
    agents.start(2, token="f" * 64)
    results = agents.meet(patience=1.5)
    assert "127.0.0.1 said it was rank 2 of run r1, and has another token" in str(results[0])
    assert "does not know this run's token" in str(results[2])


def test_garbage_and_half_open_connections_are_dropped_and_do_not_disturb(cluster):
    agents = cluster(2)
    hub = agents.start(0)
    where = ("127.0.0.1", agents.link["port"])
    guests = [socket.create_connection(where) for _ in range(100)]  # more than there is room for
    guests[-1].sendall(b"x" * 5000)  # no line, and too long
    guests[-2].sendall(b"[1]\n")
    guests[-3].sendall(Caller(TOKEN, "r1", 1).first())
    guests[-4].sendall(Caller(TOKEN, "r1", 1).first() + b"0" * 64 + b"\n")
    agents.start(1)
    try:
        assert agents.meet() == {0: {}, 1: {}}
        for guest in (guests[-1], guests[-2], guests[0]):
            guest.settimeout(2)
            with contextlib.suppress(ConnectionResetError):
                assert guest.recv(100) == b""  # dropped at once; the first to make room
        guests[50].settimeout(8)
        assert guests[50].recv(100) == b""  # it said nothing for too long
    finally:
        for guest in guests:
            guest.close()
    assert hub.take() == []


def test_the_token_is_proved_by_both_and_never_said():
    caller, host = Caller(TOKEN, "r1", 1), Host(TOKEN)
    first = caller.first()
    second = host.take(first)
    third = caller.take(second)
    assert host.take(third) == b""
    assert host.claimed == ("r1", 1)
    assert TOKEN.encode() not in first + second + third
    head = caller.session.sent.head(b"x")
    host.session.received.check(head[4:], b"x")
    with pytest.raises(RefusedError, match="no"):
        admitted({"refused": "no"})


def test_a_proof_holds_for_what_was_said_only():
    caller, host = Caller(TOKEN, "r1", 1), Host(TOKEN)
    answer = host.take(caller.first().replace(b" r1 1 ", b" r1 2 "))  # somebody between them changes the rank
    with pytest.raises(StrangerError, match="does not know this run's token"):
        caller.take(answer)
    with pytest.raises(StrangerError, match="does not know this run's token"):
        host.take(answer.split()[-1] + b"\n")  # the host's own proof, turned round
    assert host.session is caller.session is None


@pytest.mark.parametrize("line", [b"x\n", b"[]\n", b'{"link": 1}\n', b"\xff\n", b"[" * 500, b"x" * 9000])
def test_what_is_no_line_of_the_greeting_is_refused(line):
    with _connected(512) as (connection, other), contextlib.closing(other):
        other.sendall(line)
        connection.fill()
        with pytest.raises((NotOursError, StrangerError)):
            Host(TOKEN).take(connection.line() or b"")


@pytest.mark.parametrize("payload", [b"x", b"[]", b'"a"', b"\xff", b"[" * 5000, b"[" + b"{}," * (1 << 20) + b"{}]"])
def test_what_is_no_message_is_refused(payload):
    with pytest.raises(NotOursError, match="sent a message that"):
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


def test_a_failure_reaches_all_others_at_once_with_its_sender(cluster):
    agents = cluster(5)
    woken = threading.Event()
    for rank in range(5):
        agents.start(rank, wake=woken.set if rank == 4 else lambda: None)
    agents.meet()
    time.sleep(0.3)
    began = time.monotonic()
    agents.links[2].tell("failed", failed=7, text="rank 7 ended")
    assert woken.wait(0.3)
    for rank in (0, 1, 3, 4):
        message, _ = coming(agents.links[rank], "failed", 0.3)
        assert message == {"kind": "failed", "failed": 7, "text": "rank 7 ended", "node": "n2", "rank": 2}
    assert time.monotonic() - began < 0.3
    agents.links[0].tell("stop", save=True, who="x")
    for rank in (1, 2, 3, 4):
        message, _ = coming(agents.links[rank], "stop")
        assert message == {"kind": "stop", "save": True, "who": "x", "node": "n0", "rank": 0}
    assert agents.links[2].take() == []  # what it told does not come back


def test_a_sender_cannot_speak_for_another(cluster):
    agents = cluster(3)
    for rank in range(3):
        agents.start(rank)
    agents.meet()
    agents.links[1].tell("failed", node="n2", rank=2, text="x")
    message, _ = coming(agents.links[2], "failed")
    assert (message["node"], message["rank"]) == ("n1", 1)


def test_large_messages_come_whole_and_in_order(cluster):
    agents = cluster(3)
    for rank in range(3):
        agents.start(rank)
    agents.meet()
    for number in range(5):
        agents.links[1].tell("stacks", number=number, text="x" * (3 << 20))
    for number in range(5):
        message, _ = coming(agents.links[2], "stacks", 20)
        assert (message["number"], len(message["text"])) == (number, 3 << 20)


def test_what_was_told_last_arrives_and_a_goodbye_is_no_failure(cluster):
    agents = cluster(3, lost_after=3.0)
    for rank in range(3):
        agents.start(rank)
    agents.meet()
    agents.links[1].tell("ended", rc=0)
    agents.links.pop(1).close()
    assert coming(agents.links[2], "ended")[0]["rc"] == 0
    quiet(agents.links[0], {"gone", "lost"}, 4.0)
    assert agents.links[2].take() == []


def test_too_much_for_one_that_does_not_listen_is_dropped_and_the_first_kept():
    peer = Peer(1, "n1")
    assert peer.tell(encode({"kind": "failed"}))
    while peer.tell(encode({"kind": "stacks", "text": "x" * (1 << 20)})):
        pass
    assert peer._size <= WAITING
    assert parse(peer._kept[0][1]) == {"kind": "failed"}
    assert not Peer(1, "n1").tell(encode({"text": "x" * (17 << 20)}))


# --- silence -----------------------------------------------------------------------------------------------------


def test_a_killed_agent_is_gone_within_seconds_and_all_are_told(cluster):
    agents = cluster(3)
    for rank in (0, 2):
        agents.start(rank)
    child = agents.child(1)
    assert set(map(str, agents.meet().values())) == {"{}"}
    assert child.stdout.readline() == b"met\n"
    child.kill()
    message, took = coming(agents.links[0], "gone")
    assert message == {"kind": "gone", "node": "n1", "rank": 1}
    assert 2.5 < took < 3.5
    assert coming(agents.links[2], "gone", 0.5)[0]["node"] == "n1"


def test_when_rank_0_is_killed_all_others_know(cluster):
    agents = cluster(3)
    child = agents.child(0)
    for rank in (1, 2):
        agents.start(rank)
    agents.meet()
    child.kill()
    for rank in (1, 2):
        message, took = coming(agents.links[rank], "gone", node="n0")
        assert took < 3.6
        assert message["rank"] == 0
    with pytest.raises(LinkError, match=r"the agent of n0 \(rank 0\) has ended"):
        agents.links[1].meet({}, lambda _: {}, 20)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_agent_is_lost_and_comes_back_but_never_gone(cluster, stopped):
    agents = cluster(2, lost_after=3.0)
    here = agents.start(1 - stopped)
    child = agents.child(stopped)
    agents.meet()
    quiet(here, {"lost", "gone"}, 4.0)
    child.send_signal(signal.SIGSTOP)
    message, took = coming(here, "lost")
    assert message["silent"] >= 3.0
    assert took < 4.0
    quiet(here, {"lost", "gone", "back"}, 4.0)  # long enough for a second connection to be tried
    child.send_signal(signal.SIGCONT)
    message, _ = coming(here, "back")
    assert message["node"] == f"n{stopped}"
    quiet(here, {"lost", "gone"}, 4.0)


class Proxy:
    """Forwards to a port, until it is told to hold everything back; keeps accepting."""

    def __init__(self, port):
        self.flowing = threading.Event()
        self.flowing.set()
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                with self._lock:
                    self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source, target):
        with contextlib.suppress(OSError):
            while True:
                data = source.recv(65536)
                self.flowing.wait()
                if not data:
                    break
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def cut(self):
        """End every connection, with what is on the way."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def close(self):
        self.flowing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


@pytest.fixture
def proxy():
    made = []

    def make(port):
        made.append(Proxy(port))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_network_that_forwards_nothing_is_lost_and_back_and_nothing_is_lost_on_the_way(cluster, proxy):
    agents = cluster(3, lost_after=3.0)
    between = proxy(agents.link["port"])
    agents.start(0)
    agents.start(1)
    agents.start(2, port=between.port)
    agents.meet()
    between.flowing.clear()
    assert coming(agents.links[0], "lost")[0]["node"] == "n2"
    assert coming(agents.links[1], "lost")[0]["node"] == "n2"
    assert coming(agents.links[2], "lost")[0]["node"] == "n0"
    for number in range(3):
        agents.links[2].tell("note", number=number)
        agents.links[0].tell("note", number=number)
    quiet(agents.links[0], {"gone", "back"}, 7.0)
    assert agents.links[2].take() == []
    between.flowing.set()
    for rank, other in ((0, "n2"), (2, "n0")):
        seen = []
        limit = time.monotonic() + 8
        while time.monotonic() < limit and len(seen) < 4:
            seen += agents.links[rank].__dict__.pop("kept_by_test", []) + agents.links[rank].take()
            time.sleep(0.01)
        assert sorted(message["kind"] for message in seen) == ["back", "note", "note", "note"]
        assert [message["number"] for message in seen if message["kind"] == "note"] == [0, 1, 2]
        assert {message["node"] for message in seen} == {other}
    assert coming(agents.links[1], "back")[0]["node"] == "n2"
    quiet(agents.links[0], {"gone", "lost", "note"}, 2.0)


def test_connections_that_are_cut_again_and_again_lose_and_double_nothing(cluster, proxy):
    agents = cluster(2)
    between = proxy(agents.link["port"])
    agents.start(0)
    agents.start(1, port=between.port)
    agents.meet()
    for number in range(200):
        agents.links[0].tell("note", number=number, text="x" * 5000)
        agents.links[1].tell("note", number=number, text="x" * 5000)
        if number % 20 == 10:
            between.cut()
        time.sleep(0.005)
    for rank in (0, 1):
        seen = []
        limit = time.monotonic() + 10
        while time.monotonic() < limit and len(seen) < 200:
            seen += agents.links[rank].take()
            time.sleep(0.01)
        assert [message.get("number") for message in seen] == list(range(200))


def test_an_agent_that_was_held_up_blames_nobody(cluster):
    agents = cluster(2, lost_after=3.0)
    agents.start(0)
    agents.start(1)
    agents.meet()
    agents.links[0]._end.loop.post(lambda: time.sleep(5))  # as if this process had been stopped
    assert coming(agents.links[1], "lost")[0]["node"] == "n0"
    assert coming(agents.links[1], "back")[0]["node"] == "n0"
    quiet(agents.links[0], {"lost", "gone", "back"}, 1.5)


@pytest.mark.parametrize("dead", [0, 1])
def test_another_process_speaks_for_an_agent_that_was_killed(cluster, dead):
    agents = cluster(3)
    for rank in {0, 1, 2} - {dead}:
        agents.start(rank)
    child = agents.child(dead)
    agents.meet()
    agents.links[2].tell("note")
    child.kill()
    child.wait()
    successor = Link(agents.plan(dead), lambda: None)
    successor.start()
    successor.tell("failed", text="the agent was killed")
    successor.close()
    for rank in {0, 1, 2} - {dead}:
        message, _ = coming(agents.links[rank], "failed", 2)
        assert (message["node"], message["text"]) == (f"n{dead}", "the agent was killed")


def test_a_mistake_in_the_link_is_told(cluster):
    agents = cluster(2)
    link = agents.start(1)
    link._end.loop.post(lambda: 1 / 0)
    assert "ZeroDivisionError" in coming(link, "broken")[0]["text"]


def test_idle_agents_cost_next_to_nothing(cluster):
    agents = cluster(2)
    for rank in range(2):
        agents.start(rank)
    agents.meet()
    before = time.process_time()
    time.sleep(3)
    assert (time.process_time() - before) / 3 / 2 < 0.01
