"""pci.speed: RDMA adapters have all lanes of their slot, at the speed of similar adapters.

``current_link_*`` and ``max_link_*`` of the adapter in sysfs (Linux, Documentation/ABI/testing/sysfs-bus-pci). An
adapter in a slower slot than it could use is right when all similar adapters are.
"""

import re

from provision.checks.kit import Answers, Judgements, majority, not_here, unknown
from provision.checks.kit.infiniband import Fault, worst

TITLE = "RDMA adapters have all their PCI lanes at full speed"
WHY = "A 400 Gb/s adapter on half of its lanes moves half as much, and every all-reduce waits for it."
PROBE = """\
set -- /proc/version /proc/sys/kernel/ostype
for device in /sys/class/infiniband/*/device; do
  for file in current_link_speed current_link_width max_link_speed max_link_width; do set -- "$@" "$device/$file"; done
done
head -n 1 "$@" 2>/dev/null
echo @end
"""
_FILE = re.compile(r"^==> /sys/class/infiniband/([^/]+)/device/(\w+)_link_(\w+) <==\n(\d+(?:\.\d+)?)", re.MULTILINE)
_WHOLE = {"current width", "current speed", "max width", "max speed"}


def judge(answers: Answers) -> Judgements:
    """Name adapters with fewer lanes or a lower speed than similar adapters, or, without any, than they could have."""
    every: dict[str, dict[str, dict[str, float]]] = {}
    for name, answer in answers.items():
        if "@end" not in answer.lines:
            yield name, unknown("what the node printed about its adapters is not understood")
            continue
        every[name] = {}
        for device, kind, what, value in _FILE.findall(answer.out):
            every[name].setdefault(device, {})[f"{kind} {what}"] = float(value)
    for name, mine in every.items():
        links = {device: link for device, link in mine.items() if link.keys() == _WHOLE and link["current width"]}
        if not links:
            yield name, not_here("no RDMA adapter on a PCI slot that reports its speed")
            continue
        faults = []
        for device, link in links.items():
            has = (link["current width"], link["current speed"])
            most = (link["max width"], link["max speed"])
            alike = {
                f"{node} {other}": (each["current width"], each["current speed"])
                for node, devices in every.items()
                for other, each in devices.items()
                if each.keys() == _WHOLE and (each["max width"], each["max speed"]) == most
            }
            usual = majority(alike) if len(alike) > 1 else None
            wanted = usual or most
            if has[0] < wanted[0] or has[1] < wanted[1]:
                fix = f"reseat the adapter {device} or its riser; its slot should have x{most[0]:g} at {most[1]:g} GT/s"
                others = "similar adapters have" if usual else "it could have"
                observed = f"{device} has {_link_text(has)}, {others} {_link_text(wanted)}"
                faults.append(Fault("WARN", observed, _link_text(wanted), fix))
        fine = sorted({_link_text((link["current width"], link["current speed"])) for link in links.values()})
        yield name, worst(faults, ", ".join(fine))


def _link_text(link: tuple[float, float]) -> str:
    return f"x{link[0]:g} at {link[1]:g} GT/s"
