"""net.proxy: Whether no proxy stands between programs and the nodes.

Read from the environment of a session like the training's. curl, pip, requests and gRPC honour these variables
(curl(1), ENVIRONMENT; gRPC, environment_variables.md).
"""

from ipaddress import ip_network

from provision.checks.kit import Answer, Judgement, Plan, ok, unknown, warn
from provision.checks.kit.network import as_address

TITLE = "no proxy is set, or no_proxy names every node"
WHY = "Requests between nodes, and hub libraries that look for a model, wait for a proxy that is not there."
PROBE = """\
for cc_name in http_proxy https_proxy all_proxy no_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY; do
  eval "cc_value=\\${$cc_name-}"
  [ -z "$cc_value" ] || echo "$cc_name=$cc_value"
done
echo end
"""


def judge(plan: Plan, answer: Answer) -> Judgement:
    """WARN where a proxy is set that a node's address would go through."""
    given = dict(line.split("=", 1) for line in answer.lines if "=" in line)
    proxies = {key: value for key, value in given.items() if not key.lower().startswith("no_")}
    if "end" not in answer.lines:
        return unknown(f"its environment was not read to the end: {answer.err or 'no answer'}")
    if not proxies:
        return ok("no proxy is set")
    spared = ",".join(value for key, value in given.items() if key.lower() == "no_proxy").split(",")
    addresses = (each for node in plan.nodes for each in (node.address, node.train_address))
    open_to = next((each for each in addresses if not any(_covers(entry.strip(), each) for entry in spared)), None)
    if open_to is None:
        return ok("a proxy is set, not for the nodes")
    key, value = next(iter(proxies.items()))
    observed = f"{key}={_without_password(value)}, and no_proxy does not name {open_to}"
    fix = f"unset {key} for the training user (/etc/environment), or add the nodes to no_proxy"
    return warn(observed, fix=fix)


def _covers(entry: str, address: str) -> bool:
    """Whether an entry of no_proxy means an address: a name, a domain, an address or a network, or ``*``."""
    bare = entry.removeprefix("*").removeprefix(".")
    ip = as_address(address)
    if entry in {"*", address}:
        return True
    if ip is None:
        return bool(bare) and address.endswith(f".{bare}")
    try:
        return ip in ip_network(entry, strict=False)
    except ValueError:
        return False


def _without_password(url: str) -> str:
    before, at, host = url.rpartition("@")
    return f"{before.partition('://')[0]}://***@{host}" if at else url
