"""net.backlog: Whether rank 0 can take the connections of all ranks at once.

net.core.somaxconn bounds how many connections wait to be accepted: 4096 since Linux 5.4, 128 before (listen(2)).
"""

from provision.checks.kit import Answers, Judgements, Plan, ok, unknown, warn

TITLE = "enough room for connections that come at the same moment"
WHY = "All ranks connect to rank 0 at once; what finds no room is tried again after seconds, or refused."
PROBE = "cat /proc/sys/net/core/somaxconn /proc/sys/net/ipv4/tcp_max_syn_backlog"
# somaxconn was 128 and tcp_max_syn_backlog is at least 128 by default: more than the ranks of 16 nodes are more.
LIMITS = {"waiting": 128, "waiting_per_node": 16}


def judge(seen: Plan, answers: Answers) -> Judgements:
    """WARN where less than 16 connections a node, and at least ``waiting``, can wait."""
    need = max(seen.limits["waiting"], seen.limits["waiting_per_node"] * len(seen.nodes))
    for name, answer in answers.items():
        if len(answer.lines) != 2 or not all(line.isdecimal() for line in answer.lines):
            yield name, unknown("net.core.somaxconn cannot be read")
            continue
        waiting, half = (int(line) for line in answer.lines)
        if min(waiting, half) < need:
            low = "net.core.somaxconn" if waiting <= half else "net.ipv4.tcp_max_syn_backlog"
            fix = f"sysctl -w {low}=4096, and in /etc/sysctl.d"
            yield name, warn(f"{low} is {min(waiting, half)}", expected=f"at least {need:g}", fix=fix)
        else:
            yield name, ok(f"somaxconn {waiting}, tcp_max_syn_backlog {half}")
