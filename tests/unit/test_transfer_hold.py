"""What is said of a node that another command has taken."""

from types import SimpleNamespace

import pytest

from provision.errors import PreflightError
from provision.model import Node
from provision.tasks import deploy, hold


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ("5", "has been at work here for 5 s"),
        ("7200", "has been at work here for 120 min"),
        ("-86400", "is at work here"),  # the clock was set back meanwhile
    ],
)
def test_how_long_another_command_has_been_at_work(seconds, said):
    holders = [
        SimpleNamespace(node=Node("a", "10.0.0.1"), state="held a boot"),
        SimpleNamespace(node=Node("b", "10.0.0.2"), state=f"busy {seconds} me on head, process 7"),
    ]
    with pytest.raises(PreflightError, match="1 of 2 nodes are taken") as refused:
        hold._refuse_busy(holders)
    assert refused.value.reasons == {"b": f"another command of me on head, process 7 {said}"}


def test_a_node_that_shares_a_root_names_the_node_that_holds_it():
    """The host's own name is not always its name in the inventory."""
    owners = {"host-a boot-1": "gpu01"}
    assert hold._shared("shared host-a boot-1", owners) == "gpu01"
    assert hold._shared("held host-a boot-1", owners) == ""
    assert hold._shared("shared host-b boot-2", owners) == "host-b"


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
    failed = dict(before)

    def activate(nodes):
        seen.extend(node.name for node in nodes)
        failed.update({node.name: bad[node.name] for node in nodes if node.name in bad})
        return {}

    deploy._activate_all(NODES, SHARED, failed, activate)
    assert failed == reasons
    assert sorted(seen) == tested
