"""The ranks do not find each other: ports, addresses, rendezvous, Gloo."""

from __future__ import annotations

from provision.diagnosis.cause import Cause

SUBJECT = "The ranks do not find each other"
ORDER = 50

_LEFT = r"in num_nodes_waiting|in _exit_barrier|_state_holder\.sync\(\)"
_REACH = "clusterctl check --level 1 (net.master, net.fw, net.mtu) tries every pair of nodes"

_LAUNCHERS = r"(?:torchrun|accelerate|deepspeed|llamafactory-cli|mpirun|srun|swift)"

CAUSES = (
    Cause(
        id="port.taken",
        says="MASTER_PORT[ {port}] is in use",
        fix=(
            "remove train.port from the inventory, so that every run uses a free port",
            "find the process: ss -ltnp 'sport = :{port}'; if it is an earlier run: clusterctl stop RUN",
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
            "services: hosts: in the inventory adds all nodes' names to /etc/hosts on every node",
            "or give MASTER_ADDR as an IP address; clusterctl check (net.dns)",
        ),
        source="recorded (torch 2.13, MASTER_ADDR=no-such-host.invalid)",
        lines=(
            r"network addresses of \((?P<host>[^,]+), \d+\) cannot be retrieved",
            r"gai error: -\d+ - (?:Name or service not known|Temporary failure in name resolution|No address)",
            r"getaddrinfo.*(?:Name or service not known|Temporary failure in name resolution)",
        ),
    ),
    Cause(
        id="rendezvous.ranks",
        says="the nodes met, but waited for another node's ranks until the time-out",
        fix=(
            (
                "two nodes have the same rank: each needs its own NODE_RANK, from 0 (torchrun's --node_rank; with "
                "LLaMA-Factory NODE_RANK, not RANK)"
            ),
            "nnodes must be the number of nodes that were started",
            "clusterctl train gives every node its rank and starts them together",
        ),
        source="https://github.com/hiyouga/LlamaFactory/issues/6015",
        lines=(r"DistStoreError: ", r"RuntimeError: Socket Timeout"),
        context=r"in _assign_worker_ranks|in _share_and_gather|in _rendezvous\b",
        traced=((r"DistStoreError: Socket Timeout", r"torch[./]distributed[./]run\b"),),  # torchrun's own error
        grade="late",
    ),
    Cause(
        id="rendezvous.lost",
        says="the node that held the rendezvous left it while this node was running",
        fix=(
            "it is rank 0's node, or the one of the endpoint: its log says why it ended (clusterctl logs RUN)",
            "two jobs on one node need two endpoints: another --rdzv-endpoint, or --standalone",
            (
                "torchrun's agents wait for one another at the end, unless one is killed: clusterctl "
                "train starts without it"
            ),
        ),
        source="https://github.com/pytorch/pytorch/issues/69520",
        lines=(r"has failed to shutdown the rendezvous .* due to an error of type RendezvousConnectionError",),
        traced=(
            (r"RendezvousConnectionError", _LEFT),
            (r"^RuntimeError: (?:Connection reset by peer|Broken pipe|Socket Timeout)", _LEFT),
        ),
        grade="late",
    ),
    Cause(
        id="rendezvous.missing",
        says="only {joined} of {wanted} processes joined the rendezvous[ within {seconds} s]",
        fix=(
            "a node did not start, started late, or two have the same rank: each needs its own NODE_RANK, from 0",
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
        says="some nodes did not join the rendezvous in time",
        fix=(
            "use the same nnodes, endpoint and id on every node, and start every node within the time limit",
            "two nodes with the same NODE_RANK cause the same error: each needs its own, from 0",
            _REACH,
        ),
        source="https://github.com/ymcui/Chinese-LLaMA-Alpaca-2/issues/274",
        lines=(r"RendezvousTimeoutError",),
        events=({"event": "end", "why": r"(?i)(?:has|have) not come|did not come"},),
        grade="late",
    ),
    Cause(
        id="master.loopback",
        says="this node looks for rank 0 on itself[, at {host}]",
        fix=(
            "MASTER_ADDR must be rank 0's network address: not localhost, and no name that /etc/hosts gives 127.0.0.1",
            "services: hosts: in the inventory writes every node's name and address (clusterctl check: net.hostname)",
            "clusterctl train gives every node rank 0's address on the training network",
        ),
        source="https://github.com/pytorch/pytorch/issues/67547",
        lines=(
            (
                r"client socket has (?:timed out after \S+ while trying to connect to|failed to connect to)"
                r"(?: any network address of)? \(?\[?(?P<host>localhost|127\.\d+\.\d+\.\d+|::1|::ffff:127[\d.]+)[\],]"
            ),
        ),
        several=True,
        grade="late",
    ),
    Cause(
        id="master.unreachable",
        says="no answer from rank 0[ at {host}, port {port}][ within {waited}]",
        fix=(
            "look at rank 0's log first: if it failed or never started, that is the cause",
            (
                "MASTER_ADDR and MASTER_PORT must be rank 0's, reachable from this node (nc -vz ADDRESS PORT), and the "
                "same on every node; without a node with NODE_RANK=0 no process answers"
            ),
            _REACH,
        ),
        source="recorded (torch 2.13, MASTER_ADDR without a listener)",
        lines=(
            (
                r"client socket has timed out after (?P<waited>\d+m?s) while trying to connect to "
                r"\(?(?P<host>[^,\s]+), (?P<port>\d+)\)"
            ),
            (
                r"client socket has failed to connect to (?:any network address of )?\(?\[?(?P<host>[^,\]\s]+)\]?"
                r"(?:, |:)(?P<port>\d+)"
            ),
            r"connect\(\) timed out\. Original timeout was (?P<waited>\d+ ms)",
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
                "each node's name must resolve to an address that the others reach, not to 127.0.0.1 or 127.0.1.1 in "
                "/etc/hosts (services: hosts:; clusterctl check: net.hostname)"
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
        says="Gloo found no interface[ {interface}]",
        fix=(
            (
                "GLOO_SOCKET_IFNAME names an interface that this node lacks: see ip -br addr; names may differ between "
                "nodes"
            ),
            "clusterctl train sets it on every node: remove it from train.env",
        ),
        source="recorded (torch 2.13, GLOO_SOCKET_IFNAME=nosuch0)",
        lines=(r"Unable to find (?:address for|interface)(?:[ :]+(?P<interface>\S+))?", r"rp != nullptr"),
    ),
    Cause(
        id="gloo.timeout",
        says="waited[ {waited} ms] for another rank, which did not arrive (Gloo)",
        fix=(
            "find the rank that did not arrive: one that hangs or is suspended (clusterctl logs RUN --rank N)",
            "if one rank does slow work while others wait: ddp_timeout (seconds) in the configuration is the limit",
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
            "clusterctl verify checks the release on every node, clusterctl deploy repairs it",
            "give a script as a relative path, which is sent with the run, or as an absolute path on every node",
            "by hand: activate the environment; sudo resets PATH",
        ),
        source="trainer/agent/supervisor/attempt.py",
        lines=(
            rf"sh: (?:line )?(?:\d+: )?(?P<why>{_LAUNCHERS}: (?:command )?not found)",
            rf"(?P<why>No such file or directory: '(?:\S*/)?{_LAUNCHERS}')",
        ),
        events=({"event": "exit", "error": r"(?P<why>.+)"},),
    ),
)
