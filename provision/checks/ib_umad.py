"""ib.umad: the device that the InfiniBand tools and opensm need is there.

/dev/infiniband/umad* is made by the module ib_umad; sminfo, perfquery and opensm speak to the fabric through it.
"""

from provision.checks.kit import Answers, Judgements, number, ok, warn
from provision.checks.kit.infiniband import PORTS, fabric, sections

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


def judge(answers: Answers) -> Judgements:
    """Name nodes with InfiniBand and without the module."""
    cluster, others = fabric(answers)
    yield from others
    for name in cluster:
        devices = sum(number(count) or 0 for (count,), _ in sections(answers[name].out, "umad", words=1))
        if devices:
            yield name, ok(f"{devices} devices")
        else:
            yield (
                name,
                warn(
                    "no /dev/infiniband/umad*",
                    expected="the module ib_umad",
                    fix="modprobe ib_umad; echo ib_umad >/etc/modules-load.d/ib_umad.conf keeps it",
                ),
            )
