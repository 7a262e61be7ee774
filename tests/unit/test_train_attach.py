"""A run is followed over connections that break, by people who press Ctrl-C."""

import itertools
import json
import threading
import time
from pathlib import PurePosixPath

import pytest

from provision.errors import InterruptedByUser, NodesFailedError
from provision.model import Node, Notice, Result
from provision.run.follow import Follower
from provision.session import streams
from provision.session.streams import Stream, Streams
from provision.ssh.remote import HostKeyChanged, NodeUnreachable
from provision.tasks import start as attach
from provision.tasks.start import Attachment, HungUp
from trainer.agent.contract.plan import Plan

A, B = Node("a", "10.0.0.1"), Node("b", "10.0.0.2")
END = {"event": "end", "state": "finished"}
STOPPED = {"event": "end", "state": "stopped"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(streams, "BACKOFF", (0.01,))
    monkeypatch.setattr(attach, "LOOK", 0.02)


class Remote:
    """A node whose ``follow`` goes through one item of ``acts`` for each connection.

    An act is a list: events are printed, an Event is waited for, an exception breaks the connection.
    """

    def __init__(self, node, *acts):
        self.node, self.acts, self.scripts = node, iter(acts), []

    def run(self, script, *, on_line=None, deadline=None):
        if on_line is None:
            return Result(0, "")
        self.scripts.append(script)
        for item in next(self.acts):
            if isinstance(item, threading.Event):
                assert item.wait(10)
            elif isinstance(item, BaseException):
                raise item
            elif isinstance(item, dict):
                on_line(json.dumps(item))
            else:
                return item
        return Result(0, "")

    def close(self):
        pass


class Way(dict):
    def __getitem__(self, node):
        return super().__getitem__(node.name)


def way(*remotes):
    return Way({remote.node.name: remote for remote in remotes})


@pytest.fixture
def seen():
    return []


@pytest.fixture
def follow(tmp_path, seen):
    def follow(*remotes, stop=lambda: None, ask=None, until=None, offsets=()):
        nodes = [remote.node for remote in remotes]
        follow.follower = Follower("r1", [node.name for node in nodes], tmp_path, emit=seen.append)
        attachment = Attachment(nodes, follow.follower, PurePosixPath("/x/runs/r1"), dict(offsets))
        return attachment.follow(way(*remotes), seen.append, until=until, stop=stop, ask=ask)

    yield follow
    follow.follower.close()


def test_broken_connection_is_opened_again_after_the_last_event(follow, tmp_path):
    lost = NodeUnreachable(A, "gone")
    one = {"event": "log", "rank": 0, "line": "one", "at": 120}
    two = {"event": "log", "rank": 0, "line": "two", "at": 150}
    remote = Remote(A, [one, lost], [lost], [two, END])
    assert follow(remote, offsets={"a": 80}) == "ended"
    assert [script.split("--from ")[1].split()[0] for script in remote.scripts] == ["80", "120", "120"]
    assert (tmp_path / "a/rank0.log").read_text() == "one\ntwo\n"


def test_lost_connection_and_its_return_are_reported_once(follow, seen, monkeypatch):
    monkeypatch.setattr(streams, "AWAY", 0.05)
    monkeypatch.setattr(streams, "SETTLED", 0.1)
    until = time.monotonic() + 0.5
    held = threading.Event()

    class Down(Remote):
        def run(self, script, **options):
            if time.monotonic() < until:
                raise NodeUnreachable(A, "no answer")
            threading.Timer(0.4, held.set).start()
            return super().run(script, **options)

    assert follow(Down(A, [held, END])) == "ended"
    assert [event.text.split(" for ")[0] for event in seen if isinstance(event, Notice)] == [
        "no connection to a",
        "the connection to a is back",
    ]


def test_node_without_a_connection_is_given_up_after_all_others_finish(follow, monkeypatch):
    monkeypatch.setattr(attach, "LAST_WORD", 0.1)
    down = Remote(B, *itertools.repeat([NodeUnreachable(B, "no answer")], 1000))
    assert (
        follow(Remote(A, [{"event": "end", "state": "failed", "why": {"node": "b", "text": "lost"}}]), down) == "ended"
    )
    assert follow.follower.failures["b"].startswith("lost")
    assert follow.follower.states == {"a": "failed", "b": "lost"}


def test_exception_in_a_reading_thread_ends_the_command(follow):
    with pytest.raises(ZeroDivisionError):
        follow(Remote(A, [{"event": "log", "rank": 0, "line": "one", "at": 120}, ZeroDivisionError("a mistake")]))


def test_when_no_node_answers_any_more_the_command_gives_up(follow, monkeypatch):
    monkeypatch.setattr(attach, "FORSAKEN", 0.1)
    down = [Remote(node, *itertools.repeat([NodeUnreachable(node, "no answer")], 1000)) for node in (A, B)]
    with pytest.raises(NodesFailedError, match="whether it is still running is not known"):
        follow(*down)


def test_node_with_another_host_key_is_refused(follow):
    assert follow(Remote(A, [HostKeyChanged(A, "its host key has changed")])) == "ended"
    assert follow.follower.failures == {"a": "its host key has changed"}


def test_given_up_node_does_not_affect_the_others(follow, monkeypatch):
    monkeypatch.setattr(attach, "LAST_WORD", 0.05)
    until = time.monotonic() + 0.3

    class Down(Remote):
        def run(self, script, **options):
            if time.monotonic() < until:
                raise NodeUnreachable(B, "no answer")
            return super().run(script, **options)

    assert follow(Remote(A, [HostKeyChanged(A, "its host key has changed")]), Down(B, [END])) == "ended"
    assert follow.follower.unheard == {"a": "its host key has changed"}
    assert follow.follower.states == {"a": "lost", "b": "finished"}


def test_an_agent_that_cannot_be_asked_fails_after_some_tries(follow):
    remote = Remote(A, *itertools.repeat([Result(4, "", "there is no run at /x")], 10))
    assert follow(remote) == "ended"
    assert follow.follower.failures == {"a": "there is no run at /x"}
    assert len(remote.scripts) == streams.TRIES


def test_detach_returns_as_soon_as_the_run_has_started(follow):
    never = threading.Event()
    try:
        remotes = [Remote(node, [{"event": "started"}, never]) for node in (A, B)]
        assert follow(*remotes, until=lambda: follow.follower.started) == "detached"
    finally:
        never.set()


class Interrupts:
    """``Follower.turned`` whose first waits are interrupted by Ctrl-C or a signal."""

    def __init__(self, event, *errors):
        self._event, self._errors = event, list(errors)

    def wait(self, seconds):
        if self._errors and self._errors[0] is not None:
            raise self._errors.pop(0)
        if self._errors:
            self._errors.pop(0)
        return self._event.wait(seconds)

    def __getattr__(self, name):
        return getattr(self._event, name)


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C and the like, as ``Follower.turned`` of every follower made from here on."""

    def interrupted(*errors):
        made = Follower.__init__

        def init(self, *args, **options):
            made(self, *args, **options)
            self.turned = Interrupts(self.turned, *errors)

        monkeypatch.setattr(Follower, "__init__", init)

    return interrupted


def test_ctrl_c_stops_the_run_without_a_terminal(follow, interrupted):
    interrupted(KeyboardInterrupt())
    reported = threading.Event()
    assert follow(Remote(A, [reported, STOPPED]), stop=reported.set) == "ended"
    assert follow.follower.state == "stopped"


def test_two_interrupts_at_once_count_as_one_and_a_later_one_exits(follow, interrupted, monkeypatch):
    interrupted(KeyboardInterrupt(), KeyboardInterrupt())
    reported = threading.Event()
    assert follow(Remote(A, [reported, STOPPED]), stop=reported.set) == "ended"
    monkeypatch.setattr(attach, "SAME", -1.0)
    never = threading.Event()
    try:
        with pytest.raises(InterruptedByUser, match="while run r1 was being stopped"):
            follow(Remote(A, [never]))
    finally:
        never.set()


def test_user_may_continue_and_later_detach(follow, interrupted):
    interrupted(KeyboardInterrupt(), None, KeyboardInterrupt())
    never, answers = threading.Event(), ["continue", "detach"]
    try:
        stop = pytest.fail
        assert follow(Remote(A, [never]), stop=stop, ask=lambda: answers.pop(0)) == "detached"
        assert answers == []
    finally:
        never.set()


def test_sigterm_detaches_and_stops_nothing(follow, interrupted):
    interrupted(HungUp())
    never = threading.Event()
    try:
        assert follow(Remote(A, [never]), stop=pytest.fail) == "detached"
    finally:
        never.set()


class AfterTheEnd(Interrupts):
    """``Follower.turned`` whose wait is interrupted once no node will send more events."""

    def __init__(self, follower, error):
        super().__init__(follower.turned)
        self._follower, self._error = follower, error

    def wait(self, seconds):
        while not self._follower.over:
            self._event.wait(seconds)
        raise self._error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), HungUp()], ids=["SIGINT", "SIGTERM"])
def test_a_signal_after_the_last_event_changes_nothing(follow, monkeypatch, error):
    original = Follower.__init__

    def init(self, *args, **options):
        original(self, *args, **options)
        self.turned = AfterTheEnd(self, error)

    monkeypatch.setattr(Follower, "__init__", init)
    assert follow(Remote(A, [{"event": "end", "state": "finished"}]), stop=pytest.fail) == "ended"
    assert follow.follower.state == "finished"


def test_a_quiet_connection_that_gives_no_answer_is_broken(monkeypatch, seen):
    monkeypatch.setattr(streams, "QUIET", 0.05)
    broken = threading.Event()

    class Dead(Remote):
        def run(self, script, *, on_line=None, deadline=None):
            if on_line is None:
                raise NodeUnreachable(A, "not finished within 10 s")
            if not broken.is_set():
                assert broken.wait(10)
                raise NodeUnreachable(A, "closed")
            on_line("done")
            return Result(0, "")

        def close(self):
            broken.set()

    stream = Stream(A, way(Dead(A)), lambda: "", lambda text: text == "done")
    both = Streams([stream], seen.append)
    both.start()
    while not stream.over.wait(0.02):
        both.check()
    assert broken.is_set()


# --- letting go of a run once it runs everywhere -------------------------------------------------

STARTED = {"event": "started", "pid": 1}
REFUSED = {"event": "exit", "rc": None, "error": "the command could not be started: no such file"}
BROKEN = {"event": "end", "state": "failed", "why": {"node": "b", "rank": None, "text": REFUSED["error"]}}


def test_command_does_not_detach_from_a_run_that_one_node_could_not_start(follow):
    """Node b could not start the command; a, which started it, is stopped by its agent a moment later."""
    a_ends = threading.Event()
    a = Remote(A, [STARTED, a_ends, BROKEN])

    class Broken(Remote):
        def run(self, script, **options):
            done = super().run(script, **options)
            threading.Timer(0.1, a_ends.set).start()
            return done

    assert follow(a, Broken(B, [REFUSED, BROKEN]), until=lambda: follow.follower.started) == "ended"
    assert follow.follower.state == "failed"
    assert follow.follower.failures == {"b": REFUSED["error"]}


def test_a_restart_is_waited_for(tmp_path, seen):
    follower = Follower("r1", ["a", "b"], tmp_path, attempts=2, emit=seen.append)
    follower.take("a", STARTED)
    follower.take("b", REFUSED)
    assert not follower.started
    for name in ("a", "b"):
        follower.take(name, {"event": "attempt", "attempt": 2})
    assert not follower.started  # b has not started anything yet
    follower.take("b", STARTED)
    assert follower.started


def test_detach_names_an_unreachable_node(tmp_path, monkeypatch):
    """The run is running on a; of b nothing is known: that is exit code 5, and the reason is b's own."""
    from pathlib import Path

    from provision.model import Inventory
    from provision.session import Session
    from provision.tasks.start import Following, Start

    def out_of_reach(self, _way, _emit, **_options):
        self.follower.take("a", STARTED)
        self.follower.lost("b", "no route to host")
        assert self.follower.started
        return "detached"

    inventory = Inventory(Path(tmp_path, "inventory.yaml"), PurePosixPath("/opt/llm/current"), (A, B))
    monkeypatch.setattr(Start, "start_agents", lambda *_: {})
    monkeypatch.setattr(Attachment, "follow", out_of_reach)
    plans = [Plan("r1", node.name, ("x",), {}, prefix="/opt", nnodes=2) for node in (A, B)]
    start = Start(Session(inventory), (A, B), "r1", plans, {"folder": "/x/runs/r1"})
    with pytest.raises(NodesFailedError, match="whether run r1 started on b is not known") as failed:
        start.follow(Following(detach=True))
    assert failed.value.reasons == {"b": "no route to host"}
    assert failed.value.exit_code == 5
