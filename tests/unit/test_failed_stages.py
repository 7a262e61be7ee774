"""How failures on many nodes are shown: the mark of a stage, and one line for equal reasons."""

import io
import json

import pytest

from provision.errors import NodesFailedError, Reason, within
from provision.model import Inventory, Node, StageFinished, StageStarted
from provision.output import Reporter
from provision.output_text import error_lines, finished_lines, fold_equal
from provision.session import Failure
from provision.ssh.session import unreachable
from provision.ssh.wire import NodeUnreachable
from provision.summaries.status import status_output
from provision.tasks.status import Status

MARKS = ("✓", "!", "✗")


@pytest.mark.parametrize(
    ("event", "nodes", "head", "words"),
    [
        (StageFinished("run", 1.0, failed=0, summary="2 of 2 succeeded"), 2, "✓", "done in"),
        (StageFinished("run", 1.0, failed=1, summary="1 of 2 succeeded"), 2, "!", "failed on 1 of 2 nodes after"),
        (StageFinished("run", 1.0, failed=2, summary="0 of 2 succeeded"), 2, "✗", "failed after"),
        (StageFinished("status", 1.0, {"a": "no answer"}), 3, "!", "failed on 1 of 3 nodes after"),
        (StageFinished("status", 1.0, {"a": "no answer", "b": "no answer"}), 2, "✗", "failed after"),
        (StageFinished("send", 1.0, {"a": "failed", "b": "received"}), None, "!", "failed on 1 of 2 nodes after"),
        (StageFinished("send", 1.0, {"a": "received"}), 1, "✓", "done in"),
    ],
)
def test_a_stage_shows_whether_all_some_or_no_nodes_failed(event, nodes, head, words):
    assert finished_lines("Stage", event, MARKS, nodes)[0].text.startswith(f"{head} Stage (1.0 s)")
    assert finished_lines("Stage", event, None, nodes)[0].text.startswith(f"Stage: {words} 1.0 s")


def test_the_reporter_knows_how_many_nodes_took_part():
    err = io.StringIO()
    reporter = Reporter(out=io.StringIO(), err=err, environ={})
    reporter(StageStarted("status", "Asking 2 nodes", 2))
    reporter(StageFinished("status", 1.0, {"gpu01": "no answer"}))
    assert "Asking 2 nodes: failed on 1 of 2 nodes after 1.0 s" in err.getvalue()


def dead(count, port=None):
    """Reasons of nodes that refuse connections, as tasks make them."""
    numbers = range(1, count + 1)
    nodes = tuple(Node(f"gpu{each:02}", f"10.0.0.{each}", port=port and port + each) for each in numbers)
    inventory = Inventory(None, None, nodes)
    return {
        node.name: Failure.of(
            unreachable(node, ConnectionRefusedError(), f"{node.address} port {node.port or 22}", 10), inventory, node
        ).reason
        for node in nodes
    }


@pytest.mark.parametrize(
    ("port", "message"),
    [(None, "its address port 22 refuses connections"), (2200, "its address with its port refuses connections")],
)
def test_reasons_that_differ_in_the_nodes_own_address_are_one_line(port, message):
    reasons = dead(64, port)
    shown = [line.text for line in error_lines(NodesFailedError("no answer from 64 of 64 nodes", reasons=reasons))]
    assert shown == ["error: no answer from 64 of 64 nodes", f"  gpu[01-64]: {message}"]
    assert status_output(Status({}, reasons))[1] == f"gpu[01-64]: no answer: {message}"
    states = {name: within("unreachable: {}", why) for name, why in reasons.items()}
    assert [line.text for line in finished_lines("Look", StageFinished("s", 1.0, states), None)] == [
        "Look: failed after 1.0 s",
        f"  gpu[01-64]: unreachable: {message}",
    ]


def test_json_has_each_whole_reason():
    out = io.StringIO()
    reporter = Reporter(as_json=True, out=out, err=io.StringIO(), environ={})
    reporter.show_error(NodesFailedError("no", reasons=dead(2)))
    reasons = json.loads(out.getvalue())["error"]["reasons"]
    assert reasons == {f"gpu0{number}": f"10.0.0.{number} port 22 refuses connections" for number in (1, 2)}


def test_one_node_keeps_its_address_and_other_differences_stay():
    assert fold_equal(dead(1)) == {"10.0.0.1 port 22 refuses connections": "gpu01"}
    nodes = [Node("gpu01", "10.0.0.1"), Node("gpu02", "10.0.0.2")]
    pairs = zip(nodes, "xy", strict=True)
    reasons = {node.name: NodeUnreachable(node, f"{node.address} lacks {disk}").reason for node, disk in pairs}
    assert fold_equal(reasons) == {"10.0.0.1 lacks x": "gpu01", "10.0.0.2 lacks y": "gpu02"}


def test_only_the_whole_address_or_name_is_replaced():
    about = Reason.about("gpu1 at 10.0.0.1, not 10.0.0.11, gpu11 or x-gpu1: 10.0.0.1:22.", "gpu1", "10.0.0.1", 22)
    assert about.common == "its name at its address, not 10.0.0.11, gpu11 or x-gpu1: its address:22."
    assert Reason.about("fe80::1 and fe80::1:2", "n", "fe80::1").common == "its address and fe80::1:2"
    assert Reason.about("no route to port", "port", "h").common == "no route to port"
