"""What is said of a node that another command has taken."""

from types import SimpleNamespace

import pytest

from provision.errors import PreflightError
from provision.model import Node
from provision.tasks import hold


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
        SimpleNamespace(node=Node("a", "10.0.0.1"), state="held"),
        SimpleNamespace(node=Node("b", "10.0.0.2"), state=f"busy {seconds} me on head, process 7"),
    ]
    with pytest.raises(PreflightError, match="1 of 2 nodes are taken") as refused:
        hold._refuse_busy(holders)
    assert refused.value.reasons == {"b": f"another command of me on head, process 7 {said}"}
