"""DeepSpeed: starts the same as ``deepspeed --no_ssh --hostfile … --node_rank N``, without ``deepspeed``.

``deepspeed`` (0.19, ``launcher/runner.py``) converts its hostfile to ``--world_info``, starts
``deepspeed.launcher.launch`` and waits. It forwards no signals, and exits with 0 if its child was killed. So this
launcher starts the child itself, with the world from the inventory.

The child (``launcher/launch.py``) sets LOCAL_RANK to RANK modulo the node's processes, which is wrong for most unequal
nodes. So a line of sh starts each rank: it corrects LOCAL_RANK, passes it as ``--local_rank`` as DeepSpeed does, and
writes the output to torchrun's folders.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from provision.launchers.kit import (
    FIRST_RANK,
    MASTER,
    NODE_RANK,
    PORT,
    RESTARTS,
    WORLD_INFO,
    Command,
    Options,
    by_name,
    names,
    parse_options,
    ranks,
)
from provision.run import Job, RunSpec, Worker

NAME = "deepspeed"
ABOUT = "`deepspeed.launcher.launch`, without `deepspeed`"
COMMANDS = ("deepspeed", "ds", "python -m deepspeed", "python -m deepspeed.launcher.runner")
KINDS = ("script", "module")
REQUIRES = ("deepspeed",)
# DeepSpeed 0.19, launcher/runner.py
OPTIONS = Options(
    flags=names(
        "module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid elastic_training "
        "bind_cores_to_rank quiet"
    ),
    values=names(
        "hostfile include exclude num_nodes min_elastic_nodes max_elastic_nodes num_gpus num_accelerators master_port "
        "master_addr node_rank launcher launcher_args enable_each_rank_log autotuning bind_core_list ssh_port "
        "venv_script log_level"
    ),
    short={"H": "hostfile", "i": "include", "e": "exclude", "q": "quiet"},
    used={
        "num_nodes": "nodes",
        "num_gpus": "per_node",
        "num_accelerators": "per_node",
        "include": "include",
        "exclude": "exclude",
        "module": "module",
    },
    replaced=by_name(
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
    refused=by_name(
        {
            "elastic_training min_elastic_nodes max_elastic_nodes": f"omit it; {RESTARTS}",
            "autotuning": "the tuner starts nodes itself: run it by hand on one node",
            "venv_script": "omit it: the run uses the packed environment",
        }
    ),
)
_OWN = ("--no_python", "--no_local_rank")


def suits(job: Job) -> bool:
    """Whether a job is for this launcher: an argument names DeepSpeed's configuration."""
    words = {word.partition("=")[0] for word in job.args}
    return job.kind != "config" and bool(words & {"--deepspeed", "--deepspeed_config"})


def parse(command: str, words: Sequence[str]) -> Job:
    """The job of a typed command."""
    del command
    return parse_options(NAME, OPTIONS, words)


def world(spec: RunSpec) -> dict[str, tuple[int | str, ...]]:
    """The content of a hostfile: the GPUs of every node, by their numbers or UUIDs."""
    return {worker.node.name: _devices(worker) for worker in spec.workers}


def _devices(worker: Worker) -> tuple[int | str, ...]:
    chosen = worker.devices or tuple(str(number) for number in range(worker.processes))
    return tuple(int(each) if each.isdecimal() else each for each in chosen[: worker.processes])


def command(spec: RunSpec, rank: int) -> Command:
    """The command of one node."""
    job = spec.job
    python = f"{spec.prefix}/bin/python"
    return Command(
        [
            *(python, "-u", "-m", "deepspeed.launcher.launch", WORLD_INFO, "--node_rank", NODE_RANK),
            *("--master_addr", MASTER, "--master_port", PORT),
            *(*_OWN, *(each for each in job.launcher_args if each not in _OWN)),
            *("/bin/sh", "-c", _line(spec, rank), python, FIRST_RANK, spec.config, *job.args),
        ],
        slots=world(spec),
    )


def _line(spec: RunSpec, rank: int) -> str:
    """The line of sh that starts a rank: $0 is Python, $1 the node's first rank, $2 the script."""
    job = spec.job
    kept = set(job.launcher_args)
    what = '"$script"' if "--no_python" in kept else f'"$0" -u {"-m " if job.kind == "module" else ""}"$script"'
    local_rank = "" if "--no_local_rank" in kept else " --local_rank=$LOCAL_RANK"
    return (
        "export LOCAL_RANK=$((RANK - $1)); script=$2; shift 2; "
        f'logs={shlex.quote(ranks(spec, rank))}/$$/attempt_0/$LOCAL_RANK; mkdir -p "$logs" && '
        f'exec {what}{local_rank} "$@" >"$logs/stdout.log" 2>"$logs/stderr.log"'
    )
