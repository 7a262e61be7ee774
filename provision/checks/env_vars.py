"""env.vars: nothing on the node changes CUDA or NCCL behind the run's back.

A process of the run inherits the environment of a non-interactive session (/etc/environment, PAM), and NCCL reads
/etc/nccl.conf and ~/.nccl.conf ("Environment Variables" in its manual). What the inventory's ``train: env:`` sets wins.
"""

from collections.abc import Mapping

from provision.checks.kit import Answers, Judgements, Plan, fail, groups, majority, ok, unread, warn
from provision.inventory import fold

TITLE = "no variable of the node changes CUDA or NCCL"
PROBE = """\
env | grep -E '^(NCCL_[A-Z0-9_]*|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_LAUNCH_BLOCKING)='
for file in /etc/nccl.conf "${NCCL_CONF_FILE:-$HOME/.nccl.conf}"; do
    [ -r "$file" ] || continue
    while read -r line; do
        case $line in NCCL_*=*) echo "$line" ;; esac
    done <"$file"
done
echo looked
"""
WHY = "NCCL's settings must agree on all ranks, else it hangs; some of them make it many times slower."

# What may differ from node to node, is set by clusterctl itself, or is none of NCCL's (images have NCCL_VERSION).
_FREE = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_TOPO_FILE", "NCCL_VERSION")
_SLOW = {
    "NCCL_P2P_DISABLE": "GPUs exchange data through the host's memory",
    "NCCL_SHM_DISABLE": "processes of a node exchange data through the network",
    "NCCL_IB_DISABLE": "NCCL does not use InfiniBand",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before it",
}
_OFF = ("", "0")


def judge(seen: Plan, answers: Answers) -> Judgements:
    """FAIL where NCCL's settings differ, WARN for one that hides GPUs or makes NCCL slow."""
    found = {}
    for node, answer in answers.items():
        if "looked" not in answer.lines:
            yield node, unread(answer)
            continue
        given = dict(line.split("=", 1) for line in reversed(answer.lines) if "=" in line)  # the environment wins
        found[node] = {name: value for name, value in given.items() if name not in seen.inventory.train.env}
    shared = {node: _shared(given) for node, given in found.items()}
    usual = majority(shared)
    for node, given in found.items():
        fix = "set it for all nodes in the inventory (train: env:), and take it out of /etc/environment and nccl.conf"
        if usual is None or shared[node] != usual:
            other = usual if usual is not None else next(value for value in groups(shared) if value != shared[node])
            who = "the other nodes" if usual is not None else fold(groups(shared)[other])
            observed = f"{_text(shared[node])}; {who}: {_text(other)}"
            yield node, fail(observed, expected="the same on every node", fix=fix)
        elif bad := _bad(given):
            yield node, warn(bad, expected="not set", fix=fix)
        else:
            yield node, ok(_text(tuple(sorted(given.items()))))


def _shared(given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in given.items() if name[:5] == "NCCL_" and name not in _FREE))


def _text(pairs: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{name}={value}" for name, value in pairs) or "nothing set"


def _bad(given: Mapping[str, str]) -> str:
    found = [f"{name}={given[name]}: {means}" for name, means in _SLOW.items() if given.get(name, "") not in _OFF]
    if "CUDA_VISIBLE_DEVICES" in given:
        found.append(f"CUDA_VISIBLE_DEVICES={given['CUDA_VISIBLE_DEVICES']}: the other GPUs are hidden")
    if given.get("NCCL_NET", "").lower() == "socket":
        found.append("NCCL_NET=Socket: NCCL does not use InfiniBand")
    return "; ".join(found)
