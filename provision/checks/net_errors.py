"""net.errors: Whether the interface that carries the training loses packets to a bad cable or port.

Counters since the driver was loaded: /sys/class/net/*/statistics and carrier_down_count (kernel, sysfs-class-net).
"""

from collections.abc import Mapping

from provision.checks.kit import Answers, Judgements, Plan, ok, unknown, warn
from provision.checks.kit.network import carriers, facts, table

TITLE = "the data interface has no transmission errors and keeps its carrier"
WHY = "Every lost packet stalls all ranks until it is sent again; a link that goes down breaks the training off."
# Packets: a healthy link has a bit error rate below 1e-12 (IEEE 802.3), far below one packet in a million. A link goes
# down once or twice while a machine starts.
LIMITS = {"errors_ppm": 1.0, "carrier_losses": 5}

probe = facts


def judge(seen: Plan, answers: Answers) -> Judgements:
    """WARN where errors are more than ``errors_ppm`` of the packets, or the carrier went ``carrier_losses`` times."""
    found, lost = carriers(answers)
    yield from lost
    for name, (net, link) in found.items():
        rows = table(answers[name], "count").items()
        counts = {
            each: [int(word) for word in row]
            for each, row in rows
            if len(row) == 6 and all(word.isdecimal() for word in row)
        }
        watched = dict.fromkeys(each.name for each in (link, *net.devices(link)))
        if not counts.keys() & watched.keys():
            yield name, unknown(f"{link.name} has no counters")
            continue
        observed = [text for each in watched if each in counts and (text := _bad(each, counts[each], seen.limits))]
        if observed:
            fix = f"reseat or replace the cable, then look again: ip -s link show {link.name}"
            yield name, warn("; ".join(observed), fix=fix)
        else:
            packets, errors = (sum(sum(counts[each][at]) for each in watched if each in counts) for at in _PARTS)
            yield name, ok(f"{errors} errors in {packets} packets")


_PARTS = (slice(1, 3), slice(3, 5))


def _bad(name: str, counts: list[int], limits: Mapping[str, float]) -> str:
    down, received, sent, *errors = counts
    wrong, packets = errors[0] + errors[1], received + sent
    observed = []
    if wrong > packets * limits["errors_ppm"] / 1e6:
        observed.append(f"{wrong} errors in {packets} packets" + (f" ({errors[2]} CRC)" if errors[2] else ""))
    if down >= limits["carrier_losses"]:
        observed.append(f"lost its carrier {down} times since start")
    return f"{name}: {' and '.join(observed)}" if observed else ""
