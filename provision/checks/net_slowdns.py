"""net.slowdns: Whether names and addresses are looked up without a wait.

A name server that does not answer costs 5 s for each attempt (resolv.conf(5), timeout). Times are from /proc/uptime,
which every shell can read and which counts hundredths of a second.
"""

import re

from provision.checks.kit import Answer, Judgement, Plan, ok, unknown, warn
from provision.render import quote

TITLE = "names are looked up without a wait"
WHY = "Every login, every start of a rank and every download attempt waits for a name server that is not there."
TIMEOUT = 25.0  # seconds: two look-ups at a dead name server are to be measured, not given up
LIMITS = {"lookup_s": 0.2}  # a whole answer from a name server of the same site takes some milliseconds


def probe(plan: Plan) -> str:
    """How long the node's own name takes, and the way back from rank 0's address: ``took WHAT BEFORE AFTER``."""
    return f"""\
command -v getent >/dev/null 2>&1 || {{ echo "no getent"; exit 0; }}
cc_took() {{ # cc_took WHAT DATABASE KEY
  read -r cc_before _ </proc/uptime
  getent "$2" "$3" >/dev/null 2>&1
  read -r cc_after _ </proc/uptime
  echo "took $1 $cc_before $cc_after"
}}
cc_took "$(uname -n)" ahosts "$(uname -n)"
cc_took {quote(plan.nodes[0].address)} hosts {quote(plan.nodes[0].address)}
while read -r cc_word cc_server _; do
  [ "$cc_word" != nameserver ] || echo "server $cc_server"
done </etc/resolv.conf 2>/dev/null
exit 0
"""


def judge(plan: Plan, node: str, answer: Answer) -> Judgement:
    """WARN where a look-up takes longer than ``lookup_s``."""
    limit = plan.limits["lookup_s"]
    took = {
        match[1]: float(match[3]) - float(match[2])
        for line in answer.lines
        if (match := re.fullmatch(r"took (\S+) (\d+\.\d+) (\d+\.\d+)", line))
    }
    servers = [line.split()[1] for line in answer.lines if line.startswith("server ")]
    if not took:
        missing = "no getent" in answer.lines
        observed = "getent is not installed" if missing else "no times came back"
        return unknown(observed, fix=f"install getent on {node}" if missing else "")
    slowest = max(took, key=lambda key: took[key])
    if took[slowest] > limit:
        servers_text = f" (name servers: {', '.join(servers)})" if servers else ""
        observed = f"{slowest} takes {took[slowest]:.1f} s{servers_text}"
        fix = "take dead name servers out of /etc/resolv.conf, and write the nodes into /etc/hosts"
        return warn(observed, expected=f"at most {limit:g} s", fix=fix)
    return ok(f"{took[slowest]:.2f} s at most")
