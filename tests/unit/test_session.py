"""A session runs stages on nodes: what an outcome holds, what is shown, and the one error for all that failed."""

from __future__ import annotations

import threading
from pathlib import Path, PurePosixPath

import pytest

from provision.errors import ClusterctlError, InterruptedByUser, NodesFailedError, PreflightError
from provision.model import CommandLine, Inventory, Node, Progress, Result, StageFinished, StageStarted, Step
from provision.session import Conversation, Failure, Outcome, Session, Sharing, run_conversations
from provision.ssh.local import LocalRemote
from provision.ssh.prompts import WithoutSudo
from provision.ssh.remote import DeadlineExceeded, NodeUnreachable, RootRefused
from provision.stages import stage

NODES = tuple(Node(f"gpu0{number}", f"10.0.0.{number}") for number in range(1, 4))
CLUSTER = Inventory(Path("inventory.yaml"), PurePosixPath("/opt/llm/current"), NODES)


class Pool:
    """Connections to nodes that run scripts on this machine, but for those that raise."""

    def __init__(self, **errors):
        self.errors = errors
        self.closed = False

    def __getitem__(self, node):
        if node.name in self.errors:
            raise self.errors[node.name]
        return LocalRemote(node)

    def close(self):
        self.closed = True


def session(*, typed="deploy", events=None, **errors):
    emit = (lambda _: None) if events is None else events.append
    return Session(CLUSTER, typed=CommandLine(typed), emit=emit, connections=Pool(**errors))


def down(number):
    return NodeUnreachable(NODES[number - 1], "no route to host", hint="is it up?")


# --- stages --------------------------------------------------------------------------------------


def test_a_question_has_a_value_for_each_node_and_a_reason_for_each_failure():
    events = []
    found = session(events=events, gpu02=down(2)).ask(
        "look", "Looking", lambda node: f"echo {node.name}", lambda _, out: out.strip(), state=str.upper
    )
    assert found.ok == {"gpu01": "gpu01", "gpu03": "gpu03"}
    assert found.reasons == {"gpu02": "no route to host"}
    assert found.hints == ("is it up?",)
    assert found.of(NODES) == (NODES[0], NODES[2])
    started, *progress, finished = events
    assert started == StageStarted("look", "Looking", 3, "nodes")
    assert {type(event) for event in progress} == {Progress}
    assert progress[-1] == Progress("look", 3, 3)
    assert (finished.stage, finished.failed) == ("look", 1)
    assert finished.states == {"gpu01": "GPU01", "gpu02": "no answer", "gpu03": "GPU03"}


def test_an_answer_that_cannot_be_read_is_the_nodes_failure():
    found = session().ask("look", "Looking", "echo many", lambda _, out: int(out))
    assert not found.ok
    assert "its answer cannot be parsed" in found.reasons["gpu01"]


def test_last_nodes_are_named_during_the_wait():
    events, others = [], threading.Event()
    finished = []

    def work(node):
        if node is NODES[0]:
            assert others.wait(10)
        finished.append(node)
        if len(finished) == 2:
            others.set()

    session(events=events).work("s", "S", work)
    notes = [event.note for event in events if isinstance(event, Progress)]
    assert notes[-1] == ""
    assert "waiting for gpu01" in notes


def test_a_stage_without_nodes_is_not_shown():
    events = []
    assert session(events=events).work("s", "S", pytest.fail, on=()).ok == {}
    assert events == []


def test_aborted_stage_is_not_shown_as_finished():
    events = []
    with pytest.raises(KeyboardInterrupt), stage(events.append, "s", "S"):
        raise KeyboardInterrupt
    assert [type(event) for event in events] == [StageStarted]


def test_the_seconds_of_stages_of_the_same_name_add_up():
    ours = session()
    for seconds in (1.0, 2.5):
        ours.emit(StageFinished("send", seconds))
    assert ours.seconds == {"send": 3.5}


def test_a_value_may_count_as_wrong_though_the_node_answered():
    events = []
    done = session(events=events).work("s", "S", lambda node: node.name, wrong=lambda name: name == "gpu03")
    assert len(done.ok) == 3
    assert events[-1].failed == 1


# --- steps ---------------------------------------------------------------------------------------


def test_steps_run_on_the_nodes_that_have_steps(tmp_path):
    plan = {
        "gpu01": [Step("file", f"touch {tmp_path}/one", unless=f"test -e {tmp_path}/one")],
        "gpu02": [Step("good", "true"), Step("bad", "echo why >&2; exit 3"), Step("never", f"touch {tmp_path}/never")],
    }
    done = session().apply("apply", "Applying", plan)
    assert [step.state for step in done.ok["gpu01"]] == ["changed"]
    assert done.reasons == {"gpu02": "bad: why"}
    assert [step.state for step in done.failed["gpu02"].steps] == ["changed", "failed"]
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    with pytest.raises(NodesFailedError, match="deploy failed on 1 of 3 nodes; the others are done") as failed:
        done.required()
    assert failed.value.hint == "fix the errors above, then: clusterctl deploy"
    assert not failed.value.nothing_done


def test_script_without_a_failed_step_fails_by_its_exit_status():
    done = session().apply("a", "A", {"gpu01": [Step("s", "true")]}, compiled=lambda *_: "echo broken >&2; exit 9")
    assert done.reasons == {"gpu01": "broken"}


# --- outcomes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (down(1), "no answer"),
        (DeadlineExceeded(NODES[0], "not finished within 3 s"), "timed out"),
        (RootRefused(NODES[0], "no sudo"), "refused"),
        (ClusterctlError("disk full"), "failed"),
    ],
)
def test_a_failure_has_a_kind(error, kind):
    assert Failure.of(error, CLUSTER, NODES[0]).kind == kind


def test_two_stages_are_one_outcome_and_a_nodes_first_reason_stays():
    ours = session()
    first = Outcome(ours, {"gpu01": 1, "gpu02": 2}, {"gpu03": Failure("first")})
    second = Outcome(ours, {"gpu01": 11}, {"gpu02": Failure("second"), "gpu03": Failure("later")}, changes=True)
    both = first & second
    assert both.ok == {"gpu01": 11}
    assert both.reasons == {"gpu02": "second", "gpu03": "first"}
    assert both.changes
    assert (second & first).reasons == {"gpu02": "second", "gpu03": "later"}


def test_missing_answer_changes_nothing_and_suggests_exclude():
    found = session(typed="prune", gpu02=down(2)).ask("look", "Looking", "true", lambda _, out: out)
    with pytest.raises(NodesFailedError, match="no answer from 1 of 3 nodes; nothing was changed") as failed:
        found.required()
    assert failed.value.nothing_done
    assert failed.value.hint == "is it up?; to continue without: clusterctl prune --exclude gpu02"


def test_nodes_that_are_refused_for_their_answer():
    found = session(gpu02=down(2)).ask("look", "Looking", "true", lambda _, out: out)
    with pytest.raises(NodesFailedError, match="no answer from 1 of 3") as failed:
        found.refuse({"gpu01": "too old"}).required(cannot="cannot take it")
    assert failed.value.reasons == {"gpu02": "no route to host", "gpu01": "too old"}
    every = session().ask("look", "Looking", "true", lambda _, out: out).refuse({"gpu01": "too old"})
    with pytest.raises(PreflightError, match="1 of 3 nodes cannot take it; nothing was changed"):
        every.required(cannot="cannot take it")
    assert session().each(lambda node: node.name).required() == {node.name: node.name for node in NODES}


# --- the session itself --------------------------------------------------------------------------


def test_given_connections_stay_open():
    pool = Pool()
    with Session(CLUSTER, connections=pool) as ours:
        assert ours.connections is pool
    assert not pool.closed


def test_session_without_sudo_prompt_asks_other_questions():
    class Asked:
        def confirm_host_key(self, *_):
            return True

        def password(self, *_):
            return "login"

        def sudo_password(self, *_):
            pytest.fail("asked")

    asked = WithoutSudo(Asked())
    assert (asked.password("u", "n"), asked.sudo_password("u", "n")) == ("login", None)
    assert Session(CLUSTER, prompts=Asked(), asks_sudo=False).can_ask
    assert not Session(CLUSTER).can_ask


def test_without_any_answer_exclude_is_not_suggested():
    assert "--exclude" not in session().without([node.name for node in NODES], 3)


def test_failed_required_script_reports_why():
    ours = session()
    assert ours.output(NODES[0], "cat", stdin=b"given") == "given"
    with pytest.raises(ClusterctlError, match="no such thing"):
        ours.output(NODES[0], "echo no such thing >&2; exit 4")
    with pytest.raises(ClusterctlError, match="the script ended with status 4"):
        ours.output(NODES[0], "exit 4")


def test_ctrl_c_in_a_stage_ends_the_command():
    def work(_node):
        raise InterruptedByUser("interrupted")

    with pytest.raises(InterruptedByUser):
        session().each(work)


def test_a_node_that_shares_its_folder_has_an_owner():
    sharing = Sharing({"gpu01": "", "gpu02": "gpu01"})
    assert sharing.own(NODES) == (NODES[0], NODES[2])
    assert [sharing.owner(node) for node in NODES] == ["", "gpu01", ""]


# --- conversations -------------------------------------------------------------------------------

ECHO = 'while read -r line; do echo "heard $line"; done; echo bye'


def test_lines_are_sent_to_a_script_and_answered():
    talk = Conversation(NODES[0], Pool().__getitem__, ECHO)
    with run_conversations([talk]):
        talk.send("one")
        assert talk.wait_for("heard", 10) == "heard one"
        talk.send("two")
        assert talk.wait_for("heard two", 10) == "heard two"
    assert talk.lines == ["heard one", "heard two", "bye"]
    assert (talk.result.rc, talk.failure) == (0, None)
    assert talk.wait_for("more", 10) is None  # it has finished: nothing is waited for


def test_heartbeat_keeps_an_idle_script_alive():
    talk = Conversation(NODES[0], Pool().__getitem__, ECHO, beat=0.01)
    with run_conversations([talk]):
        assert talk.wait_for("heard ", 10) == "heard "


def test_lost_node_ends_the_conversation():
    talk = Conversation(NODES[0], Pool(gpu01=down(1)).__getitem__, ECHO)
    with run_conversations([talk]):
        assert talk.wait_for("heard", 10) is None
    assert "no route to host" in str(talk.failure)


def test_a_result_is_what_the_script_returned():
    assert session().run(NODES[0], "echo out; echo err >&2; exit 2").rc == 2
    assert isinstance(session().run(NODES[0], "true"), Result)
