"""The message about a node locked by another command, and the nodes that a failure reaches over a shared folder."""

import pytest

from provision.errors import PreflightError
from provision.model import Inventory, Node
from provision.session import Failure, Outcome, Session, Sharing, lock
from provision.tasks import deploy


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ("5", "has been running here for 5 s"),
        ("7200", "has been running here for 120 min"),
        ("-86400", "is running here"),  # the clock was set back meanwhile
    ],
)
def test_how_long_another_command_has_been_running(seconds, text):
    with pytest.raises(PreflightError, match="1 of 2 nodes are locked") as refused:
        lock.refuse_busy({"a": "held a boot", "b": f"busy {seconds} me on head, process 7"})
    assert refused.value.reasons == {"b": f"another command of me on head, process 7 {text}"}


def test_node_that_shares_a_root_names_the_owner_of_the_lock():
    """The host's own name is not always its name in the inventory."""
    states = {"gpu01": "held host-a boot-1", "gpu02": "shared host-a boot-1", "gpu03": "shared host-b boot-2"}
    assert lock.sharing(states).owners == {"gpu01": "", "gpu02": "gpu01", "gpu03": "host-b"}


NODES = [Node(f"gpu0{number}", f"10.0.0.{number}") for number in range(1, 6)]
SHARED = {"gpu01": "", "gpu02": "gpu01", "gpu03": "gpu01", "gpu04": "", "gpu05": "gpu04"}


@pytest.mark.parametrize(
    ("before", "bad", "reasons", "tested"),
    [
        # The node that holds the root fails its smoke test: its own reason stays, and the others name it.
        (
            {},
            {"gpu01": "smoke test: no driver"},
            {
                "gpu01": "smoke test: no driver",
                "gpu02": "shares its files with gpu01, which failed",
                "gpu03": "shares its files with gpu01, which failed",
            },
            ["gpu01", "gpu04", "gpu05"],
        ),
        # One that shares fails: the others work with the same files.
        ({}, {"gpu03": "smoke test: glibc"}, {"gpu03": "smoke test: glibc"}, [node.name for node in NODES]),
        # What did not arrive is not tested.
        (
            {"gpu04": "disk full"},
            {},
            {"gpu04": "disk full", "gpu05": "shares its files with gpu04, which failed"},
            ["gpu01", "gpu02", "gpu03"],
        ),
    ],
)
def test_every_node_keeps_its_own_reason(before, bad, reasons, tested):
    seen = []
    session = Session(Inventory(None, None, tuple(NODES)))
    failures = {name: Failure(why) for name, why in before.items()}

    def activate(nodes):
        seen.extend(node.name for node in nodes)
        failed = {node.name: Failure(bad[node.name]) for node in nodes if node.name in bad}
        return Outcome(session, {node.name: () for node in nodes if node.name not in bad}, failed, changes=True)

    sent = Outcome(session, {}, failures, changes=True)
    done = deploy.activate_all(NODES, Sharing(SHARED), sent, activate)
    assert (sent & done).reasons == reasons
    assert sorted(seen) == tested
