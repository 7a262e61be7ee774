"""net.dns: Whether every node means the same address by a node's name."""

from collections.abc import Mapping
from functools import lru_cache

from provision.checks.kit import Answers, Judgements, Plan, fail, groups, majority, ok, unknown, warn
from provision.checks.kit.network import as_address
from provision.inventory import fold
from provision.model import Node
from provision.render import words

TITLE = "nodes' names have the same address on every node"
WHY = "Nodes that look for rank 0 at different addresses never meet: the rendezvous times out after minutes."


@lru_cache(maxsize=1)  # the same for every node
def names(nodes: tuple[Node, ...]) -> str:
    """The nodes' names, and their addresses that are names, as words of sh."""
    every = [text for node in nodes for text in (node.name, node.address, node.data_address)]
    return words(dict.fromkeys(text for text in every if text and not as_address(text)))


def probe(plan: Plan) -> str:
    """Looks every name up: ``name NAME ADDRESS``, and ``-`` where it has none.

    One getent for all of them: its lines of type STREAM hold address and canonical name. Only where that is another
    name than the one that was asked for (an alias), names without an answer are asked for one by one.
    """
    every = names(plan.nodes)
    return f"""\
command -v getent >/dev/null 2>&1 || {{ echo "no getent"; exit 0; }}
set -- {every}
cc_known=' '
cc_alias=
while read -r cc_address cc_type cc_name; do
  case $cc_type:$cc_name in STREAM:?*) ;; *) continue ;; esac
  case " $* " in
    *" $cc_name "*) cc_known="$cc_known$cc_name $cc_address " ;;
    *) cc_alias=yes ;;
  esac
done <<CC_END
$([ $# -eq 0 ] || getent ahostsv4 "$@")
CC_END
for cc_name; do
  cc_address=
  case $cc_known in
    *" $cc_name "*)
      cc_address=${{cc_known#*" $cc_name "}}
      cc_address=${{cc_address%% *}} ;;
    *) [ -z "$cc_alias" ] || cc_address=$(getent ahostsv4 "$cc_name" | {{ read -r cc_first _; echo "$cc_first"; }}) ;;
  esac
  echo "name $cc_name ${{cc_address:--}}"
done
echo end
"""


def judge(plan: Plan, answers: Answers) -> Judgements:
    """FAIL where two addresses are meant, or one of the inventory's names is unknown; WARN for an unknown name."""
    known: dict[str, dict[str, str]] = {}
    for name, answer in answers.items():
        if "end" in answer.lines:
            parts = [line.split() for line in answer.lines if line.startswith("name ")]
            known[name] = {part[1]: part[2] for part in parts if len(part) == 3}
    wrong = _wrong(plan, known)
    for name, answer in answers.items():
        if name not in known:
            missing = "no getent" in answer.lines
            observed = "getent is not installed" if missing else "its names were not looked up to the end"
            yield name, unknown(observed, fix=f"install getent on {name}" if missing else "")
        elif name in wrong:
            fix = "services: hosts: {} in the inventory writes the same /etc/hosts everywhere; or correct it by hand"
            observed = "; ".join(text for _, text in wrong[name][:3])
            yield name, (fail if any(grave for grave, _ in wrong[name]) else warn)(observed, fix=fix)
        else:
            count = sum(address != "-" for address in known[name].values())
            yield name, ok(f"{count} of {len(known[name])} names have an address, the same as elsewhere")


def _describe(host: str, value: str, usual: str | None, values: Mapping[str, str]) -> str:
    mine = f"{host} is {value}" if value != "-" else f"{host} has no address"
    if usual is not None and value != usual:
        return f"{mine}, elsewhere {usual if usual != '-' else 'it has none'}"
    if usual is not None:
        return mine
    found = ", ".join(
        f"{address if address != '-' else 'none'} on {fold(on)}" for address, on in groups(values).items()
    )
    return f"{host}: {found}"


def _wrong(plan: Plan, known: Mapping[str, Mapping[str, str]]) -> dict[str, list[tuple[bool, str]]]:
    """By node: what it means that others do not, and whether that is grave."""
    cluster_hosts = {text for node in plan.nodes for text in (node.address, node.data_address)}
    wrong: dict[str, list[tuple[bool, str]]] = {}
    for host in dict.fromkeys(host for table in known.values() for host in table):
        values = {name: table.get(host, "-") for name, table in known.items()}
        if values.get(host, "").startswith("127."):
            del values[host]
        others = {name: value for name, value in values.items() if name != host}  # its own: net.hostname's business
        if host not in cluster_hosts and set(others.values()) <= {"-"}:
            continue
        usual = majority(values)
        for name, value in others.items():
            if value != usual or (host in cluster_hosts and value == "-"):
                grave = host in cluster_hosts or len(set(values.values()) - {"-"}) > 1
                wrong.setdefault(name, []).append((grave, _describe(host, value, usual, values)))
    return wrong
