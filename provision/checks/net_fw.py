"""net.fw: Whether a firewall runs that may stand between nodes: what is so, net.master and net.ephemeral find out.

firewalld, and ufw when /etc/ufw/ufw.conf says ENABLED=yes; other rules are read with ``nft``, as root: of chains with
the hook input or output, and those that they jump to, a ``drop`` or ``reject`` counts (nft(8)).
"""

import re
from collections.abc import Mapping

from provision.checks.kit import Answer, Judgement, ok, unknown, warn

ROOT = True
TITLE = "no firewall between the nodes"
WHY = "NCCL and Gloo listen on random ports: where a firewall drops them, ranks wait until a timeout of many minutes."
# Comparing names of processes needs neither systemd nor root. comm holds 15 characters of a name (proc(5)).
PROBE = """\
for cc_path in /proc/[0-9]*/comm; do
  { IFS= read -r cc_name <"$cc_path"; } 2>/dev/null || continue
  [ "$cc_name" != firewalld ] || echo "service firewalld"
done
if [ -r /etc/ufw/ufw.conf ] && grep -q '^ENABLED=yes' /etc/ufw/ufw.conf; then echo "service ufw"; fi
if ! command -v nft >/dev/null 2>&1 && ! [ -x /usr/sbin/nft ]; then
  # Without nft there may still be rules of iptables-legacy: then the kernel lists its tables.
  if [ -r /proc/net/ip_tables_names ]; then sed 's/^/legacy /' /proc/net/ip_tables_names; fi
  echo "rules none"
elif [ "$(id -u)" -ne 0 ]; then echo "rules hidden"
elif cc_rules=$(PATH=$PATH:/usr/sbin nft list ruleset 2>/dev/null); then echo "rules follow"; printf '%s\\n' "$cc_rules"
else echo "rules hidden"
fi
"""

_FIX = "trust the training network: firewall-cmd --zone=trusted --add-source=SUBNET; ufw allow from SUBNET; or nft"


def judge(answer: Answer) -> Judgement:
    """WARN where a firewall runs or rules drop something; UNKNOWN where rules cannot be read."""
    services = list(dict.fromkeys(line.split()[1] for line in answer.lines if line.startswith("service ")))
    legacy = [line.split()[1] for line in answer.lines if line.startswith("legacy ")]
    chains = dropping(answer.out)
    if services:
        return warn(f"{' and '.join(services)} runs", fix=_FIX)
    if chains:
        return warn(f"nft rules drop or reject in {', '.join(chains)}", fix=_FIX)
    if legacy:
        observed = f"iptables has the tables {', '.join(legacy)}, and nft is not there to read them"
        return unknown(observed, fix="iptables-legacy -S")
    if "rules hidden" in answer.lines:
        return unknown("neither firewalld nor ufw runs; the kernel's rules can only be read as root")
    if not any(line.startswith("rules ") for line in answer.lines):
        return unknown("no answer about its rules")
    return ok("neither firewalld, ufw nor rules that drop what comes in")


def dropping(ruleset: str) -> tuple[str, ...]:
    """The chains of input or output in which packets may end, as ``TABLE CHAIN``."""
    chains: dict[tuple[str, str], list[str]] = {}
    table, chain = "", ""
    for line in ruleset.splitlines():
        text = line.strip()
        if match := re.match(r"table (\S+ \S+) \{", text):
            table = match[1]
        elif match := re.match(r"chain (\S+) \{", text):
            chain = match[1]
            chains[table, chain] = []
        elif text == "}":
            chain = ""
        elif chain:
            chains[table, chain].append(text)
    found = []
    for (table, base), rules in chains.items():
        if any(re.search(r"\bhook (input|output)\b", rule) for rule in rules):
            reached = _reachable_chains(chains, table, base)
            if any(re.search(r"\b(drop|reject)\b", rule) for each in reached for rule in chains[table, each]):
                found.append(f"{table} {base}")
    return tuple(found)


def _reachable_chains(chains: Mapping[tuple[str, str], list[str]], table: str, base: str) -> tuple[str, ...]:
    waiting, visited = [base], dict[str, None]()
    while waiting:
        chain = waiting.pop()
        if chain not in visited and (table, chain) in chains:
            visited[chain] = None
            jumps = (re.search(r"\b(?:jump|goto) (\S+)", rule) for rule in chains[table, chain])
            waiting += [jump[1] for jump in jumps if jump]
    return tuple(visited)
