"""InfiniBand and RoCE: the simple checks."""

from provision.checks.kit import Answer, Judgement, each_node, fail, not_here, ok, unknown
from provision.checks.kit.infiniband import PORTS, ports, sections

_DEV_PROBE = (
    PORTS
    + """\
for file in /dev/infiniband/uverbs*; do
  [ -e "$file" ] || continue
  if [ -r "$file" ] && [ -w "$file" ]; then echo "@dev $file open"; else echo "@dev $file closed"; fi
done
echo "@user $(id -un)"
"""
)


@each_node(
    "ib.dev",
    "the training user may open /dev/infiniband/uverbs*",
    probe=_DEV_PROBE,
    why="NCCL finds no usable adapter and goes over TCP without an error, at a tenth of the speed.",
)
def dev(answer: Answer) -> Judgement:
    """Name nodes with RDMA adapters whose devices are missing or closed to the training user.

    Programs reach an adapter through /dev/infiniband/uverbs*, which the module ib_uverbs makes; udev gives it to all or
    to the group rdma (rdma-core, 60-rdma-ndd.rules and the distributions' own).
    """
    every = ports(answer.out)
    devices = [given for given, _ in sections(answer.out, "dev")]
    user = " ".join(word for given, _ in sections(answer.out, "user") for word in given) or "the user"
    closed = [file for file, state in devices if state != "open"]
    if every is None:
        return unknown("what the node printed about its ports is not understood")
    if not every:
        return not_here("no InfiniBand")
    if not devices:
        return fail("no /dev/infiniband/uverbs*", expected="a device for every adapter", fix="modprobe ib_uverbs")
    if closed:
        return fail(
            f"{user} may not read and write {', '.join(closed)}",
            expected="devices that the training user may open",
            fix=f"usermod -aG rdma {user} and log in again, or a udev rule with MODE=0666 for uverbs*",
        )
    return ok(f"{len(devices)} devices open for {user}")
