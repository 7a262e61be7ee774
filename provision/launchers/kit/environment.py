"""The environment of a run's processes. ``docs/launchers.md`` has a line for every variable."""

from __future__ import annotations

from collections.abc import Mapping

from provision.launchers.kit.network import variables
from provision.run import RunSpec, Worker
from provision.run.code import HOOKS
from trainer.agent.contract.plan import INTERFACE, Plan

# The user cannot set these: clusterctl does.
RANKS = (
    *("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
)
UNSET = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "LD_PRELOAD", "LD_LIBRARY_PATH")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NCCL_DEBUG = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")


def caches(spec: RunSpec, worker: Worker) -> tuple[str, str]:
    """Cache folders of the user and of the release on the node's disk: NFS hangs on the locks of such caches."""
    user = f"/tmp/clusterctl-{worker.facts.uid}"  # noqa: S108 - the agent refuses it if another user created it
    return user, f"{user}/{spec.prefix.name}"


def logs(spec: RunSpec, rank: int) -> str:
    """A node's log folder of the run."""
    return f"{spec.folder}/logs/node{rank}"


def environment(spec: RunSpec, rank: int, defaults: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of one node's processes. The user's variables have precedence, except those of ranks.

    The agent adds ``NNODES``, ``NODE_RANK`` and other variables of the ranks, see ``trainer/agent/contract/plan.py``.

    Args:
        spec: the run.
        rank: the node's rank.
        defaults: the launcher's variables.
    """
    worker = spec.workers[rank]
    user = {name: value for name, value in spec.user_env.items() if name not in RANKS}
    env = {
        **_python(spec),
        **_offline(spec, rank),
        **_caches(spec, worker, rank),
        "NCCL_SOCKET_IFNAME": f"={INTERFACE}",  # =: exactly this name, not a prefix
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "TP_SOCKET_IFNAME": INTERFACE,
        **variables(spec, rank),
        **(_debugging(spec, rank, user) if worker.has_gpus else {}),
        "OMP_NUM_THREADS": str(max(1, worker.facts.cpus // worker.processes)),
        **(defaults or {}),
        **user,
        **({} if worker.devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(worker.devices)}),
        "NPROC_PER_NODE": str(worker.processes),
        "MASTER_ADDR": spec.master,
        "MASTER_PORT": str(spec.port),
        "CLUSTERCTL_RUN": spec.id,
        "CLUSTERCTL_NODE": worker.node.name,
    }
    if not worker.has_gpus or spec.settings.get("enable_jit_checkpoint"):  # after the user's, which Python reads first
        env["PYTHONPATH"] = ":".join(filter(None, (f"{spec.folder}/{HOOKS}", env.get("PYTHONPATH"))))
    return dict(sorted(env.items()))


def first_environment(spec: RunSpec, rank: int) -> dict[str, str]:
    """The environment of one node's processes in the first attempt, with what the agent adds."""
    worker = spec.workers[rank]
    plan = Plan(
        run=spec.id,
        node=worker.node.name,
        argv=("",),
        env=environment(spec, rank),
        node_rank=rank,
        nnodes=len(spec.active),
        processes=worker.processes,
        port=spec.port,
    )
    return plan.for_attempt(plan.members, interface=worker.facts.interface).env


def _python(spec: RunSpec) -> dict[str, str]:
    env = {
        "PATH": f"{spec.prefix}/bin:{SYSTEM_PATH}",
        "LANG": "C.UTF-8",
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash in C++ prints the stack of every thread
    }
    if spec.job.kind == "config":
        env["PYTHONSAFEPATH"] = "1"  # a file named datasets.py next to the config must not be imported
    return env


def _offline(spec: RunSpec, rank: int) -> dict[str, str]:
    return {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "WANDB_DIR": logs(spec, rank),
        "WANDB_NAME": spec.id,
        # transformers 5 reads only this, not the config's logging_dir
        "TENSORBOARD_LOGGING_DIR": str(spec.settings.get("logging_dir") or f"{logs(spec, rank)}/tensorboard"),
    }


def _caches(spec: RunSpec, worker: Worker, rank: int) -> dict[str, str]:
    _, cache = caches(spec, worker)
    return {
        "HF_HOME": f"{spec.folder}/cache/node{rank}",  # for the tokenized data; /tmp may be in memory
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
        "TORCH_EXTENSIONS_DIR": f"{cache}/torch_extensions",
    }


def _debugging(spec: RunSpec, rank: int, user: Mapping[str, str]) -> dict[str, str]:
    """Settings for NCCL's log, which names the network that NCCL uses, and torch's record of the last collectives."""
    env = {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # required for dumps before torch 2.6
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{logs(spec, rank)}/nccl_trace_rank_",
    }
    if not any(
        name in user for name in _NCCL_DEBUG
    ):  # a user who enables NCCL's log expects it at NCCL's default place
        env |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET",
            "NCCL_DEBUG_FILE": f"{logs(spec, rank)}/nccl-%p.log",
        }
    return env
