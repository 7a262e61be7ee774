"""DeepSpeed: what ``deepspeed --no_ssh --hostfile … --node_rank N`` would start, without ``deepspeed``.

``deepspeed`` (0.19, ``launcher/runner.py``) turns its hostfile into ``--world_info`` and starts
``deepspeed.launcher.launch``; then it waits. It passes no signal on, and says 0 when its child was killed. So the child
is started here, with the world made from the inventory.

That launcher (``launcher/launch.py``) gives ``LOCAL_RANK = RANK % processes`` of its node: right only where the number
of ranks before it is a multiple of that, and wrong for most unequal nodes. So each rank starts through a line of sh: it
puts LOCAL_RANK right, passes it on as ``--local_rank`` as DeepSpeed does, and sends the output where torchrun would.
"""

from __future__ import annotations

import base64
import json
import shlex
from typing import Any

from provision.launchers._plans import PORT, first_rank, launched, needs, plan, ranks
from provision.run import Launch, RunSpec, Worker

_OURS = ("--no_python", "--no_local_rank")


def launch(spec: RunSpec) -> Launch:
    """One plan for each node.

    Raises:
        PreflightError: nodes whose environment lacks the launcher's package.
    """
    needs(spec, "deepspeed")
    return launched(spec, [_plan(spec, rank) for rank in range(len(spec.workers))])


def world(spec: RunSpec) -> dict[str, list[int | str]]:
    """What a hostfile says: the GPUs of every node, by their numbers or UUIDs."""
    return {worker.node.name: _devices(worker) for worker in spec.workers}


def _devices(worker: Worker) -> list[int | str]:
    chosen = worker.devices or tuple(str(number) for number in range(worker.processes))
    return [int(each) if each.isdecimal() else each for each in chosen[: worker.processes]]


def _plan(spec: RunSpec, rank: int) -> dict[str, Any]:
    job = spec.job
    python = f"{spec.prefix}/bin/python"
    info = base64.urlsafe_b64encode(json.dumps(world(spec)).encode()).decode()
    argv = [
        *(python, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={info}", "--node_rank", str(rank)),
        *("--master_addr", spec.master, "--master_port", PORT),
        *(*_OURS, *(each for each in job.launcher_args if each not in _OURS)),
        *("/bin/sh", "-c", _rank(spec, rank), python, spec.config, *job.args),
    ]
    return plan(spec, rank, argv)


def _rank(spec: RunSpec, rank: int) -> str:
    """The line of sh with which a rank starts: $0 is Python, $1 the script, then its arguments."""
    job = spec.job
    kept = set(job.launcher_args)
    what = '"$script"' if "--no_python" in kept else f'"$0" -u {"-m " if job.kind == "module" else ""}"$script"'
    local_rank = "" if "--no_local_rank" in kept else " --local_rank=$LOCAL_RANK"
    return (
        f"export LOCAL_RANK=$((RANK - {first_rank(spec, rank)})); script=$1; shift; "
        f'logs={shlex.quote(ranks(spec, rank))}/$$/attempt_0/$LOCAL_RANK; mkdir -p "$logs" && '
        f'exec {what}{local_rank} "$@" >"$logs/stdout.log" 2>"$logs/stderr.log"'
    )
