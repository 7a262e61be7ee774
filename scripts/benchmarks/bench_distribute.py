"""Distributing an environment to all nodes at once, against common tools, to the same nodes over the same links."""

import shutil
from collections.abc import Callable

from bench_cluster import Cluster
from bench_context import Context
from bench_machine import ROOT
from bench_measure import BenchError, Done, progress, run
from bench_table import Measured, Missing, Outcome, quantity

UNPACK = "mkdir -p /opt/{0} && zstd -dc /opt/{0}.tar.zst | tar -xpf - -C /opt/{0}"


def distributing(context: Context) -> dict[str, Outcome]:
    """``distribute-*``: until the tree is unpacked on every node; only clusterctl relocates, verifies and tests it."""
    env = context.many
    bundle, archive = context.bundle(env), context.archive(env)
    found: dict[str, Outcome] = {}
    with context.cluster("distribute", context.peer_nodes, context.link) as cluster:
        with progress("distribute: clusterctl deploy") as report:
            ours = cluster.deploy(bundle, "ours")
            report(f"{ours.usage.wall:.1f} s, {quantity(ours.sent, 'bytes')} over the uplink")
        cluster.clear("ours")
        unpack = f'ssh -F "$F" "$node" "{UNPACK.format("peer")}"'
        peers: dict[str, Callable[[], Done]] = {
            "scp-r": lambda: cluster.on_each('scp -q -F "$F" -r "$1" "$node":/opt/peer', env.prefix),
            "scp": lambda: cluster.on_each(f'scp -q -F "$F" "$1" "$node":/opt/peer.tar.zst && {unpack}', archive),
            "rsync": lambda: _rsync(cluster, f"{env.prefix}/"),
            "tar": lambda: cluster.on_each(
                'tar -C "$1" -cf - . | ssh -F "$F" "$node" "mkdir /opt/peer && tar -xpf - -C /opt/peer"', env.prefix
            ),
            "clush": lambda: _clush(cluster, str(archive)),
        }
        for name, peer in peers.items():
            before = cluster.sent()
            try:
                with progress(f"distribute: {name}") as report:
                    done = peer()
                    sent = cluster.sent() - before
                    report(f"{done.usage.wall:.1f} s, {quantity(sent, 'bytes')} over the uplink")
            except BenchError as error:
                found[f"distribute-{name}"] = Missing(str(error))
            else:
                note = (
                    f"one run, {context.link}; over the uplink: ours {quantity(ours.sent, 'bytes')}, "
                    f"peer {quantity(sent, 'bytes')}"
                )
                raw = {
                    "ours": {"wall": ours.usage.wall, "sent": ours.sent},
                    "peer": {"wall": done.usage.wall, "sent": sent},
                }
                found[f"distribute-{name}"] = Measured(ours.usage.wall, done.usage.wall, note, raw)
            cluster.clear("peer", "peer.tar.zst")
    return found


def _rsync(cluster: Cluster, source: str) -> Done:
    if not shutil.which("rsync"):
        raise BenchError("rsync is not installed here: apt-get install rsync")
    return cluster.on_each('rsync -a -e "ssh -F $F" "$1" "$node":/opt/peer/', source)


def _clush(cluster: Cluster, archive: str) -> Done:
    nodes = ",".join(cluster.names)
    clush = [str(ROOT / ".venv/bin/clush"), "-S", "-q", "-f", "64", "-o", f"-F {cluster.ssh_config}", "-w", nodes]
    script = '"${@:2}" --copy "$1" --dest /opt/peer.tar.zst && "${@:2}" ' + f"'{UNPACK.format('peer')}'"
    return run(["bash", "-c", script, "bash", archive, *clush])
