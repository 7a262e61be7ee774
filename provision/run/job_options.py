"""The options of the launchers that people type, and what becomes of each.

From the parsers of torch 2.13 (``distributed/run.py``), DeepSpeed 0.19 (``launcher/runner.py``) and accelerate 1.11
(``commands/launch.py``). Names are written with ``_``; torch and accelerate take ``-`` as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Options:
    """A launcher's options.

    Attributes:
        flags: those without a value.
        values: those with one; None: every other one.
        short: short names.
        taken: those that are read: how many nodes, how many processes, which GPUs, a module.
        ours: those that clusterctl decides, with the reason. They are dropped.
        refused: those that cannot be kept, with what to do instead.
    """

    flags: frozenset[str]
    values: frozenset[str] | None
    short: Mapping[str, str] = field(default_factory=dict)
    taken: Mapping[str, str] = field(default_factory=dict)
    ours: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _because(reasons: Mapping[str, str]) -> dict[str, str]:
    """Several names with one reason, taken apart."""
    return {name: reason for names, reason in reasons.items() for name in names.split()}


_RANKS = "every node gets its own"
_MASTER = "it is rank 0's, and its port is looked for there"
_LOGS = "every rank's output goes to the run's logs"
_RESTARTS = "--restarts N restarts from the newest checkpoint"

TORCHRUN = Options(
    flags=_set("standalone module no_python run_path use_env virtual_local_rank"),
    values=_set(
        "nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts monitor_interval start_method "
        "event_log_handler role log_dir redirects tee local_ranks_filter duplicate_stdout_filters "
        "duplicate_stderr_filters node_rank master_addr master_port local_addr logs_specs numa_binding "
        "signals_to_handle shutdown_timeout"
    ),
    short={"m": "module", "r": "redirects", "t": "tee"},
    taken={"nnodes": "nodes", "nproc_per_node": "per_node", "module": "module", "use_env": "use_env"},
    ours=_because(
        {
            "node_rank": _RANKS,
            "master_addr master_port local_addr standalone": _MASTER,
            "rdzv_backend rdzv_endpoint rdzv_id rdzv_conf": _MASTER,
            "max_restarts": _RESTARTS,
            "log_dir redirects tee local_ranks_filter logs_specs": _LOGS,
            "duplicate_stdout_filters duplicate_stderr_filters": _LOGS,
        }
    ),
)

DEEPSPEED = Options(
    flags=_set(
        "module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid elastic_training "
        "bind_cores_to_rank quiet"
    ),
    values=_set(
        "hostfile include exclude num_nodes min_elastic_nodes max_elastic_nodes num_gpus num_accelerators master_port "
        "master_addr node_rank launcher launcher_args enable_each_rank_log autotuning bind_core_list ssh_port "
        "venv_script log_level"
    ),
    short={"H": "hostfile", "i": "include", "e": "exclude", "q": "quiet"},
    taken={
        "num_nodes": "nodes",
        "num_gpus": "per_node",
        "num_accelerators": "per_node",
        "include": "include",
        "exclude": "exclude",
        "module": "module",
    },
    ours=_because(
        {
            "hostfile": "the inventory says which nodes there are",
            "node_rank": _RANKS,
            "master_addr master_port": _MASTER,
            "launcher launcher_args no_ssh no_ssh_check force_multi ssh_port": "clusterctl starts every node itself",
            "save_pid": "clusterctl stop finds the processes",
            "enable_each_rank_log": _LOGS,
        }
    ),
    refused=_because(
        {
            "elastic_training min_elastic_nodes max_elastic_nodes": f"leave it out; {_RESTARTS}",
            "autotuning": "its tuner starts nodes by itself: run it by hand on one node",
            "venv_script": "leave it out: the packed environment is used",
        }
    ),
)

ACCELERATE = Options(
    flags=_set(
        "quiet cpu multi_gpu tpu enable_cpu_affinity dynamo_use_fullgraph dynamo_use_dynamic "
        "dynamo_use_regional_compilation use_deepspeed use_fsdp use_parallelism_config use_megatron_lm use_xpu "
        "same_network module no_python tpu_cluster no_tpu_cluster tpu_use_sudo downcast_bf16 "
        "fp8_use_autocast_during_eval debug"
    ),
    values=None,
    short={"m": "module", "q": "quiet", "t": "tee"},
    taken={
        "num_machines": "nodes",
        "num_processes": "total",
        "gpu_ids": "gpu_ids",
        "config_file": "config_file",
        "module": "module",
    },
    ours=_because(
        {
            "machine_rank": _RANKS,
            "main_process_ip main_process_port same_network rdzv_backend rdzv_conf": _MASTER,
            "multi_gpu cpu": "it follows from the nodes",
            "max_restarts": _RESTARTS,
            "log_dir tee": _LOGS,
            "deepspeed_hostfile deepspeed_multinode_launcher": "clusterctl starts every node itself",
            "deepspeed_exclusion_filter deepspeed_inclusion_filter": "--limit and --gpus-per-node choose",
        }
    ),
    refused=_because(
        {
            "tpu tpu_cluster tpu_use_sudo tpu_zone tpu_name vm env": "clusterctl starts no TPUs: leave it out",
            "mpirun_hostfile mpirun_ccl": "clusterctl starts every node itself: leave it out",
            "aws_access_key_id aws_secret_access_key": "clusterctl starts nothing at AWS: leave it out",
        }
    ),
)
