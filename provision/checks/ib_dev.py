"""ib.dev: the training user may open the RDMA devices.

Programs reach an adapter through /dev/infiniband/uverbs*, which the module ib_uverbs makes; udev gives it to all or to
the group rdma (rdma-core, 60-rdma-ndd.rules and the distributions' own).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from provision.checks import Answer, Plan, fail, not_here, ok, unknown
from provision.checks._infiniband import PORTS, ports, sections
from provision.model import Finding

ID = "ib.dev"
LEVEL = 0
TITLE = "the training user may open /dev/infiniband/uverbs*"
WHY = "NCCL finds no usable adapter and goes over TCP without an error, at a tenth of the speed."
PROBE = (
    PORTS
    + """\
for file in /dev/infiniband/uverbs*; do
  [ -e "$file" ] || continue
  if [ -r "$file" ] && [ -w "$file" ]; then echo "@dev $file open"; else echo "@dev $file closed"; fi
done
echo "@user $(id -un)"
"""
)


def judge(seen: Plan, answers: Mapping[str, Answer]) -> Iterator[Finding]:  # noqa: ARG001 - every check has it
    """Name nodes with RDMA adapters whose devices are missing or closed to the training user."""
    for name, answer in answers.items():
        every = ports(answer.out)
        devices = [given for given, _ in sections(answer.out, "dev")]
        user = " ".join(word for given, _ in sections(answer.out, "user") for word in given) or "the user"
        closed = [file for file, state in devices if state != "open"]
        if every is None:
            yield unknown(ID, name, "what the node printed about its ports is not understood")
        elif not every:
            yield not_here(ID, name, "no InfiniBand")
        elif not devices:
            yield fail(
                ID, name, "no /dev/infiniband/uverbs*", expected="a device for every adapter", fix="modprobe ib_uverbs"
            )
        elif closed:
            yield fail(
                ID,
                name,
                f"{user} may not read and write {', '.join(closed)}",
                expected="devices that the training user may open",
                fix=f"usermod -aG rdma {user} and log in again, or a udev rule with MODE=0666 for uverbs*",
            )
        else:
            yield ok(ID, name, f"{len(devices)} devices open for {user}")
