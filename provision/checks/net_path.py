"""net.path: Whether packets of the full MTU reach the other nodes unbroken.

``ping -M do`` forbids fragments; -s is the packet's size without 20 bytes of IPv4 and 8 of ICMP header (ping(8)).
"""

import re

from provision.checks.kit import Answer, Judgement, Plan, fail, ok, unknown
from provision.checks.kit.measures import partners
from provision.checks.kit.network import RESOLVE
from provision.env.text import number
from provision.model import Node
from provision.render import words

LEVEL = 1
TOOL = "ping"
TITLE = "packets of the full MTU reach the other nodes"
WHY = "Small messages pass and large ones vanish: the rendezvous succeeds, and the first tensor hangs for ever."
TIMEOUT = 20.0


def probe(plan: Plan, node: Node) -> str:
    """Pings partners with the MTU of the interface that leads to them: ``path ADDRESS DEVICE MTU RC``, ping's words."""
    return f"""\
command -v ip >/dev/null 2>&1 || {{ echo "no ip"; exit 0; }}
{RESOLVE}
cc_ping() {{
  cc_address=$(cc_resolve "$1")
  cc_device=$(ip -o route get "$cc_address" 2>/dev/null | sed 's/.* dev \\([^ ]*\\).*/\\1/')
  cc_mtu=0
  {{ IFS= read -r cc_mtu <"/sys/class/net/$cc_device/mtu"; }} 2>/dev/null
  case $cc_address in *:*) cc_head=48 ;; *) cc_head=28 ;; esac
  cc_said=$(ping -n -q -M "do" -s "$((cc_mtu - cc_head))" -c 3 -i 0.3 -W 2 "$cc_address" 2>&1)
  echo "path $1 ${{cc_device:--}} $cc_mtu $? $(echo "$cc_said" | tr '\\n' ' ')"
}}
for cc_peer in {words(partners(plan.nodes, node))}; do cc_ping "$cc_peer" & done
wait
echo end
"""


def judge(plan: Plan, node: str, answer: Answer) -> Judgement:
    """FAIL where packets of that size are lost; UNKNOWN where ping cannot send them (busybox has no -M)."""
    names = {node.train_address: node.name for node in plan.nodes}
    found = [match for line in answer.lines if (match := re.match(r"path (\S+) (\S+) (\d+) (\d+) ?(.*)", line))]
    failures = [match for match in found if match[4] != "0"]
    unable = [match for match in failures if not re.search(r"packet loss|too long|unreachable", match[5])]
    if "no ip" in answer.lines:
        return unknown("ip is not installed", fix=f"install iproute2 on {node}")
    if unable:
        return unknown(f"ping: {unable[0][5][:120]}", fix=f"install iputils-ping on {node}")
    if failures:
        others = [names.get(match[1], match[1]) for match in failures]
        observed = f"packets of {failures[0][3]} bytes over {failures[0][2]} do not reach {', '.join(others)}"
        fix = f"ip link set {failures[0][2]} mtu 1500, or jumbo frames on every switch port between them"
        return fail(observed, fix=fix)
    if not found and ("end" not in answer.lines or len(plan.nodes) > 1):
        return unknown(f"ping was not run: {answer.err or 'it printed nothing'}")
    return ok(f"{found[0][3]} bytes reach {number(len(found), 'node')}" if found else "the only node")
