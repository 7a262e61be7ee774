"""Checkpoint files from node to node: complete or not at all, below the shared folder only, while the link works."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import plan_of

from trainer.agent.link import CopyError, HolderLostError, copies, protocol
from trainer.agent.link.copies import TEMPORARY, Wanted, parts_of, pump, receive, serve
from trainer.agent.link.direct import Direct
from trainer.agent.link.link import Link
from trainer.agent.link.protocol import Caller, Host, Stream


@pytest.fixture
def agents(tmp_path):
    """``agents(n)``: that many links after their meeting, each with its own folder."""
    made = []

    def make(count, **changes):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        names = [f"n{rank}" for rank in range(count)]
        for rank in range(count):
            shared = {"host": "127.0.0.1", "port": port, "token": "t" * 64, "nodes": names} | changes.get(str(rank), {})
            link = Link(plan_of(node=names[rank], node_rank=rank, link=shared), lambda: None)
            link.start()
            folder = tmp_path / names[rank]
            folder.mkdir()
            link.share(str(folder))
            made.append(link)
        meeting = [threading.Thread(target=link.meet, args=({}, lambda _: {}, 20)) for link in made]
        for thread in meeting:
            thread.start()
        for thread in meeting:
            thread.join(30)
        return made

    yield make
    closing = [threading.Thread(target=link.close) for link in made]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(20)


def put(folder, name, data):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, ns=(1, 1700000000123456789))


def nothing_left(folder):
    assert not [path for path in folder.rglob("*") if path.name.startswith(TEMPORARY)]


@pytest.mark.parametrize(("giver", "taker"), [(0, 1), (1, 0), (2, 1), (1, 2)])
def test_every_node_copies_from_every_node(agents, tmp_path, giver, taker):
    links = agents(3)
    files = {"checkpoint-2/a.bin": os.urandom(5 << 20), "checkpoint-2/global_step2/b c.pt": b"x", "checkpoint-2/c": b""}
    for name, data in files.items():
        put(tmp_path / f"n{giver}", name, data)
    put(tmp_path / f"n{taker}", "checkpoint-2/a.bin", b"torn")
    reported = []
    links[taker].fetch([[name, len(data), giver] for name, data in files.items()], on_bytes=reported.append)
    for name, data in files.items():
        path = tmp_path / f"n{taker}" / name
        assert path.read_bytes() == data
        assert path.stat().st_mtime_ns == 1700000000123456789
    assert sum(reported) == (5 << 20) + 1
    assert links[taker].copies.open_sockets == set()  # an agent runs for weeks
    nothing_left(tmp_path / f"n{taker}")


def test_all_nodes_fetch_at_once_from_several(agents, tmp_path):
    links = agents(5)
    data = {rank: os.urandom(2 << 20) for rank in range(5)}
    for rank in range(5):
        put(tmp_path / f"n{rank}", f"c/{rank}", data[rank])
    errors = []

    def fetch(rank):
        try:
            links[rank].fetch([(f"c/{other}", 2 << 20, other) for other in range(5) if other != rank])
        except CopyError as error:
            errors.append(error)

    threads = [threading.Thread(target=fetch, args=(rank,)) for rank in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    for rank in range(5):
        assert {other: (tmp_path / f"n{rank}/c/{other}").read_bytes() for other in range(5)} == data


def test_messages_are_delivered_while_files_are_copied(agents, tmp_path):
    links = agents(2)
    put(tmp_path / "n0", "big", bytes(64 << 20))
    begun, go_on = threading.Event(), threading.Event()

    def reported(_):
        begun.set()
        assert go_on.wait(30)

    thread = threading.Thread(target=links[1].fetch, args=([("big", 64 << 20, 0)],), kwargs={"on_bytes": reported})
    thread.start()
    assert begun.wait(10)
    links[0].send("failed", text="x")
    limit = time.monotonic() + 0.5
    come = []
    while not come and time.monotonic() < limit:
        come = links[1].take()
        time.sleep(0.01)
    go_on.set()
    thread.join(60)
    assert [message["kind"] for message in come] == ["failed"]
    assert (tmp_path / "n1/big").stat().st_size == 64 << 20


def test_a_large_background_copy_continues_where_it_broke_off(agents, tmp_path, monkeypatch):
    links = agents(2)
    monkeypatch.setattr(copies, "FLUSH", 4 << 20)
    data = os.urandom(20 << 20)
    put(tmp_path / "n0", "big", data)
    wanted = ("copy/big", len(data), 0, "big", "", 1700000000123456789, 1 << 30)
    first, second, done = [], [], []
    with pytest.raises(CopyError, match="cancelled"):
        links[1].fetch([wanted], alive=lambda: sum(first) < 15 << 20, on_bytes=first.append)
    links[1].fetch([wanted], on_bytes=second.append, done=lambda _, digest: done.append(digest))
    assert (tmp_path / "n1/copy/big").read_bytes() == data
    assert done == [hashlib.sha256(data).hexdigest()]
    assert len(data) <= sum(first) + sum(second) <= len(data) + (5 << 20)  # what was not flushed comes again
    nothing_left(tmp_path / "n1")


def test_direct_copy_falls_back_to_rank_0(agents, tmp_path):
    links = agents(3)
    put(tmp_path / "n2", "a", b"data")
    direct = Direct(links[2].copies, 3)
    address = direct.start()
    links[1].copies.addresses = {2: address}
    with links[1].copies.open_channel(2).sock as sock:
        assert sock.getpeername() == address
    links[1].fetch([("b", 4, 2, "a")])
    assert (tmp_path / "n1/b").read_bytes() == b"data"
    direct.close()
    links[1].fetch([("c", 4, 2, "a")])
    assert (tmp_path / "n1/c").read_bytes() == b"data"
    assert links[1].copies.addresses == {}


@pytest.mark.parametrize("token", ["x" * 64, None])
def test_direct_port_serves_only_agents_of_the_run(agents, tmp_path, token):
    links = agents(2)
    put(tmp_path / "n1", "a", b"data")
    direct = Direct(links[1].copies, 2)
    with socket.create_connection(direct.start(), timeout=10) as sock:
        if token is None:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        else:
            caller = Caller(token, links[1].copies.run, 0)
            sock.sendall(caller.first())
            with pytest.raises(protocol.UnknownPeerError):
                caller.take(protocol.read_line(sock))
            sock.sendall(b"0" * 64 + b"\n")
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) == b""
    direct.close()


# --- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/.", "a/", "a\0b", None, 3])
def test_names_that_lead_out_of_the_folder(name):
    with pytest.raises(CopyError, match="is not the name of a file below the folder"):
        parts_of(name)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "link", "folder/secret", "dir", "pipe", "none"])
def test_only_files_below_the_folder_are_sent(agents, tmp_path, name):
    links = agents(2)
    put(tmp_path, "secret", b"secret")
    (tmp_path / "n0/link").symlink_to(tmp_path / "secret")
    (tmp_path / "n0/folder").symlink_to(tmp_path)
    (tmp_path / "n0/dir").mkdir()
    os.mkfifo(tmp_path / "n0/pipe")
    stream = links[1].copies.open_channel(0)
    with stream.sock:
        stream.send({"get": name, "size": 6})
        assert set(stream.receive()) == {"error"}
        put(tmp_path / "n0", "fine", b"123456")  # the connection is still good
        stream.send({"get": "fine", "size": 6})
        assert stream.receive()["size"] == 6


def test_nothing_is_written_through_a_symlink(agents, tmp_path):
    links = agents(2)
    put(tmp_path / "n0", "folder/a", b"new")
    put(tmp_path / "n0", "b", b"new")
    (tmp_path / "elsewhere").mkdir()
    put(tmp_path, "elsewhere/a", b"old")
    (tmp_path / "n1/folder").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "n1/b").symlink_to(tmp_path / "elsewhere/a")
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        links[1].fetch([("folder/a", 3, 0)])
    links[1].fetch([("b", 3, 0)])  # the link itself is replaced
    assert (tmp_path / "elsewhere/a").read_bytes() == b"old"
    assert not (tmp_path / "n1/b").is_symlink()


# --- what goes wrong ---------------------------------------------------------------------------------------------


def test_file_of_another_size_is_refused(agents, tmp_path):
    links = agents(2)
    put(tmp_path / "n0", "a", b"1234")
    put(tmp_path / "n1", "a", b"old")
    with pytest.raises(CopyError, match=r"from rank 0: a: it is not a file of 5 bytes \(it has 4\)"):
        links[1].fetch([("a", 5, 0)])
    assert (tmp_path / "n1/a").read_bytes() == b"old"


def test_node_that_shares_nothing_or_is_missing(agents, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.agent.link.copies.COMES", 0.5)
    links = agents(3)
    links[2].copies.folder = None
    with pytest.raises(CopyError, match="from rank 2: a: no folder is shared there"):
        links[0].fetch([("a", 5, 2)])
    with pytest.raises(CopyError, match="rank 9 did not connect"):
        links[0].fetch([("a", 5, 9)])


def test_agent_of_another_run_gets_nothing(agents):
    links = agents(2)
    links[1].copies.token = "x" * 64
    with pytest.raises(CopyError, match="no connection to rank 0: does not know this run's token"):
        links[1].fetch([("a", 1, 0)])


@pytest.mark.parametrize(("taker", "lost"), [(0, 2), (1, 2), (1, 0)])
def test_a_copy_ends_when_its_node_or_the_hub_between_is_lost(agents, tmp_path, monkeypatch, taker, lost):
    links = agents(3)
    put(tmp_path / "n2", "a", b"data")
    monkeypatch.setattr(links[2].copies, "give", lambda _: None)  # it answers no request
    asked = []

    def is_lost(position):
        asked.append(position)
        return position == lost and len(asked) > 9

    began = time.monotonic()
    with pytest.raises(HolderLostError) as raised:
        links[taker].fetch([("a", 4, 2)], lost=is_lost)
    assert raised.value.holder == lost
    assert time.monotonic() - began < copies.COMES / 2
    nothing_left(tmp_path / f"n{taker}")


def test_copy_can_be_cancelled(agents, tmp_path):
    links = agents(2)
    put(tmp_path / "n0", "a", bytes(8 << 20))
    pieces = []
    with pytest.raises(CopyError, match="cancelled"):
        links[1].fetch([("a", 8 << 20, 0)], alive=lambda: len(pieces) < 2, on_bytes=pieces.append)
    assert not (tmp_path / "n1/a").exists()
    nothing_left(tmp_path / "n1")


def test_close_aborts_running_copies(agents, tmp_path):
    links = agents(2)
    put(tmp_path / "n0", "a", bytes(64 << 20))
    begun = threading.Event()
    raised = []

    def reported(_):
        begun.set()
        time.sleep(0.05)

    def fetch():
        try:
            links[1].fetch([("a", 64 << 20, 0)], on_bytes=reported)
        except CopyError as error:
            raised.append(str(error))

    thread = threading.Thread(target=fetch)
    thread.start()
    assert begun.wait(10)
    links[1].close()
    thread.join(10)
    assert not thread.is_alive()
    assert len(raised) == 1
    nothing_left(tmp_path / "n1")


def sessions():
    """Both ends' keys of a connection, as a greeting leaves them."""
    caller, host = Caller("t" * 64, "r", 1), Host("t" * 64)
    host.take(caller.take(host.take(caller.first())))
    return caller.session, host.session


def streams():
    """Two streams that are joined."""
    pair = socket.socketpair()
    return [Stream(sock, session) for sock, session in zip(pair, sessions(), strict=True)]


def exchange(tmp_path, *answers, size=4):
    """The result of ``receive`` with a sender of these messages."""
    one, other = streams()
    with one.sock, other.sock:
        for answer in answers:
            if isinstance(answer, bytes):
                other.write(memoryview(answer))
            else:
                other.send(answer)
        other.sock.shutdown(socket.SHUT_WR)
        receive(one, str(tmp_path), Wanted("c/a", size, 0), "0", lambda _: None)


END = {"end": True}


def test_invalid_answers_are_errors_and_change_no_file(tmp_path):
    put(tmp_path, "c/a", b"old")
    for answers, printed in (
        ([], "the other side closed the connection"),
        ([{"error": "no"}], "c/a: no"),
        ([{"size": 5}], "it is not 4 bytes there"),
        ([b"x" * (70 << 10)], "the other side sent a frame of 71680 bytes, more than the 65536 allowed"),
        ([b"[]"], "the other side sent a message that is not a JSON object"),
        ([b"[" * 5000], "the other side sent a message that is"),
        ([{"size": 4, "mtime": "now"}], "sent no modification time"),
        ([{"size": 4, "mtime": 1 << 70}], "sent no modification time"),
        ([{"size": 4}, b"12"], "closed the connection with 2 bytes missing"),
        ([{"size": 4}, b"12345"], "the other side sent a frame of 5 bytes, more than the 4 allowed"),
        ([{"size": 4}, b"1234"], "did not confirm the end of the file"),
        ([{"size": 4}, b"1234", b"5"], "the other side sent a message that is not a JSON object"),
    ):
        with pytest.raises(CopyError, match=printed):
            exchange(tmp_path, *answers)
        assert (tmp_path / "c/a").read_bytes() == b"old"
        nothing_left(tmp_path)
    exchange(tmp_path, {"size": 4}, b"12", b"34", END)
    assert (tmp_path / "c/a").read_bytes() == b"1234"


def test_file_truncated_during_the_copy_is_an_error(tmp_path):
    put(tmp_path, "a", b"12345678")
    one, other = streams()
    with one.sock, other.sock, (tmp_path / "a").open("rb", buffering=0) as file:

        class Shrinks:
            name, fileno = "a", file.fileno

            def readinto(self, view):
                os.truncate(tmp_path / "a", 0)
                return file.readinto(view)

        with pytest.raises(CopyError, match="became shorter"):
            copies.send_file(one, Shrinks())


def test_silence_aborts_a_copy(monkeypatch):
    monkeypatch.setattr(copies, "SILENCE", 0.2)
    monkeypatch.setattr(protocol, "SILENCE", 0.2)
    monkeypatch.setattr(protocol, "CANCEL_CHECK", 0.05)
    one, other = streams()
    three, four = streams()
    with one.sock, other.sock, three.sock, four.sock:
        with pytest.raises(CopyError, match="no data moved for"):
            one.receive()
        with pytest.raises(CopyError, match="no data moved for"):
            one.write(memoryview(bytes(32 << 20)))
        with pytest.raises(CopyError, match="no data arrived for"):
            pump(three, four)


def test_broken_connection_is_opened_again(agents, tmp_path):
    links = agents(2)
    for number in range(4):
        put(tmp_path / "n0", f"c/{number}", bytes(3 << 20))
    cut = []

    def reported(_):
        if len(cut) < 2 and len(list((tmp_path / "n1/c").iterdir())) == 2 + len(cut):
            cut.append(1)
            for sock in list(links[0].copies.open_sockets):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    links[1].fetch([(f"c/{number}", 3 << 20, 0) for number in range(4)], on_bytes=reported)
    assert len(cut) == 2
    assert {path.name: path.stat().st_size for path in (tmp_path / "n1/c").iterdir()} == dict.fromkeys("0123", 3 << 20)


def test_serve_ends_with_the_connection(tmp_path):
    one, other = streams()
    with one.sock:
        other.sock.close()
        serve(one, str(tmp_path))
