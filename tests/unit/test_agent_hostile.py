"""The supervisor and other agents' messages: any node may be broken or lie, and files may be damaged."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))  # for agents; last, so that it hides no module

from agents import plan_of

from trainer.agent import run_files, talk
from trainer.agent.checkpoints import layouts, selection
from trainer.agent.checkpoints.files import look
from trainer.agent.contract import offers
from trainer.agent.contract.plan import PlanError
from trainer.agent.follow import Follower
from trainer.agent.link import LinkError
from trainer.agent.run_files import NodePlan
from trainer.agent.supervisor import control
from trainer.agent.supervisor.control import Control
from trainer.agent.supervisor.decisions import check_end, check_start, decide_end, decide_start

NESTED = b"[" * 5000
GIVEN = {
    "run": "r",
    "node": "n0",
    "node_rank": 0,
    "processes": 2,
    "argv": ["x"],
    "env": {},
    "resume": {"output": "out"},
    "none_ok": True,
    "link": {"host": "127.0.0.1", "port": 1, "token": "t", "nodes": ["n0", "n1"]},
}
ODD = st.sampled_from([float("nan"), -1, 0, True, 1 << 70, 1e308, "", "\ud800", "x" * 9000, "..", "a/b", [], {}, None])
VALUES = st.recursive(
    ODD | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=6,
)


def objects(*names):
    return st.dictionaries(st.sampled_from(names), VALUES, max_size=8)


class Events:
    attempt = 1

    def __init__(self):
        self.said = []

    def emit(self, event, **fields):
        json.dumps(fields).encode()
        self.said.append((event, fields))


class LinkOf:
    """A link that gives these messages."""

    def __init__(self, messages):
        self.messages = messages

    def take(self):
        come, self.messages = self.messages, []
        return come

    def send(self, kind, **fields):
        pass


@pytest.fixture
def plan(tmp_path):
    return NodePlan(plan_of(**GIVEN), tmp_path, tmp_path / "plan-0.json")


def taken(plan, *messages):
    """A control that has taken messages, and its events."""
    events = Events()
    inbox = Control(plan, events)
    inbox.link = LinkOf(list(messages))
    inbox.take()
    return inbox, events.said


# --- messages ----------------------------------------------------------------------------------------------------

KINDS = ["stop", "failed", "gone", "lost", "back", "ended", "stack?", "stacks?", "stacks", "broken", "other"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            objects("node", "rank", "save", "who", "attempt", "failed", "text", "signal", "silent"),
        ),
        max_size=6,
    )
)
def test_every_message_is_accepted(tmp_path_factory, message):
    inbox, _ = taken(
        NodePlan(plan_of(**GIVEN), tmp_path_factory.mktemp("run"), Path("plan")),
        *({"node": "n1"} | fields | {"kind": kind} for kind, fields in message),
    )
    inbox.look(1e9)
    assert isinstance(inbox.lost_nodes(), list)
    inbox.close()  # thousands of examples run in one process


def test_a_closed_control_leaves_no_file_open_and_ignores_nudges(plan):
    files = Path("/proc/self/fd")
    before = set(files.iterdir())
    inbox, _ = taken(plan)
    assert set(files.iterdir()) - before
    inbox.close()
    inbox.nudge()
    assert not set(files.iterdir()) - before


@pytest.mark.parametrize("stacks", [None, [], "x", {"x": "y"}, {"1" * 5000: "y"}, {"²": "y"}, {"-1": "y"}])
def test_invalid_stacks_are_skipped(plan, stacks):
    inbox, _ = taken(plan, {"kind": "stacks", "node": "n1", "rank_stacks": stacks})
    assert inbox.stacks == {}


def test_stacks_are_cut(plan):
    inbox, _ = taken(plan, {"kind": "stacks", "node": "n1", "rank_stacks": {"3": "x" * 100_000, "4": 5}})
    assert inbox.stacks == {3: "x" * control.STACK, 4: "5"}


def test_message_of_a_node_outside_the_run_is_ignored(plan):
    inbox, message = taken(plan, {"kind": "stop", "node": "n9"}, {"kind": "lost", "node": ["n1"], "silent": 1e9})
    assert (inbox.stop, inbox.lost_nodes(), message) == (None, [], [])


def test_flood_of_messages_does_not_fill_the_disk(plan):
    _, message = taken(plan, *[{"kind": "ended", "node": "n1", "text": "x" * 5000}] * 5000)
    assert len(message) == control.PEER_EVENTS
    assert {len(fields["text"]) for _, fields in message} == {control.TEXT}


def test_a_failure_of_another_node_is_still_reported(plan):
    inbox, message = taken(
        plan, {"kind": "failed", "node": "n1", "attempt": 1, "failed": 3, "text": "x", "signal": "SIGKILL"}
    )
    assert (inbox.failure["node"], inbox.failure["rank"], inbox.failure["signal"]) == ("n1", 3, "SIGKILL")
    assert message == [("peer", {"node": "n1", "state": "failed", "text": "x"})]


# --- meetings ----------------------------------------------------------------------------------------------------

FILE = [10, 1700000000000000000, "0123", None]
OUTCOME = {
    "rc": 1,
    "signal": None,
    "stopped": False,
    "left": [],
    "failed": None,
    "killed": None,
    "step": 3,
    "before": None,
}
WHY = {"node": "n1", "rank": 1, "text": "x", "signal": "SIGKILL", "time": 1.0}


@contextlib.contextmanager
def named(node):
    """A ``LinkError`` may be raised, which names this node."""
    try:
        yield
    except LinkError as error:
        if node not in str(error):
            raise


@given(objects("processes", "ranks", "pointers", "others", "kept", "checkpoints") | st.just({"processes": 2}))
def test_every_offer_of_another_node_is_used_or_refused_with_its_name(offer):
    plan = NodePlan(plan_of(**GIVEN), Path("/nowhere"), Path("plan"))
    with named("n1"):
        decision = decide_start(plan, {0: {"processes": 2}, 1: offer}, 1, resume=True)
        assert decision["world_size"] > 2


@given(objects("outcome", "before", "processes") | objects(*OUTCOME).map(lambda one: {"processes": 1, "outcome": one}))
def test_every_end_of_another_node_is_used_or_refused_with_its_name(offer):
    plan = NodePlan(plan_of(**GIVEN), Path("/nowhere"), Path("plan"))
    with named("n1"):
        check_end(plan, decide_end(plan, {0: {"processes": 2, "outcome": OUTCOME}, 1: offer}, None, more=True))


def test_valid_offers_are_accepted(plan):
    (plan.output / "checkpoint-2").mkdir(parents=True)
    (plan.output / "checkpoint-2/trainer_state.json").write_text("{}")
    offer = selection.offer(plan.output, 0, 2) | {"processes": 2}
    assert offers.problem(offer) == ""
    decision = decide_start(plan, {0: offer, 1: offer}, 1, resume=True)
    assert check_start(plan, decision)["world_size"] == 4
    ended = {"processes": 2, "outcome": OUTCOME | {"failed": WHY, "killed": WHY}}
    assert check_end(plan, decide_end(plan, {0: ended, 1: ended}, None, more=False))["why"] == WHY


START = {
    "checkpoint": "checkpoint-2",
    "port": 29500,
    "world_size": 4,
    "copy": {"1": [["checkpoint-2/a", 5, 0]]},
    "members": [0, 1],
    "processes": [2, 2],
    "excluded": {},
    "replaced": [],
}


@pytest.mark.parametrize(
    "change",
    [
        *({"checkpoint": name} for name in ("..", "../x", "/etc", "a/../b", "", 1)),
        *({"port": port} for port in (0, -1, 70_000, "1", 1.5)),
        *({"world_size": size} for size in (None, "x", -1, 1 << 40)),
        *({"copy": copy} for copy in ("x", {"1": {}}, {"1": [[]]}, {"1": [["../x", 1, 0]]}, {"1": [["x", "1", 0]]})),
        {"refused": 5},
        {"step": -1},
        *({"members": members} for members in (None, [], [0], [0, 0], [0, 2], [0, -1], [0, "1"], [[], 1])),
        *({"processes": each} for each in (None, [2], [2, 0], [2, True], [2, 1 << 40])),
        *({"excluded": each} for each in (None, [], {"1": "lost"}, {"2": "x"}, {"x": "x"}, {"٣": "x"}, {"0" * 9: "x"})),
        *(
            {"replaced": each}
            for each in (None, [1], [{"node": "n1"}], [{"node": "n1", "why": "x", "rank": 1, "by": 5}])
        ),
        *(
            {"aside": {"number": 1, "names": ["a"], "pointers": {}} | aside}
            for aside in (
                {"number": "1"},
                {"names": ["../a"]},
                {"names": 3},
                {"pointers": {"..": "a"}},
                {"pointers": {"a": 1}},
            )
        ),
        {"aside": []},
    ],
)
def test_invalid_decision_of_rank_0_is_refused(plan, change):
    assert check_start(plan, dict(START)) == START
    with pytest.raises(LinkError, match=r"n0 \(rank 0\) sent an invalid decision"):
        check_start(plan, START | change)


@pytest.mark.parametrize(
    "change", [{"state": "x"}, {"state": []}, {"step": "1"}, {"saved": -1}, {"why": "x"}, {"why": {}}]
)
def test_invalid_verdict_of_rank_0_is_refused(plan, change):
    verdict = {"state": "failed", "why": WHY, "step": 1, "saved": None}
    assert check_end(plan, dict(verdict)) == verdict
    with pytest.raises(LinkError, match=r"n0 \(rank 0\) sent an invalid verdict"):
        check_end(plan, verdict | change)


@pytest.mark.parametrize(
    ("rank", "why"),
    [
        ((1 << 20) - 1, "rng_state of rank 0, 1, 2, 3, 4 missing"),
        (1 << 20, "rng_state: a file name has a rank that no run can have"),
        (10**15, "rng_state: a file name has a rank that no run can have"),
    ],
)
def test_file_name_with_a_huge_rank_uses_no_memory(rank, why):
    names = {f"rng_state_{rank}.pth", "model.safetensors", "optimizer.pt", "scheduler.pt", layouts.STATE}
    union = layouts.Union("checkpoint-1", layouts.TRAINER, names, {})
    assert layouts.why_incomplete(union, 2) == why


# --- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [NESTED, b"[]", b"", b"\xff", b'{"pid": ' + b"1" * 5000 + b"}", b" " * (2 << 20)])
def test_invalid_state_or_request_is_ignored(tmp_path, data):
    for name in (run_files.STATE, run_files.REQUEST):
        (tmp_path / name).write_bytes(data)
    assert run_files.read_state(tmp_path) == {}
    assert run_files.read_request(tmp_path) is None


def test_only_the_beginning_of_a_huge_state_is_read(tmp_path):
    with (tmp_path / run_files.STATE).open("wb") as file:
        file.truncate(3 << 30)  # sparse
    assert run_files.read_state(tmp_path) == {}


@pytest.mark.parametrize("pid", ["1", [1], None, 1 << 70, -1])
def test_invalid_pid_is_no_agent(pid):
    with contextlib.suppress(OverflowError):
        assert run_files.running_agents({"boot_id": run_files.boot_id(), "pid": pid, "start": "1"}) == []


@pytest.mark.parametrize("data", [NESTED, b"[]", b"", b"\xff"])
def test_invalid_plan_is_an_error_with_its_path(tmp_path, data):
    (tmp_path / "plan-0.json").write_bytes(data)
    with pytest.raises(PlanError, match=r"plan-0\.json is"):
        run_files.load_plan(str(tmp_path / "plan-0.json"))


def test_invalid_events_are_skipped(tmp_path, capsys):
    (tmp_path / "events.jsonl").write_bytes(b"\n".join([NESTED, b"[]", b"5", b'{"event": "end"}', b""]))
    Follower(NodePlan(plan_of(**GIVEN, logs="."), tmp_path, tmp_path / "plan"), 0).run()
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == ["end"]


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "trainer_state.json"])
def test_checkpoint_with_deeply_nested_json_is_torn(tmp_path, name):
    (tmp_path / name).write_bytes(NESTED)
    assert look(tmp_path / name)[0].torn == "it is not complete JSON"


@pytest.mark.parametrize(
    "header", [NESTED, b'{"a": {"data_offsets": [0, 1e999]}}', b'{"a": {"data_offsets": [0, "x"]}}']
)
def test_safetensors_with_an_invalid_header_is_torn(tmp_path, header):
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert look(tmp_path / "m.safetensors")[0].torn == "its header is damaged"


def test_a_reader_that_was_killed_leaves_a_path_unread():
    assert talk.parse_answer(b"{")["state"] == talk.parse_answer(NESTED)["state"] == "unread"


# --- ports -------------------------------------------------------------------------------------------------------


def test_endless_sender_is_foreign(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send():
            sock = server.accept()[0]
            with sock, contextlib.suppress(OSError):
                while True:
                    sock.sendall(b"x" * 4096)

        thread = threading.Thread(target=send)
        thread.start()
        assert talk.try_connection("token", "n1", "127.0.0.1", server.getsockname()[1], 30.0) == "foreign"
        thread.join(10)
