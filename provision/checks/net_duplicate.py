"""net.duplicate: Whether every node is a separate machine with its own name and addresses.

/proc/sys/kernel/random/boot_id differs between any two running kernels; /etc/machine-id between any two installations
(machine-id(5)): clones of one disk image share it, and DHCP servers may give them the same address.
"""

from provision.checks.kit import Answers, Judgements, fail, ok, unknown, warn
from provision.checks.kit.network import facts, read, table

TITLE = "every node is a separate machine with its own name and addresses"
WHY = (
    "Two nodes with one address take each other's connections away; NCCL takes equal host names for one machine and "
    "looks for the other's GPUs there."
)

_WHAT = {
    "boot": "is the same running machine as {}",
    "address": "has the address {value} in the inventory, as {} has",
    "mac": "has a network card with the address {value}, as {} has",
    "host": "has the host name {value}, as {} has",
    "machine": "has the machine id of {}",
}
_FIX = {
    "boot": "correct the address of one of them in the inventory",
    "address": "correct the address of one of them in the inventory",
    "mac": "give one of them another MAC address: in the hypervisor, or the card's driver",
    "host": "hostnamectl set-hostname NAME on one of them",
    "machine": "rm /etc/machine-id; systemd-machine-id-setup, on one of them, and restart it",
}


probe = facts


def judge(answers: Answers) -> Judgements:
    """FAIL where two nodes share what only one machine has; WARN for a shared machine id alone."""
    owners: dict[tuple[str, str], list[str]] = {}
    for name, answer in answers.items():
        net = read(answer)
        found = {word: sorted(table(answer, word)) for word in ("boot", "machine", "host", "mac")}
        marks = [(word, value) for word in ("machine", "host", "mac") for value in found[word]]
        # The boot id alone is the kernel's: containers of one machine share it, and to NCCL are several all the same.
        marks += [("boot", f"{boot} {host}") for boot in found["boot"] for host in found["host"]]
        if net and net.own:
            marks.append(("address", str(net.own)))
        for mark in marks:
            owners.setdefault(mark, []).append(name)
    for name, answer in answers.items():
        shared = [(mark, [each for each in names if each != name]) for mark, names in owners.items() if name in names]
        hits = sorted(
            ((mark, others) for mark, others in shared if others), key=lambda hit: list(_WHAT).index(hit[0][0])
        )
        if not hits:
            if host := next(iter(table(answer, "host")), ""):
                yield name, ok(f"{host} is the only one of its name, and so are its addresses")
            else:
                yield name, unknown(f"its host name is not known: {answer.err or 'no answer'}")
            continue
        (kind, value), others = hits[0]
        observed = _WHAT[kind].format(", ".join(others), value=value)
        yield name, (warn if kind == "machine" else fail)(observed, fix=_FIX[kind])
