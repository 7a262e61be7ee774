"""accelerate: ``accelerate launch`` on every node (1.11, ``commands/launch.py``, ``utils/launch.py``).

It starts torchrun, except for a world of one process and for ``--cpu``, where it starts the script alone. So torchrun
starts it for a single process, and ``--cpu`` is never given: nodes without GPUs get ``ACCELERATE_USE_CPU`` and gloo.

It starts ``--num_processes`` divided by ``--num_machines`` processes. Each node gets its own count times the number of
nodes, so that unequal nodes start the right number; torchrun assigns the ranks. torchrun's ``--redirects`` can only be
given as PET_REDIRECTS.
"""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.launchers import torchrun
from provision.launchers.kit import (
    EVEN_SIZE,
    MASTER,
    NNODES,
    NODE_RANK,
    PORT,
    SEVERAL,
    Command,
    Options,
    by_name,
    names,
    parse_options,
    ranks,
)
from provision.model import Notice
from provision.run import WORK, Job, RunFiles, RunSpec
from provision.run.config_text import load_either

NAME = "accelerate"
ABOUT = "`accelerate launch`"
COMMANDS = (
    *("accelerate", "accelerate-launch"),
    *("python -m accelerate.commands.launch", "python -m accelerate.commands.accelerate_cli"),
)
KINDS = ("script", "module")
REQUIRES = ("accelerate",)
CONFIG = "File that `accelerate config` wrote."  # help of --accelerate-config FILE
# accelerate 1.11, commands/launch.py
OPTIONS = Options(
    flags=names(
        "quiet cpu multi_gpu tpu enable_cpu_affinity dynamo_use_fullgraph dynamo_use_dynamic "
        "dynamo_use_regional_compilation use_deepspeed use_fsdp use_parallelism_config use_megatron_lm use_xpu "
        "same_network module no_python tpu_cluster no_tpu_cluster tpu_use_sudo downcast_bf16 "
        "fp8_use_autocast_during_eval debug"
    ),
    values=names(
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
    used={
        "num_machines": "nodes",
        "num_processes": "total",
        "gpu_ids": "gpu_ids",
        "config_file": "config_file",
        "module": "module",
        "deepspeed_exclusion_filter": "exclude",
        "deepspeed_inclusion_filter": "include",
    },
    replaced=by_name(
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
    refused=by_name(
        {
            "tpu tpu_cluster tpu_use_sudo tpu_zone tpu_name vm env": "clusterctl does not start TPUs: omit it",
            "mpirun_hostfile mpirun_ccl": "clusterctl starts every node itself: omit it",
            "aws_access_key_id aws_secret_access_key": "clusterctl starts nothing on AWS: omit it",
        }
    ),
    files=frozenset(("deepspeed_config_file",)),
)
_CONFIG = "accelerate.yaml"  # in the run's folder
_OWN_WAY = ("DEEPSPEED", "FSDP", "MEGATRON_LM")  # distributed_type: these start torchrun without --multi_gpu
_USE = ("--use_deepspeed", "--use_fsdp", "--use_megatron_lm")
_FOREIGN = ("XLA", "TPU")


def suits(job: Job) -> bool:
    """Accelerate starts only jobs that name it: a typed command, ``--launcher`` or ``--accelerate-config``."""
    del job
    return False


def parse(command: str, words: Sequence[str]) -> Job:
    """The job of a typed command."""
    if command in ("accelerate", "python -m accelerate.commands.accelerate_cli"):
        if list(words[:1]) != ["launch"]:
            raise UsageError(
                f"accelerate {' '.join(words[:1])}: only `launch` runs on several nodes",
                hint="accelerate launch SCRIPT.py",
            )
        words = words[1:]
    return parse_options(NAME, OPTIONS, words)


def pack(job: Job, files: RunFiles) -> RunFiles:
    """The run's files with accelerate's configuration.

    Raises:
        UsageError: the configuration is invalid, or names a file that is not sent.
    """
    path = job.launcher_config
    if path is None:
        return files
    settings = read_settings(path)
    inner = settings.get("deepspeed_config")
    name = inner.get("deepspeed_config_file") if isinstance(inner, dict) else None
    relative = isinstance(name, str) and name and not name.startswith("/")
    if relative and posixpath.normpath(f"{WORK}/{name}") not in files.digests:
        raise UsageError(
            f"{path}: deepspeed_config_file: {shown(str(name))} is not in the folder that is sent",
            hint="the path is relative to that folder: put the file there, or give an absolute path on the nodes",
        )
    return dataclasses.replace(files, texts={**files.texts, _CONFIG: path.read_bytes()}, settings=settings)


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in accelerate's configuration.

    Raises:
        UsageError: it is not an accelerate configuration.
    """
    hint = "accelerate config --config_file FILE writes one"
    data = load_either(path, hint=hint)
    if not isinstance(data, dict) or "distributed_type" not in data:
        raise UsageError(f"{path} is not an accelerate config", hint=hint)
    return data


def check(spec: RunSpec) -> tuple[Notice, ...]:
    """Notices about numbers of nodes and processes in accelerate's configuration that the run replaces.

    Raises:
        UsageError: the configuration is for machines that clusterctl does not start.
    """
    path, settings = spec.job.launcher_config, spec.settings
    kind, machine = settings.get("distributed_type"), settings.get("compute_environment", "LOCAL_MACHINE")
    if kind in _FOREIGN or machine != "LOCAL_MACHINE":
        raise UsageError(
            f"{path}: it is for {kind} on {settings.get('compute_environment')}, which clusterctl does not start",
            hint="accelerate config --config_file FILE, with `This machine`",
        )
    used = {
        "num_machines": len(spec.active),
        "num_processes": sum(worker.processes for worker in spec.active),
        "main_process_ip": spec.master,
        "main_process_port": spec.port,
    }
    return tuple(
        Notice(f"{path}: {key} {settings[key]}: replaced by {value}")
        for key, value in used.items()
        if settings.get(key) not in (None, value)
    )


def command(spec: RunSpec, rank: int) -> Command:
    """The command of one node."""
    job, worker, nodes = spec.job, spec.workers[rank], len(spec.active)
    kind = spec.settings.get("distributed_type", "NO")
    own_way = kind in _OWN_WAY or any(each in _USE for each in job.launcher_args)
    one = nodes == worker.processes == 1
    alone = one and not own_way and kind in ("NO", "MULTI_CPU")
    python = f"{spec.prefix}/bin/python"
    argv = [
        *([python, "-m", "torch.distributed.run", *torchrun.options(spec, rank), "-m"] if alone else [python, "-m"]),
        "accelerate.commands.launch",
        *(["--config_file", f"{spec.folder}/{_CONFIG}"] if job.launcher_config else []),
        *([] if own_way or one else [f"{SEVERAL}--multi_gpu"]),
        *("--num_processes", EVEN_SIZE, "--num_machines", NNODES, "--machine_rank", NODE_RANK),
        *([] if alone else _rendezvous(spec, rank)),
        *("--gpu_ids", "all"),
        *(["--deepspeed_multinode_launcher", "standard"] if own_way else []),
        *job.launcher_args,
        *(["--module"] if job.kind == "module" else []),
        *(spec.config, *job.args),
    ]
    env = {"PET_REDIRECTS": "3"} | ({} if worker.has_gpus else {"ACCELERATE_USE_CPU": "true"})
    return Command(argv, env)


def _rendezvous(spec: RunSpec, rank: int) -> list[str]:
    return [
        *("--main_process_ip", MASTER, "--main_process_port", PORT, "--same_network", "--rdzv_backend", "static"),
        *("--log_dir", ranks(spec, rank)),
    ]
