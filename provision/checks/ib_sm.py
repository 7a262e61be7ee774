"""ib.sm: the subnet manager answers every InfiniBand port.

``sminfo`` (infiniband-diags) asks the subnet manager that the port knows. A manager that died leaves the ports Active;
only asking shows it. sminfo needs /dev/infiniband/umad*, which is root's; what sysfs tells is judged without.
"""

import re
from collections.abc import Iterator, Mapping

from provision.checks.kit import Answers, Judgements
from provision.checks.kit.infiniband import ACTIVE, ASK, PORTS, Fault, Port, fabric, sections, worst

ROOT = True
TITLE = "the subnet manager answers"
WHY = (
    "Without a subnet manager nothing new joins the fabric: a node that restarts or a cable that blinks stays "
    "Initializing, and the running job hangs."
)
# Half a second for an answer and umad's three attempts: at most two seconds for a port.
PROBE = PORTS + ASK.format(mark="sminfo", command='sminfo -C "${device##*/}" -P "${port##*/}" -t 500')
TIMEOUT = 30

_SAID = re.compile(r"sm lid (\d+) sm guid (0x[0-9a-f]+), activity count \d+ priority \d+ state \d+ SMINFO_(\w+)")
_START = "on the node that runs the subnet manager: systemctl restart opensmd with OFED, opensm on distributions"


def judge(answers: Answers) -> Judgements:
    """Name the ports whose subnet manager is unknown, silent or no master."""
    cluster, others = fabric(answers)
    yield from others
    for name, ports in cluster.items():
        answer = answers[name]
        observed = {(device, number): text for (device, number), text in sections(answer.out, "sminfo", words=2)}
        linked = [port for port in ports if port.up]
        masters = {found[2] for text in observed.values() if (found := _SAID.search(text))}
        fine = f"master {', '.join(sorted(masters))}" if masters else "no port has a link"
        faults = (fault for port in linked for fault in _faults(port, observed, root=answer.root))
        yield name, worst(faults, fine)


def _faults(port: Port, observed: Mapping[tuple[str, str], str], *, root: bool) -> Iterator[Fault]:
    manager = port.number_of("sm_lid")
    text = observed.get((port.device, str(port.number)))
    if port.state != ACTIVE or not manager:
        yield Fault("FAIL", f"{port.name} waits for a subnet manager", "an answer of sminfo", _START)
    elif text is None or "not installed" in text:
        fix = "install infiniband-diags with services: os_packages:"
        yield Fault("UNKNOWN", "sminfo is not installed", "an answer of sminfo", fix)
    elif found := _SAID.search(text):
        if found[3] != "MASTER":
            seen = f"{port.name}: the subnet manager at LID {found[1]} is {found[3]} and not MASTER"
            yield Fault("FAIL", seen, "SMINFO_MASTER", _START)
    elif not root or "UMAD" in text:
        why = "needs root" if not root else "cannot open /dev/infiniband/umad*"
        yield Fault("UNKNOWN", f"sminfo {why}", "an answer of sminfo", "modprobe ib_umad" if root else "run as root")
    else:
        seen = f"{port.name} is Active, but the subnet manager at LID {manager} does not answer"
        yield Fault("FAIL", seen, "an answer of sminfo", _START)
