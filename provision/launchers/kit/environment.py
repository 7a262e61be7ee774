"""The environment of a run's processes. ``docs/launchers.md`` has a line for every variable."""

from __future__ import annotations

from collections.abc import Mapping

from provision.launchers.kit.network import variables
from provision.run import RunSpec, Worker
from provision.run.code import HOOKS

# No user may set these: they are what clusterctl is for.
RANKS = (
    *("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
)
UNSET = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "LD_PRELOAD", "LD_LIBRARY_PATH")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NCCL_DEBUG = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")


def caches(spec: RunSpec, worker: Worker) -> tuple[str, str]:
    """Two folders on the node's own disk, of this user and of this release: NFS hangs on the locks of such caches."""
    user = f"/tmp/clusterctl-{worker.facts.uid}"  # noqa: S108 - the agent refuses it when somebody else has made it
    return user, f"{user}/{spec.prefix.name}"


def logs(spec: RunSpec, rank: int) -> str:
    """A node's own folder of the run."""
    return f"{spec.folder}/logs/node{rank}"


def environment(spec: RunSpec, rank: int, defaults: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of the processes of one node. What the user gave wins over all but the ranks.

    Args:
        spec: the run.
        rank: the node's.
        defaults: a launcher's own.
    """
    worker = spec.workers[rank]
    user = {name: value for name, value in spec.user_env.items() if name not in RANKS}
    env = {
        **_python(spec),
        **_offline(spec, rank),
        **_caches(spec, worker, rank),
        **_network(spec, rank),
        **(_debugging(spec, rank, user) if worker.has_gpus else {}),
        "OMP_NUM_THREADS": str(max(1, worker.facts.cpus // worker.processes)),
        **(defaults or {}),
        **user,
        **({} if worker.devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(worker.devices)}),
        "NNODES": str(len(spec.workers)),
        "NODE_RANK": str(rank),
        "NPROC_PER_NODE": str(worker.processes),
        "MASTER_ADDR": spec.master,
        "MASTER_PORT": str(spec.port),
        "CLUSTERCTL_RUN": spec.id,
        "CLUSTERCTL_NODE": worker.node.name,
    }
    if not worker.has_gpus or spec.settings.get(
        "enable_jit_checkpoint"
    ):  # behind the user's own, which Python then reads first
        env["PYTHONPATH"] = ":".join(filter(None, (f"{spec.folder}/{HOOKS}", env.get("PYTHONPATH"))))
    return dict(sorted(env.items()))


def _python(spec: RunSpec) -> dict[str, str]:
    env = {
        "PATH": f"{spec.prefix}/bin:{SYSTEM_PATH}",
        "LANG": "C.UTF-8",
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash in C++ says where every thread was
    }
    if spec.job.kind == "config":
        env["PYTHONSAFEPATH"] = "1"  # a file named datasets.py beside the config must not be imported
    return env


def _offline(spec: RunSpec, rank: int) -> dict[str, str]:
    return {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "WANDB_DIR": logs(spec, rank),
        "WANDB_NAME": spec.id,
        # transformers 5 reads this only, and no longer the config's logging_dir
        "TENSORBOARD_LOGGING_DIR": str(spec.settings.get("logging_dir") or f"{logs(spec, rank)}/tensorboard"),
    }


def _caches(spec: RunSpec, worker: Worker, rank: int) -> dict[str, str]:
    _, cache = caches(spec, worker)
    return {
        "HF_HOME": f"{spec.folder}/cache/node{rank}",  # holds the tokenized data; /tmp may be memory
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "TORCH_EXTENSIONS_DIR": f"{cache}/torch_extensions",
    }


def _network(spec: RunSpec, rank: int) -> dict[str, str]:
    interface = spec.workers[rank].facts.interface or ""
    return {
        "NCCL_SOCKET_IFNAME": f"={interface}",  # =: this very name, not what begins with it
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        **variables(spec, rank),
    }


def _debugging(spec: RunSpec, rank: int, user: Mapping[str, str]) -> dict[str, str]:
    """NCCL's own log, which tells the network that was really used, and torch's record of the last collectives."""
    env = {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # without it there is nothing to dump before torch 2.6
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{logs(spec, rank)}/nccl_trace_rank_",
    }
    if not any(name in user for name in _NCCL_DEBUG):  # whoever asks for NCCL's log wants it where it comes by itself
        env |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET",
            "NCCL_DEBUG_FILE": f"{logs(spec, rank)}/nccl-%p.log",
        }
    return env
