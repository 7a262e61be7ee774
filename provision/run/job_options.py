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
        values: those with one.
        short: short names.
        taken: those that are read: how many nodes, how many processes, which GPUs, a module.
        ours: those that clusterctl replaces, by what (``provision/launchers/_replaced.py``).
        refused: those that cannot be kept, with what to do instead.
        files: those that name a file which must be in the folder that travels.
    """

    flags: frozenset[str]
    values: frozenset[str]
    short: Mapping[str, str] = field(default_factory=dict)
    taken: Mapping[str, str] = field(default_factory=dict)
    ours: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    files: frozenset[str] = frozenset()

    def use(self, name: str) -> str:
        """What becomes of an option: ``read``, ``replaced``, ``refused`` or ``kept``."""
        if name in self.refused:
            return "refused"
        return "replaced" if name in self.ours else "read" if name in self.taken else "kept"


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _because(reasons: Mapping[str, str]) -> dict[str, str]:
    """Several names with one reason, taken apart."""
    return {name: reason for names, reason in reasons.items() for name in names.split()}


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
            "node_rank": "rank",
            "master_addr": "address",
            "master_port": "port",
            "rdzv_endpoint": "endpoint",
            "rdzv_backend rdzv_id rdzv_conf local_addr": "rendezvous",
            "standalone": "nodes",
            "max_restarts": "restarts",
            "log_dir redirects tee local_ranks_filter logs_specs": "logs",
            "duplicate_stdout_filters duplicate_stderr_filters": "logs",
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
            "hostfile": "nodes",
            "node_rank": "rank",
            "master_addr": "address",
            "master_port": "port",
            "launcher launcher_args no_ssh no_ssh_check force_multi ssh_port": "ssh",
            "save_pid": "marks",
            "enable_each_rank_log": "logs",
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
    values=_set(
        "config_file mixed_precision num_processes num_machines num_cpu_threads_per_process dynamo_backend dynamo_mode "
        "gpu_ids machine_rank main_process_ip main_process_port tee log_dir role rdzv_backend rdzv_conf max_restarts "
        "monitor_interval vm env main_training_function deepspeed_config_file zero_stage offload_optimizer_device "
        "offload_param_device offload_optimizer_nvme_path offload_param_nvme_path gradient_accumulation_steps "
        "gradient_clipping zero3_init_flag zero3_save_16bit_model deepspeed_hostfile deepspeed_exclusion_filter "
        "deepspeed_inclusion_filter deepspeed_multinode_launcher deepspeed_moe_layer_cls_names fsdp_version "
        "fsdp_offload_params fsdp_min_num_params fsdp_sharding_strategy fsdp_reshard_after_forward "
        "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch fsdp_state_dict_type "
        "fsdp_forward_prefetch fsdp_use_orig_params fsdp_cpu_ram_efficient_loading fsdp_sync_module_states "
        "fsdp_activation_checkpointing megatron_lm_tp_degree megatron_lm_pp_degree megatron_lm_num_micro_batches "
        "megatron_lm_sequence_parallelism megatron_lm_recompute_activations megatron_lm_use_distributed_optimizer "
        "megatron_lm_gradient_clipping fp8_backend fp8_margin fp8_interval fp8_format fp8_amax_history_len "
        "fp8_amax_compute_algo fp8_override_linear_precision fp8_opt_level aws_access_key_id aws_secret_access_key "
        "tpu_name tpu_zone mpirun_hostfile mpirun_ccl parallelism_config_dp_replicate_size "
        "parallelism_config_dp_shard_size parallelism_config_tp_size parallelism_config_cp_size "
        "parallelism_config_cp_comm_strategy"
    ),
    short={"m": "module", "q": "quiet", "t": "tee"},
    taken={
        "num_machines": "nodes",
        "num_processes": "total",
        "gpu_ids": "gpu_ids",
        "config_file": "config_file",
        "module": "module",
        "deepspeed_exclusion_filter": "exclude",
        "deepspeed_inclusion_filter": "include",
    },
    ours=_because(
        {
            "machine_rank": "rank",
            "main_process_ip": "address",
            "main_process_port": "port",
            "same_network rdzv_backend rdzv_conf": "rendezvous",
            "multi_gpu cpu": "kind",
            "max_restarts": "restarts",
            "log_dir tee": "logs",
            "deepspeed_hostfile": "nodes",
            "deepspeed_multinode_launcher": "ssh",
        }
    ),
    refused=_because(
        {
            "tpu tpu_cluster tpu_use_sudo tpu_zone tpu_name vm env": "clusterctl starts no TPUs: leave it out",
            "mpirun_hostfile mpirun_ccl": "clusterctl starts every node itself: leave it out",
            "aws_access_key_id aws_secret_access_key": "clusterctl starts nothing at AWS: leave it out",
        }
    ),
    files=frozenset(("deepspeed_config_file",)),
)

# Variables that say which process is which, as people type them before a command.
VARIABLES = {
    "NNODES": "nodes",
    "NPROC_PER_NODE": "per_node",
    "NODE_RANK": "rank",
    "RANK": "rank",
    "LOCAL_RANK": "rank",
    "WORLD_SIZE": "processes",
    "LOCAL_WORLD_SIZE": "processes",
    "MASTER_ADDR": "address",
    "MASTER_PORT": "port",
}
