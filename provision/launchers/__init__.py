"""Launchers: pure functions from a ``RunSpec`` to one plan for each node. One file a launcher; its name is the file's.

Here is what they share: refusing nodes that would make the run hang, and the environment of the processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from provision.errors import PreflightError
from provision.model import Notice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from provision.run import RunSpec, Worker

RANKS = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")  # no user may set these
UNSET = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "LD_PRELOAD", "LD_LIBRARY_PATH")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LOCAL_BRIDGES = ("docker", "virbr", "br-", "cni", "lxcbr", "podman")  # they lead to containers, not to nodes


def refuse(spec: RunSpec) -> None:
    """Refuse a run that could only hang.

    Raises:
        PreflightError: nodes that cannot take part, each with its reason.
    """
    reasons: dict[str, str] = {}
    machines: dict[tuple[str, str | None], str] = {}
    for worker in spec.workers:
        name, facts = worker.node.name, worker.facts
        if facts.port_free is False:
            reasons[name] = f"{facts.error}; without train.port in the inventory a free one is found"
        elif facts.error:
            reasons[name] = facts.error
        elif len(spec.workers) > 1 and facts.interface == "lo":
            reasons[name] = (
                f"{spec.master} means {facts.master_ip} there, an address no other node can reach; "
                f"give rank 0 an address on the network, or correct /etc/hosts"
            )
        elif (twin := machines.setdefault((facts.boot_id, facts.ip), name)) != name and facts.boot_id:
            reasons[name] = f"is the same machine as {twin}"
    if reasons:
        raise PreflightError("nodes that cannot take part in the run; nothing was started", reasons=reasons)


def infiniband(spec: RunSpec) -> tuple[bool, Notice | None]:
    """Whether NCCL may use InfiniBand or RoCE: only when every node has an active port."""
    active = [any(port.get("state") == "ACTIVE" for port in worker.facts.infiniband) for worker in spec.workers]
    if all(active) or len(spec.workers) == 1 or not any(worker.facts.gpus for worker in spec.workers):
        return all(active), None
    interfaces = ", ".join(dict.fromkeys(str(worker.facts.interface) for worker in spec.workers))
    if not any(worker.facts.infiniband for worker in spec.workers):
        return False, Notice(f"no node has InfiniBand: NCCL uses TCP over {interfaces}")
    without = [worker.node.name for worker, has in zip(spec.workers, active, strict=True) if not has]
    text = f"no active InfiniBand port on {', '.join(without)}: NCCL uses TCP over {interfaces} on all nodes"
    return False, Notice(text, "warning")


def notices(spec: RunSpec) -> tuple[Notice, ...]:
    """What the user should know before the run starts."""
    found = []
    _, about = infiniband(spec)
    if about and "NCCL_IB_DISABLE" not in spec.env:
        found.append(about)
    for worker in spec.workers:
        interface = worker.facts.interface or ""
        if len(spec.workers) > 1 and interface.startswith(_LOCAL_BRIDGES):
            text = f"{worker.node.name} reaches rank 0 through {interface}, which looks like a bridge for containers"
            found.append(Notice(text, "warning"))
    if ignored := [name for name in RANKS if name in spec.env]:
        found.append(Notice(f"ignored from the environment you gave: {', '.join(ignored)}", "warning"))
    counts = {worker.processes for worker in spec.workers}
    if len(counts) > 1:
        each = ", ".join(f"{worker.node.name} {worker.processes}" for worker in spec.workers)
        found.append(Notice(f"the nodes start different numbers of processes: {each}", "warning"))
    return tuple(found)


def caches(spec: RunSpec, worker: Worker) -> tuple[str, str]:
    """Two folders on the node's own disk, of this user and of this release: NFS hangs on the locks of such caches."""
    user = f"/tmp/clusterctl-{worker.facts.uid}"  # noqa: S108 - the agent refuses it when somebody else has made it
    return user, f"{user}/{spec.prefix.name}"


def environment(spec: RunSpec, rank: int, defaults: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of the processes of one node. What the user gave wins over all but the ranks.

    Args:
        spec: the run.
        rank: the node's.
        defaults: a launcher's own.
    """
    worker = spec.workers[rank]
    with_infiniband, _ = infiniband(spec)
    _, cache = caches(spec, worker)
    interface = worker.facts.interface or ""
    env = {
        "PATH": f"{spec.prefix}/bin:{SYSTEM_PATH}",
        "LANG": "C.UTF-8",
        "PYTHONNOUSERSITE": "1",
        "PYTHONSAFEPATH": "1",  # a file named datasets.py beside the config must not be imported
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash in C++ says where every thread was
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "HF_HOME": f"{spec.folder}/cache/node{rank}",  # holds the tokenized data; /tmp may be memory
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "TORCH_EXTENSIONS_DIR": f"{cache}/torch_extensions",
        "OMP_NUM_THREADS": str(max(1, worker.facts.cpus // worker.processes)),
        "NCCL_SOCKET_IFNAME": f"={interface}",  # =: this very name, not what begins with it
        "GLOO_SOCKET_IFNAME": interface,
        **({} if with_infiniband else {"NCCL_IB_DISABLE": "1"}),
        **(defaults or {}),
        **spec.env,
        "NNODES": str(len(spec.workers)),
        "NODE_RANK": str(rank),
        "NPROC_PER_NODE": str(worker.processes),
        "MASTER_ADDR": spec.master,
        "MASTER_PORT": str(spec.port),
        "CLUSTERCTL_RUN": spec.id,
        "CLUSTERCTL_NODE": worker.node.name,
    }
    return dict(sorted(env.items()))
