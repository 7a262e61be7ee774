"""The ranks do not find each other: ports, addresses, rendezvous, Gloo."""

from __future__ import annotations

from provision.diagnosis.cause import Cause

_REACH = "clusterctl check --level 1 (net.master, net.fw, net.mtu) tries every pair of nodes"

CAUSES = (
    Cause(
        id="port.taken",
        says="MASTER_PORT[ {port}] is in use",
        fix=(
            "without train.port in the inventory a free port is found for every run",
            "see who holds it: ss -ltnp 'sport = :{port}'; an earlier run: clusterctl stop RUN",
            "by hand: another MASTER_PORT, the same on every node",
        ),
        source="recorded (torch 2.13, a port that another process holds)",
        lines=(
            r"EADDRINUSE.*?port: (?P<port>\d+)",
            r"port: (?P<port>\d+).*?EADDRINUSE",
            r"failed to (?:bind to|listen on) \S*?:(?P<port>\d+) \(errno: 98",
            r"EADDRINUSE",
            r"ddress already in use",
        ),
    ),
    Cause(
        id="master.name",
        says="the name [{host} ]of rank 0 cannot be resolved here",
        fix=(
            "services: hosts: in the inventory writes every node's name into /etc/hosts of every node",
            "or MASTER_ADDR as an IP address; clusterctl check (net.dns)",
        ),
        source="recorded (torch 2.13, MASTER_ADDR=no-such-host.invalid)",
        lines=(
            r"network addresses of \((?P<host>[^,]+), \d+\) cannot be retrieved",
            r"gai error: -\d+ - (?:Name or service not known|Temporary failure in name resolution|No address)",
            r"getaddrinfo.*(?:Name or service not known|Temporary failure in name resolution)",
        ),
    ),
    Cause(
        id="rendezvous.missing",
        says="only {joined} of {wanted} came to the meeting[ within {seconds} s]",
        fix=(
            "a node did not start, started late, or two have the same rank (NODE_RANK): each needs its own, from 0",
            "clusterctl train gives every node its rank and starts them together",
            _REACH,
        ),
        source="https://github.com/pytorch/pytorch/blob/main/test/distributed/test_store.py",
        lines=(
            r"Timed out after (?P<seconds>\d+) seconds waiting for clients\. (?P<joined>\d+)/(?P<wanted>\d+) clients",
        ),
        grade="late",
    ),
    Cause(
        id="rendezvous.timeout",
        says="the nodes did not all come to the meeting in time (rendezvous)",
        fix=(
            "the same nnodes, endpoint and id on every node, and every node started within the time limit",
            "two nodes with one NODE_RANK look the same: each needs its own, from 0",
            _REACH,
        ),
        source="https://github.com/ymcui/Chinese-LLaMA-Alpaca-2/issues/274",
        lines=(r"RendezvousTimeoutError",),
        events=({"event": "end", "why": r"(?i)(?:has|have) not come|did not come"},),
        grade="late",
    ),
    Cause(
        id="master.unreachable",
        says="no answer from rank 0[ at {host}, port {port}][ within {waited}]",
        fix=(
            "rank 0's own log comes first: where it failed or never started, that is the cause",
            (
                "MASTER_ADDR and MASTER_PORT must be rank 0's, reachable from here (nc -vz ADDRESS "
                "PORT), and the same on "
                "every node; two nodes with NODE_RANK=1 leave nobody to answer"
            ),
            _REACH,
        ),
        source="recorded (torch 2.13, MASTER_ADDR where nobody listens)",
        lines=(
            (
                r"client socket has timed out after (?P<waited>\d+m?s) while trying to connect to "
                r"\(?(?P<host>[^,\s]+), (?P<port>\d+)\)"
            ),
            (
                r"client socket has failed to connect to (?:any network address of )?\(?\[?(?P<host>[^,\]\s]+)\]?"
                r"(?:, |:)(?P<port>\d+)"
            ),
            r"RendezvousConnectionError",
            r"connection to the C10d store has failed",
            r"TCP client failed to connect",
        ),
        grade="late",
    ),
    Cause(
        id="gloo.mesh",
        says="Gloo could not connect all ranks with each other",
        fix=(
            (
                "each node must be known by an address the others reach: in /etc/hosts its name must not "
                "mean 127.0.0.1 or "
                "127.0.1.1 (services: hosts:; clusterctl check: net.hostname)"
            ),
            "GLOO_SOCKET_IFNAME must be the interface of the common network; clusterctl train sets it on every node",
            _REACH,
        ),
        source="https://github.com/sgl-project/sglang/issues/3226",
        lines=(
            r"Gloo connectFullMesh failed",
            r"gloo/transport/tcp/\S+\] (?:SO_ERROR|connect) .*(?:Connection refused|No route to host|timed out)",
        ),
        grade="late",
    ),
    Cause(
        id="gloo.interface",
        says="Gloo finds no interface[ {interface}]",
        fix=(
            (
                "GLOO_SOCKET_IFNAME names one that this node does not have: see ip -br addr; names may "
                "differ between nodes"
            ),
            "clusterctl train sets it on every node: take it out of train.env",
        ),
        source="recorded (torch 2.13, GLOO_SOCKET_IFNAME=nosuch0)",
        lines=(r"Unable to find (?:address for|interface)(?:[ :]+(?P<interface>\S+))?", r"rp != nullptr"),
    ),
    Cause(
        id="gloo.timeout",
        says="waited[ {waited} ms] for another rank, which did not come (Gloo)",
        fix=(
            "find the rank that did not come: one that hangs or is stopped (clusterctl logs RUN --rank N)",
            "slow work on one rank alone while others wait: ddp_timeout (seconds) in the configuration is the limit",
        ),
        source="recorded (torch 2.13, one rank sleeps)",
        lines=(
            r"Timed out waiting (?P<waited>\d+)ms for (?:recv|send) operation to complete",
            r"Application timeout caused pair closure",
        ),
        grade="late",
    ),
    Cause(
        id="command.missing",
        says="the command could not be started: {why}",
        fix=(
            "clusterctl verify looks at the release on every node, clusterctl deploy brings it again",
            "a script is to be given as a path that travels with the run, or as an absolute one that is on every node",
        ),
        source="trainer/agent/supervisor/attempt.py",
        events=({"event": "exit", "error": r"(?P<why>.+)"},),
    ),
)
