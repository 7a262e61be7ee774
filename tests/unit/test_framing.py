"""A node's answer between its markers: whatever comes, in whatever pieces, it is read, cut or refused within limits."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.model import LOCAL, Node
from provision.ssh import wire
from provision.ssh.local import LocalRemote
from provision.ssh.wire import Framed, NodeUnreachable, OutputTooLong, converse

TOKEN = "0123456789abcdef"
BEGIN = f"@clusterctl:{TOKEN}:begin:77:\n".encode()
END = f"@clusterctl:{TOKEN}:end:3:\n".encode()


def fed(framed, data, size=1 << 17):
    for start in range(0, len(data), size):
        framed.feed(data[start : start + size])
    return framed


@pytest.fixture
def small(monkeypatch):
    """Limits that are reached with a few bytes."""
    monkeypatch.setattr(wire, "JUNK_LIMIT", 1000)
    monkeypatch.setattr(wire, "LINE_LIMIT", 1000)
    monkeypatch.setattr(wire, "TOTAL_LIMIT", 5000)


def test_text_before_the_begin_marker_has_a_limit(small):
    with pytest.raises(OutputTooLong, match="before the script started"):
        fed(Framed(TOKEN), b"x" * 2000, 100)
    with pytest.raises(OutputTooLong, match="before the script started"):  # in one piece, with its marker
        Framed(TOKEN).feed(b"x" * 2000 + BEGIN)
    assert fed(Framed(TOKEN), b"x" * 900 + BEGIN + b"out" + END, 7).text() == "out"


def test_kept_output_has_a_limit(small):
    framed = fed(Framed(TOKEN), BEGIN + b"y" * 4999)
    with pytest.raises(OutputTooLong, match="its output is larger than"):
        fed(framed, b"y" * 200, 10)
    assert len(fed(Framed(TOKEN), BEGIN + b"y" * 5000 + END, 11).text()) == 5000


def test_emitted_line_has_a_limit_and_its_pieces_are_marked(small):
    lines = []
    framed = Framed(TOKEN, lines.append)
    fed(framed, BEGIN + b"z" * 2500, 10)
    assert len(framed.text()) < 1000 + 200  # received bytes are not kept
    fed(framed, b"\nshort\nrest" + END, 10)
    assert lines == ["z" * 1000 + wire.CUT, "z" * 1000 + wire.CUT, "z" * 500, "short", "rest"]
    assert framed.rc == 3


def test_emitted_lines_have_no_common_limit(small):
    lines = []
    fed(Framed(TOKEN, lines.append), BEGIN + b"line\n" * 5000 + END)
    assert len(lines) == 5000


def test_truncation_keeps_characters_intact(small):
    lines = []
    fed(
        Framed(TOKEN, lines.append),
        BEGIN + "é".encode() * 501 + b"x\n" + b"x" + "é".encode() * 501 + b"\n" + END,
        1 << 17,
    )
    assert "".join(line.removesuffix(wire.CUT) for line in lines) == "é" * 501 + "xx" + "é" * 501


def test_stderr_beside_lines_keeps_its_end_and_is_marked():
    framed = fed(Framed(TOKEN, keep=1000), BEGIN + b"a" * 50_000 + b"why it failed" + END, 100)
    assert framed.rc == 3
    assert framed.text().startswith("(the first ")
    assert framed.text().endswith("why it failed")
    assert len(framed.text()) < 4000


@pytest.mark.parametrize("marker", [b"begin", b"end"])
def test_a_marker_with_five_thousand_digits_is_no_marker(marker):
    framed = Framed(TOKEN)
    fed(
        framed,
        (BEGIN if marker == b"end" else b"") + b"@clusterctl:%s:%s:%s:\n" % (TOKEN.encode(), marker, b"9" * 5000),
    )
    assert (framed.begun, framed.ended) == (marker == b"end", False)


PARTS = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([BEGIN, END, BEGIN[:-1], END[:-1], BEGIN[:12], END[5:], b"\n", b"\r\n", b"a" * 90, "é€".encode()]),
    st.integers(0, 10**30).map(lambda number: f"@clusterctl:{TOKEN}:end:{number}:\n".encode()),
    st.integers(0, 10**30).map(lambda number: f"@clusterctl:{TOKEN}:begin:{number}:\n".encode()),
)


@given(parts=st.lists(PARTS, max_size=12), sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_chunking_of_an_answer_changes_nothing(parts, sizes):
    data = b"".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "JUNK_LIMIT", 200)
        patch.setattr(wire, "LINE_LIMIT", 64)
        patch.setattr(wire, "TOTAL_LIMIT", 300)
        for streamed in (False, True):
            whole_lines, lines = [], []
            whole = outcome(Framed(TOKEN, whole_lines.append if streamed else None), [data])
            pieces, at = [], 0
            while at < len(data):
                pieces.append(data[at : at + sizes[len(pieces) % len(sizes)]])
                at += len(pieces[-1])
            assert outcome(Framed(TOKEN, lines.append if streamed else None), pieces) == whole
            joined = ["".join(each.removesuffix(wire.CUT) for each in found) for found in (lines, whole_lines)]
            if whole != "too long":
                assert joined[0] == joined[1]
            assert all(len(line) <= 64 + len(wire.CUT) + 80 for line in lines)


def outcome(framed, pieces):
    """The group and the exit code; or that it is refused."""
    try:
        for piece in pieces:
            framed.feed(piece)
    except OutputTooLong:
        return "too long"
    return framed.group, framed.rc


class Answer:
    """A ``Stream`` with prepared outputs of a hostile node."""

    group = None

    def __init__(self, out, err):
        self.out, self.err = out, err
        self.token = None
        self.asked = threading.Event()
        self.aborted = False
        self._read = {"out": 0, "err": 0}

    def _next(self, name, blocks):
        self.asked.wait(10)
        if self.aborted:
            return b""
        place = self._read[name]
        self._read[name] += 1
        return blocks(self.token, place)

    def read_out(self):
        return self._next("out", self.out)

    def read_err(self):
        return self._next("err", self.err)

    def write(self, data):
        if self.token is None and data:
            self.token = data.split(b"\n")[0].split()[1]
            self.asked.set()

    def finish(self):
        pass

    def abort(self):
        self.aborted = True
        self.asked.set()

    def close(self):
        pass


def endless(begun):
    def blocks(token, place):
        if place == 0 and begun:
            return b"@clusterctl:%s:begin:7:\n" % token
        return b"x" * 65536

    return blocks


def begun_then_ended(token, place):
    return [b"@clusterctl:%s:begin:7:\n" % token, b"@clusterctl:%s:end:0:\n" % token, b""][min(place, 2)]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("output", ["out", "err"])
def test_endless_output_is_aborted(small, begun, output):
    blocks = {"out": begun_then_ended, "err": begun_then_ended} | {output: endless(begun)}
    stream = Answer(blocks["out"], blocks["err"])
    with pytest.raises(OutputTooLong, match=r"error output|its output|before the script started"):
        converse(stream, "true")
    assert stream.aborted


def test_stderr_read_before_stdout_does_not_hide_the_process_group(small):
    """A busy machine may run the thread of stderr first: without the group, nothing on the node would be stopped."""
    endless_stderr = endless(begun=True)
    exceeded = threading.Event()

    def err(token, place):
        if place == 1:
            exceeded.set()  # this piece is too much
        return endless_stderr(token, place)

    def out(token, place):
        assert exceeded.wait(60)
        time.sleep(0.2)  # it is read late: only so much decides whether the mistake shows, not whether the test passes
        return begun_then_ended(token, place) if place == 0 else stream.wait_aborted()

    class Stopped(Answer):
        over = threading.Event()

        def wait_aborted(self):
            assert self.over.wait(60)
            return b""

        def abort(self):
            super().abort()
            self.stopped = self.group
            self.over.set()

    stream = Stopped(out, err)
    with pytest.raises(OutputTooLong, match="error output"):
        converse(stream, "true")
    assert stream.stopped == 7


def test_a_script_is_stopped_even_if_its_first_bytes_are_too_many(small):
    """The begin marker and the excess may arrive in one piece."""

    class Stopped(Answer):
        def abort(self):
            super().abort()
            self.stopped = self.group

    stream = Stopped(lambda token, _: b"@clusterctl:%s:begin:7:\n" % token + b"x" * 65536, begun_then_ended)
    with pytest.raises(OutputTooLong, match="its output"):
        converse(stream, "true")
    assert stream.stopped == 7


def test_the_reason_of_a_node_names_the_limit(small):
    remote = LocalRemote(Node("here", LOCAL))
    with pytest.raises(NodeUnreachable, match="here: its output is larger than") as caught:
        remote.run("head -c 20000 /dev/zero; sleep 60")
    assert "file on the node" in caught.value.hint
    with pytest.raises(NodeUnreachable, match="here: its error output is larger than"):
        remote.run("head -c 20000 /dev/zero >&2; sleep 60")
    lines = []
    assert (
        remote.run(
            "head -c 20000 /dev/zero | tr '\\0' x; head -c 300000 /dev/zero >&2; exit 4", on_line=lines.append
        ).rc
        == 4
    )
    assert sum(len(line.removesuffix(wire.CUT)) for line in lines) == 20000
    remote.close()
