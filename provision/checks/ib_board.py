"""ib.board: every node has the same models of InfiniBand adapters.

``board_id`` in sysfs (the PSID, such as MT_0000000838), and ``hca_type`` where a driver has none.
"""

from collections import Counter

from provision.checks.kit import Answers, Judgements, odd
from provision.checks.kit.infiniband import PORTS, fabric

TITLE = "the same InfiniBand adapters on every node"
WHY = "NCCL builds its rings from what every node has: another model on one node can halve the speed of all."
PROBE = PORTS


def judge(answers: Answers) -> Judgements:
    """Compare the models of the adapters that have an InfiniBand port."""
    cluster, others = fabric(answers)
    yield from others
    models = {}
    for name, ports in cluster.items():
        devices = {port.device: port.values.get("board_id") or port.values.get("hca_type", "") for port in ports}
        models[name] = tuple(sorted(Counter(devices.values()).items()))
    yield from odd(
        models,
        show=lambda found: ", ".join(f"{number} x {model or 'unknown'}" for model, number in found),
        fix="use nodes of one kind, or name the adapters that all have with NCCL_IB_HCA in the inventory's train: env:",
    )
