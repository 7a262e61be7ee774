"""accelerate: ``accelerate launch`` on every node (1.11, ``commands/launch.py``, ``utils/launch.py``).

It starts torchrun inside itself, but for a world of one process, and for ``--cpu``, where it starts the script alone.
So torchrun starts it where there is one process, and ``--cpu`` is never given: nodes without GPUs get
``ACCELERATE_USE_CPU`` and gloo.

It divides ``--num_processes`` by ``--num_machines`` and starts that many. Each node is given its own count times the
number of nodes, so that unequal nodes start what they have; torchrun hands out the ranks. torchrun's ``--redirects``
can be given as PET_REDIRECTS only.
"""

from __future__ import annotations

from typing import Any

from provision.errors import UsageError
from provision.launchers import torchrun
from provision.launchers._plans import PORT, launched, needs, plan, ranks
from provision.model import Notice
from provision.run import Launch, RunSpec
from provision.run.job_code import ACCELERATE_CONFIG

_OWN_WAY = ("DEEPSPEED", "FSDP", "MEGATRON_LM")  # distributed_type: these start torchrun without --multi_gpu
_USE = ("--use_deepspeed", "--use_fsdp", "--use_megatron_lm")
_FOREIGN = ("XLA", "TPU")


def launch(spec: RunSpec) -> Launch:
    """One plan for each node.

    Raises:
        PreflightError: nodes whose environment lacks the launcher's package.
        UsageError: accelerate's config is for machines that clusterctl does not start.
    """
    kind = spec.settings.get("distributed_type")
    if kind in _FOREIGN or spec.settings.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise UsageError(
            f"{spec.job.accelerate_config}: it is for {kind} on {spec.settings.get('compute_environment')}, "
            "which clusterctl does not start",
            hint="accelerate config --config_file FILE, with `This machine`",
        )
    needs(spec, "accelerate")
    return launched(spec, [_plan(spec, rank) for rank in range(len(spec.workers))], *_config_replaced(spec))


def _config_replaced(spec: RunSpec) -> list[Notice]:
    """What ``accelerate config`` has written about nodes and processes, where the run has something else."""
    used = {
        "num_machines": len(spec.workers),
        "num_processes": sum(worker.processes for worker in spec.workers),
        "main_process_ip": spec.master,
        "main_process_port": spec.port,
    }
    said = {key: spec.settings.get(key) for key in used}
    return [
        Notice(f"{spec.job.accelerate_config}: {key} {said[key]}: replaced by {value}")
        for key, value in used.items()
        if said[key] not in (None, value)
    ]


def _plan(spec: RunSpec, rank: int) -> dict[str, Any]:
    job, worker, nodes = spec.job, spec.workers[rank], len(spec.workers)
    kind = spec.settings.get("distributed_type", "NO")
    own_way = kind in _OWN_WAY or any(each in _USE for each in job.launcher_args)
    one = nodes == worker.processes == 1
    alone = one and not own_way and kind in ("NO", "MULTI_CPU")
    python = f"{spec.prefix}/bin/python"
    argv = [
        *([python, "-m", "torch.distributed.run", *torchrun.options(spec, rank), "-m"] if alone else [python, "-m"]),
        "accelerate.commands.launch",
        *(["--config_file", f"{spec.folder}/{ACCELERATE_CONFIG}"] if job.accelerate_config else []),
        *([] if own_way or one else ["--multi_gpu"]),
        *("--num_processes", str(worker.processes * nodes), "--num_machines", str(nodes), "--machine_rank", str(rank)),
        *([] if alone else _rendezvous(spec, rank)),
        *("--gpu_ids", "all"),
        *(["--deepspeed_multinode_launcher", "standard"] if own_way else []),
        *job.launcher_args,
        *(["--module"] if job.kind == "module" else []),
        *(spec.config, *job.args),
    ]
    defaults = {"PET_REDIRECTS": "3"}
    if not worker.has_gpus:
        defaults["ACCELERATE_USE_CPU"] = "true"
    return plan(spec, rank, argv, defaults)


def _rendezvous(spec: RunSpec, rank: int) -> list[str]:
    return [
        *("--main_process_ip", spec.master, "--main_process_port", PORT, "--same_network", "--rdzv_backend", "static"),
        *("--log_dir", ranks(spec, rank)),
    ]
