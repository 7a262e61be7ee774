"""The agents' link under attack: strangers at the port, hosts on the way, a lying agent of the run."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import plan_of

from trainer.agent.link import LinkError, copies
from trainer.agent.link.door import ROOM, SHARE, PendingConnection, PendingConnections
from trainer.agent.link.endpoint import Peer
from trainer.agent.link.hub import BURST, LEAST, RATE, Allowance
from trainer.agent.link.link import Link
from trainer.agent.link.protocol import (
    HEAD,
    MESSAGE,
    Caller,
    Connection,
    CopyError,
    Host,
    InvalidMessageError,
    Seal,
    Stream,
    UnknownPeerError,
    encode,
    parse,
)

TOKEN = "t" * 64


class Run:
    """Links of one run, each with its own folder."""

    def __init__(self, folder, count):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self.folder = folder
        self.names = [f"n{rank}" for rank in range(count)]
        self.links = {}

    def start(self, rank):
        where = {"host": "127.0.0.1", "port": self.port, "token": TOKEN, "nodes": self.names}
        link = Link(plan_of(node=self.names[rank], node_rank=rank, link=where), lambda: None)
        link.start()
        (self.folder / self.names[rank]).mkdir(exist_ok=True)
        link.share(str(self.folder / self.names[rank]))
        self.links[rank] = link
        return link

    def meet(self, decide=lambda _: {}):
        """All of them meet; returns each one's decision or exception."""
        results = {}

        def one(rank, link):
            try:
                results[rank] = link.meet({}, decide, 20)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                results[rank] = error

        meeting = [threading.Thread(target=one, args=item) for item in self.links.items()]
        for thread in meeting:
            thread.start()
        for thread in meeting:
            thread.join(30)
        return results

    def connect(self, source="127.0.0.1"):
        """A connection of a stranger."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=10, source_address=(source, 0))

    def liar(self, real, **hello):
        """A connection of an agent of this run, controlled by the test; after its welcome."""
        sock = self.connect()
        caller = Caller(TOKEN, "r", real)
        sock.sendall(caller.first())
        sock.sendall(caller.take(copies.read_line(sock)))
        stream = Stream(sock, caller.session)
        stream.send({"rank": real, "instance": "liar", "purpose": "link", "of": "", "received": 0, **hello})
        return stream

    def close(self):
        closing = [threading.Thread(target=link.close) for link in self.links.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(20)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.agent.link.link.GOODBYE", 0.2)  # a liar acknowledges nothing
    made = []

    def make(count):
        made.append(Run(tmp_path, count))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ended(sock, seconds=10.0):
    """Whether the other end closes this connection in time; what it sends before that, heartbeats too, is skipped."""
    limit = time.monotonic() + seconds
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while (left := limit - time.monotonic()) > 0:
            sock.settimeout(left)
            try:
                if not sock.recv(1 << 16):
                    break
            except TimeoutError:
                return False
        else:
            return False
    return True


def eventually(test, seconds=20.0):
    limit = time.monotonic() + seconds
    while not (found := test()):
        assert time.monotonic() < limit, "did not happen"
        time.sleep(0.01)
    return found


def works(agents):
    """Whether the link still does all of its work."""
    assert agents.meet() == {rank: {} for rank in agents.links}
    for link in agents.links.values():
        assert not [message for message in link.take() if message["kind"] == "broken"]
    return True


# --- strangers ---------------------------------------------------------------------------------------------------


STRANGE = [
    b'{"link":1,"rank":1,"run":"r","x":' + b"[" * 1500 + b"]" * 1500 + b"}\n",
    b'{"link":1,"rank":1,"run":"r","x":' + b"[" * 985 + b"]" * 985 + b"}\n",
    b"[" * 4000 + b"\n",
    b'{"link":1,"rank":1,"run":"\\ud800","nonce":"\\ud800"}\n',
    b'{"link":1,"rank":[],"run":{}}\n',
    b"\0" * 4096,
    b"clusterctl-link 3 r 99999999999999999999999 " + b"0" * 32 + b"\n",
    b"clusterctl-link 3 r 1 " + b"0" * 32 + b"\n" + b"\xff" * 64 + b"\n",
]


def test_no_input_of_a_stranger_stops_the_link(run):
    agents = run(2)
    agents.start(0)
    for data in STRANGE:
        with agents.connect() as stranger:
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            assert ended(stranger), data
    agents.start(1)
    assert works(agents)


@given(st.binary(max_size=600))
def test_every_line_is_refused_or_understood_by_the_host(line):
    host = Host(TOKEN)
    with contextlib.suppress(UnknownPeerError):
        host.take(line)
    with contextlib.suppress(UnknownPeerError):
        host.take(line)
    assert host.session is None


@given(st.binary(max_size=600))
def test_every_line_is_refused_by_the_caller(line):
    caller = Caller(TOKEN, "r", 1)
    with pytest.raises(UnknownPeerError):
        caller.take(line)
    assert caller.session is None


@given(st.integers(0, 200), st.integers(1, 255))
def test_changed_byte_of_the_handshake_is_detected(place, change):
    caller, host = Caller(TOKEN, "r", 1), Host(TOKEN)
    first = bytearray(caller.first())
    first[place % (len(first) - 1)] ^= change
    with pytest.raises(UnknownPeerError):
        caller.take(host.take(bytes(first)))


def test_an_address_that_floods_connections_does_not_stop_nodes_from_joining(run, monkeypatch):
    """The churn continues until the agent has joined: were its connection evicted, it would have to connect again."""
    agents = run(2)
    hub = agents.start(0).endpoint
    over, opened = threading.Event(), []
    evicted, turned_away = [], hub.door.reject
    monkeypatch.setattr(
        hub.door, "reject", lambda newcomer, why: (evicted.append(newcomer.address), turned_away(newcomer, why))
    )

    def churn():
        held = []
        while not over.is_set():
            with contextlib.suppress(OSError):
                held.append(agents.connect("127.0.0.2"))
                opened.append(1)
            if len(held) > 200:
                held.pop(0).close()
        for sock in held:
            sock.close()

    churning = [threading.Thread(target=churn) for _ in range(2)]
    for thread in churning:
        thread.start()
    try:
        eventually(lambda: evicted.count("127.0.0.2") > 50)  # its share is full, and it displaces itself
        agents.start(1)
        eventually(lambda: hub.peers[1].connection is not None)
    finally:
        over.set()
        for thread in churning:
            thread.join(20)
    assert set(evicted) == {"127.0.0.2"}
    assert works(agents)


def newcomer(address, printed=False):
    made = PendingConnection(object(), address, TOKEN)
    if printed:
        made.host.take(Caller(TOKEN, "r", 1).first())
    return made


def test_full_address_displaces_its_own_connections_the_silent_ones_first():
    pending = PendingConnections(2, choose=lambda among: among[0])
    talking = [newcomer("10.0.0.1", printed=True) for _ in range(SHARE + 1)]
    for one in [*talking, newcomer("10.0.0.2")]:
        assert pending.crowded(one.address) is None
        pending.add(one)
    silent = newcomer("10.0.0.1")
    pending.add(silent)
    assert pending.crowded("10.0.0.1") is silent
    pending.remove(silent)
    pending.add(newcomer("10.0.0.1", printed=True))
    assert pending.crowded("10.0.0.1") is talking[0]
    assert pending.crowded("10.0.0.2") is pending.crowded("10.0.0.3") is None


def test_full_table_displaces_a_connection_of_the_address_with_most():
    pending = PendingConnections(0)
    for number in range(ROOM):
        pending.add(newcomer("10.0.0.9" if number < 3 else f"10.0.1.{number}"))
    assert pending.crowded("10.0.0.1").address == "10.0.0.9"


def test_the_addresses_of_one_ipv6_network_have_one_share():
    pending = PendingConnections(0)
    for number in range(SHARE):
        assert pending.crowded(f"2001:db8:1:2::{number}") is None
        pending.add(newcomer(f"2001:db8:1:2::{number}"))
    assert pending.crowded("2001:db8:1:2:ffff::1") is not None
    assert pending.crowded("2001:db8:1:3::1") is None


# --- a host on the way -------------------------------------------------------------------------------------------


def frames(seal, *payloads):
    return [seal.head(payload) + payload for payload in payloads]


def receiver(key=b"k" * 32):
    """A connection's end that reads what a test feeds it."""
    connection = Connection.__new__(Connection)
    connection.limit, connection.unread = MESSAGE, bytearray()
    connection.session = type("Session", (), {"received": Seal(key)})
    return connection


def test_frames_are_accepted_once_and_in_order():
    first, second = frames(Seal(b"k" * 32), b'{"n":1}', b'{"n":2}')
    whole = receiver()
    whole.unread += first + second
    assert [whole.message(), whole.message(), whole.message()] == [{"n": 1}, {"n": 2}, None]
    for wrong in (second, first + first, first + second + first, first[:-1] + b"x"):
        one = receiver()
        one.unread += wrong
        with pytest.raises(InvalidMessageError, match="wrong MAC"):
            [one.message() for _ in range(4)]


def test_a_frame_of_the_other_direction_or_connection_is_refused():
    caller, host = Caller(TOKEN, "r", 1), Host(TOKEN)
    host.take(caller.take(host.take(caller.first())))
    again, other = Caller(TOKEN, "r", 1), Host(TOKEN)
    other.take(again.take(other.take(again.first())))
    payload = encode({"kind": "stop"})
    for key in (caller.session.received, again.session.sent):
        one = receiver()
        one.session = host.session
        one.unread += key.head(payload) + payload
        with pytest.raises(InvalidMessageError, match="wrong MAC"):
            one.message()


@given(st.data())
def test_changed_stream_of_frames_yields_a_prefix_of_the_sent_frames(data):
    sent = [{"n": number, "m": {"text": "x" * number}} for number in range(4)]
    stream = bytearray(b"".join(frames(Seal(b"k" * 32), *map(encode, sent))))
    at = data.draw(st.integers(0, len(stream) - 1))
    change = data.draw(st.sampled_from(["flip", "cut", "insert", "repeat"]))
    if change == "flip":
        stream[at] ^= data.draw(st.integers(1, 255))
    elif change == "cut":
        del stream[at : at + data.draw(st.integers(1, 40))]
    elif change == "insert":
        stream[at:at] = data.draw(st.binary(min_size=1, max_size=60))
    else:
        stream[at:at] = stream[:at]
    one = receiver()
    one.unread += stream
    got = []
    with contextlib.suppress(InvalidMessageError):
        while (message := one.message()) is not None:
            got.append(message)
    assert got == sent[: len(got)]


@given(st.binary(max_size=200))
def test_every_payload_is_a_message_or_an_error(payload):
    with contextlib.suppress(InvalidMessageError):
        assert isinstance(parse(payload), dict)


class Meddler:
    """Forwards one agent's connections to rank 0, and adds bytes after the messages of rank 0."""

    def __init__(self, port):
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.towards = []  # the agent's sockets
        self._away = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                here = self._listener.accept()[0]
                there = socket.create_connection(("127.0.0.1", self._port))
                self.towards.append(here)
                self._away.append(there)
                for source, target in ((here, there), (there, here)):
                    threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(10)
        for sock in (self._listener, *self.towards, *self._away):
            sock.close()


def test_stop_injected_by_a_host_on_the_way_is_ignored(run, capfd):
    agents = run(2)
    agents.start(0)
    between = Meddler(agents.port)
    agents.port, port = between.port, agents.port
    try:
        agents.start(1)
        agents.port = port
        assert works(agents)
        stop = encode({"n": 1, "m": {"kind": "stop", "save": False, "who": "a stranger"}})
        between.towards[0].sendall(Seal(b"guessed" * 4).head(stop) + stop)
        eventually(lambda: len(between.towards) > 1)  # the connection was given up, and made again
        agents.links[0].send("note", text="real")
        come = eventually(agents.links[1].take)
        assert [(message["kind"], message["node"]) for message in come] == [("note", "n0")]
    finally:
        between.close()
    assert "wrong MAC" in capfd.readouterr().err


def test_a_changed_byte_of_a_file_is_never_written(tmp_path):
    one, other = socket.socketpair()
    caller, host = Caller(TOKEN, "r", 1), Host(TOKEN)
    host.take(caller.take(host.take(caller.first())))
    reader = Stream(one, caller.session)
    piece = memoryview(bytearray(os.urandom(100_000)))
    head = host.session.sent.head(piece)
    piece[70_000] ^= 1
    with one, other:
        sender = threading.Thread(target=other.sendall, args=(head + bytes(piece),))
        sender.start()
        with pytest.raises(CopyError, match="wrong MAC"):
            reader.read(memoryview(bytearray(1 << 20)))
        sender.join(10)


# --- one connection fails, whatever the reason -------------------------------------------------------------------


def test_exception_in_one_connection_closes_only_that_connection(run, monkeypatch, capfd):
    agents = run(3)
    for rank in range(3):
        agents.start(rank)
    assert works(agents)
    real, failed = Peer.take, []

    def take(peer, line):
        if peer.rank == 1 and not failed:
            failed.append(peer.connection)
            raise ZeroDivisionError("a mistake")
        return real(peer, line)

    monkeypatch.setattr(Peer, "take", take)
    hub = agents.links[0].endpoint
    agents.links[1].send("news")
    eventually(lambda: failed and hub.peers[1].connection not in (None, failed[0]))
    assert works(agents)
    assert "ZeroDivisionError: a mistake" in capfd.readouterr().err


def test_agent_does_not_reconnect_after_its_goodbye(run):
    agents = run(2)
    for rank in range(2):
        agents.start(rank)
    assert works(agents)
    spoke = agents.links[1].endpoint
    done = threading.Event()
    spoke.loop.post(lambda: (spoke.say_goodbye(), spoke.tick(time.monotonic(), 0.0), done.set()))
    assert done.wait(10)
    assert spoke.attempt is None
    assert spoke.hub.connection is None


# --- a lying agent of the run ------------------------------------------------------------------------------------


CLAIMS = [
    {"rank": 7},
    {"rank": 0},
    {"rank": -1},
    {"rank": True},
    {"rank": []},
    {"rank": "1"},
    {"rank": 10**30},
    {"rank": None},
    {"instance": {}},
    {"instance": ""},
    {"instance": "x" * 5000},
    {"purpose": []},
    {"purpose": "copy"},
    {"purpose": "copy", "from": []},
    {"purpose": "copy", "from": -1},
    {"purpose": "give"},
    {"purpose": "give", "ticket": ["x"]},
    {"purpose": "give", "ticket": "x"},
]


def test_impossible_claim_is_refused(run):
    agents = run(2)
    agents.start(0)
    for hello in CLAIMS:
        stream = agents.liar(1, **hello)
        with stream.sock:
            stream.sock.shutdown(socket.SHUT_WR)
            assert ended(stream.sock), hello
    agents.start(1)
    assert works(agents)


def test_a_rank_that_is_connected_cannot_be_taken_over(run):
    agents = run(2)
    for rank in range(2):
        agents.start(rank)
    assert works(agents)
    stream = agents.liar(1)
    with stream.sock:
        assert "two nodes have the same rank" in stream.receive()["refused"]
    agents.links[0].send("note")
    assert eventually(agents.links[1].take)[0]["kind"] == "note"


LIES = [
    {"kind": "broken", "text": "not true"},
    {"kind": "lost", "silent": "x"},
    {"kind": "gone", "node": "n0", "rank": 0},
    {"kind": []},
    {"kind": None},
    {},
]
NONSENSE = [
    {"kind": "_offer"},
    {"kind": "_offer", "number": "x", "offer": {}},
    {"kind": "_offer", "number": [], "offer": {}},
    {"kind": "_offer", "number": 1, "offer": []},
    {"kind": "_answer", "number": 1},
    {"kind": "_give", "ticket": []},
    {"kind": "_give", "ticket": "x"},
    {"kind": "_unknown"},
    {"kind": "unknown", "rank": [], "node": {}},
]


def test_a_forged_message_reaches_no_node_and_disturbs_none(run):
    agents = run(3)
    for rank in (0, 2):
        agents.start(rank)
    hub = agents.links[0].endpoint
    for message in [*LIES, *NONSENSE]:
        stream = agents.liar(1)
        with stream.sock:
            number = stream.receive()["received"] + 1
            stream.send({"n": number, "m": message})
            if message in LIES:
                assert ended(stream.sock), message
            else:
                stream.send({"n": number + 1, "m": {"kind": "after"}})
                eventually(lambda number=number: hub.peers[1].received == number + 1)
    stream = agents.liar(1)  # it comes back, and offers what a meeting needs
    with stream.sock:
        number = stream.receive()["received"] + 1
        stream.send({"n": number, "m": {"kind": "_offer", "number": 1, "offer": {}}})
        assert agents.meet() == {0: {}, 2: {}}
    for rank in (0, 2):
        assert {reported["kind"] for reported in agents.links[rank].take()} == {"after", "unknown"}


FRAMES = [
    {"n": "1", "m": {"kind": "x"}},
    {"n": True, "m": {"kind": "x"}},
    {"n": -1, "m": {"kind": "x"}},
    {"n": 1e300, "m": {"kind": "x"}},
    {"n": 500, "m": {"kind": "x"}},
    {"n": 1, "m": "x"},
    {"ack": -5},
    {"ack": 1 << 60},
    {"ack": "1"},
    {"ack": []},
    {},
]


def test_impossible_numbers_disturb_no_node(run):
    agents = run(3)
    for rank in (0, 2):
        agents.start(rank)
    for frame in FRAMES:
        with agents.liar(1, received=1 << 61).sock as sock:
            sock.recv(1)
        stream = agents.liar(1)
        with stream.sock:
            number = stream.receive()["received"] + 1
            stream.send(frame)
            stream.send({"n": number, "m": {"kind": "_offer", "number": 1, "offer": {}}})
            assert agents.meet() == {0: {}, 2: {}}, frame


def test_flooding_agent_is_limited_and_the_others_work(run, capfd, monkeypatch):
    monkeypatch.setattr("trainer.agent.link.hub.BURST", 1 << 20)
    monkeypatch.setattr("trainer.agent.link.hub.RATE", 1)
    agents = run(3)
    for rank in (0, 2):
        agents.start(rank)
    stream = agents.liar(1)
    text = "x" * (100 << 10)
    with stream.sock:
        for number in range(1, 31):
            stream.send({"n": number, "m": {"kind": "stacks", "text": text}})
        eventually(lambda: agents.links[0].endpoint.peers[1].received == 30)
        assert 0 < len(agents.links[0].take()) <= 10
    agents.links[2].send("note")
    assert eventually(agents.links[0].take)[0]["kind"] == "note"
    assert "n1 sends too much" in capfd.readouterr().err


def test_an_allowance_fills_again():
    allowance = Allowance()
    assert sum(allowance.take(10, 100.0) for _ in range(10_000)) == BURST // LEAST
    assert not allowance.take(LEAST, 100.0)
    assert allowance.take(RATE, 101.0)
    assert not allowance.take(LEAST, 101.0)


def test_a_message_of_too_many_values_is_not_parsed(run):
    agents = run(2)
    agents.start(0)
    stream = agents.liar(1)
    payload = memoryview(b'{"n":1,"m":{"kind":"x","l":[' + b"{}," * (1 << 20) + b"{}]}}")
    with stream.sock:
        stream.write(payload)
        assert ended(stream.sock)
    agents.start(1)
    assert works(agents)


def test_a_rank_has_a_limited_number_of_connections_for_files(run, monkeypatch):
    monkeypatch.setattr(copies, "AT_ONCE", 2)
    agents = run(2)
    agents.start(0)
    open_ones = [agents.liar(1, purpose="copy", **{"from": 0}) for _ in range(2)]
    for stream in open_ones:
        assert stream.receive() == {"welcome": True}
    third = agents.liar(1, purpose="copy", **{"from": 0})
    with third.sock:
        assert ended(third.sock)
    for stream in open_ones:
        stream.sock.close()
    eventually(lambda: agents.links[0].copies.served == {1: 0})


OUTSIDE = ["../secret", "/etc/passwd", "a/../../secret", "\ud800", "a\0b", "x" * 5000, [], {}, 1]


def test_files_outside_the_shared_folder_are_not_sent(run, tmp_path):
    agents = run(2)
    agents.start(0)
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "n0/fine").write_bytes(b"123456")
    stream = agents.liar(1, purpose="copy", **{"from": 0})
    with stream.sock:
        assert stream.receive() == {"welcome": True}
        for name in OUTSIDE:
            stream.send({"get": name, "size": 6})
            assert set(stream.receive()) == {"error"}, name
        stream.send({"get": "fine", "size": 6})
        assert stream.receive()["size"] == 6


def test_invalid_decision_of_rank_0_ends_the_meeting_with_a_reason(run, monkeypatch):
    agents = run(2)
    agents.start(0)
    agents.start(1)
    meeting = agents.links[1].meeting
    answer = {"number": 1, "decision": "none"}
    monkeypatch.setattr(agents.links[1].endpoint, "send", lambda _: meeting.take("_answer", answer))
    with pytest.raises(LinkError, match=r"n0 \(rank 0\) sent an invalid decision"):
        meeting.meet({}, lambda _: {}, time.monotonic() + 5, lambda: True)


def test_too_long_frame_is_refused_by_its_header():
    one = receiver()
    one.limit = 4096
    one.unread += b"\x7f\xff\xff\xff" + bytes(HEAD)
    with pytest.raises(InvalidMessageError, match="sent a frame of 2147483647 bytes"):
        one.message()
