"""ib.umad: the device that the InfiniBand tools and opensm need is there.

/dev/infiniband/umad* is made by the module ib_umad; sminfo, perfquery and opensm speak to the fabric through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, ok, warn
from provision.checks._host import number
from provision.checks._infiniband import PORTS, fabric, sections
from provision.model import Finding

ID = "ib.umad"
LEVEL = 0
TITLE = "/dev/infiniband/umad* for the InfiniBand tools"
WHY = "Without it no subnet manager starts on this node, and no tool tells why a link is slow."
PROBE = (
    PORTS
    + """\
set -- /dev/infiniband/umad*
[ -e "$1" ] || shift
echo "@umad $#"
"""
)


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """Name nodes with InfiniBand and without the module."""
    cluster, others = fabric(ID, answers)
    yield from others
    for name in cluster:
        devices = sum(number(count) or 0 for (count,), _ in sections(answers[name].out, "umad", words=1))
        if devices:
            yield ok(ID, name, f"{devices} devices")
        else:
            yield warn(
                ID,
                name,
                "no /dev/infiniband/umad*",
                expected="the module ib_umad",
                fix="modprobe ib_umad; echo ib_umad >/etc/modules-load.d/ib_umad.conf keeps it",
            )
