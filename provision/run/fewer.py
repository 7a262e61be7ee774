"""A run's plans for fewer of its nodes: their order stays, and their ranks are without gaps again. Pure.

``resume`` has the plans that the nodes were given and no launcher's input any more, so what a launcher wrote about the
set of nodes is replaced where it stands. A test compares the outcome with what each launcher writes for these nodes.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any

from provision.errors import UsageError

Plan = Mapping[str, Any]

_INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_LOG = "trainer_log.jsonl"  # LLaMA-Factory's, in its output folder; rank 0 alone writes it


def fewer(
    plans: Sequence[Plan], master: str, interfaces: Mapping[str, str | None] | None = None
) -> list[dict[str, Any]]:
    """The plans of the nodes that remain, as if the run had had no others.

    Folders of logs and caches keep the names that they have.

    Args:
        plans: of the nodes that remain, in the order of their ranks.
        master: the address at which the first of them is reached.
        interfaces: by node, the one by which it reaches the first, where that is another node than before.

    Raises:
        UsageError: a plan that no launcher has written.
    """
    made: list[dict[str, Any]] = []
    first = 0
    for rank, plan in enumerate(plans):
        processes = int(plan.get("processes", 1))
        env = {**plan["env"], "NNODES": str(len(plans)), "NODE_RANK": str(rank), "MASTER_ADDR": master}
        interface = (interfaces or {}).get(str(plan["node"]))
        if interface and all(env.get(name) == env.get(_INTERFACES[0]) for name in _INTERFACES):
            env |= dict.fromkeys(_INTERFACES, interface) | {"NCCL_SOCKET_IFNAME": f"={interface}"}
        link = plan.get("link")
        names = [str(each["node"]) for each in plans]
        made.append(
            {
                **plan,
                "node_rank": rank,
                "nnodes": len(plans),
                "first_rank": first,
                "argv": _argv(plan, plans, rank, first, master),
                "env": env,
                "progress": plan.get("progress") or (_progress(plan) if rank == 0 else None),
                "link": {**link, "host": master, "nodes": names} if link and len(plans) > 1 else None,
            }
        )
        first += processes
    return made


def world_size(plans: Sequence[Plan]) -> int:
    """The number of all ranks."""
    return sum(int(plan.get("processes", 1)) for plan in plans)


def _progress(plan: Plan) -> str | None:
    """Where the first node's trainer writes its own log, which only the plan of the first one says."""
    output = (plan.get("resume") or {}).get("output")
    return posixpath.join(output, _LOG) if output and "llamafactory.launcher" in plan["argv"] else None


def _argv(plan: Plan, plans: Sequence[Plan], rank: int, first: int, master: str) -> list[str]:
    argv = [str(word) for word in plan["argv"]]
    module = argv[argv.index("-m") + 1] if "-m" in argv else ""
    if module in {"torch.distributed.run", "torch.distributed.launch"}:
        _put(argv, {"--nnodes": str(len(plans)), "--node-rank": str(rank), "--master-addr": master})
    elif module == "deepspeed.launcher.launch":
        _put(argv, {"--node_rank": str(rank), "--master_addr": master})
        info = next(index for index, word in enumerate(argv) if word.startswith("--world_info="))
        argv[info] = f"--world_info={_world(argv[info].partition('=')[2], plans)}"
        argv = [re.sub(r"\$\(\(RANK - \d+\)\)", f"$((RANK - {first}))", word) for word in argv]
    elif module == "accelerate.commands.launch":
        total = int(plan.get("processes", 1)) * len(plans)
        _put(argv, {"--num_processes": str(total), "--num_machines": str(len(plans)), "--machine_rank": str(rank)})
        _put(argv, {"--main_process_ip": master})
        if total == 1 and "--multi_gpu" in argv:
            argv.remove("--multi_gpu")
    else:
        raise UsageError(
            f"run {plan.get('run')} cannot be resumed on fewer nodes: how it was started is not known",
            hint="clusterctl train",
        )
    return argv


def _put(argv: list[str], values: Mapping[str, str]) -> None:
    """Replace the first value of each option; what follows later are the script's own arguments."""
    for option, value in values.items():
        argv[argv.index(option) + 1] = value


def _world(text: str, plans: Sequence[Plan]) -> str:
    """DeepSpeed's hostfile without the nodes that left, in the order of the ranks."""
    slots = json.loads(base64.urlsafe_b64decode(text))
    kept = {str(plan["node"]): slots[str(plan["node"])] for plan in plans}
    return base64.urlsafe_b64encode(json.dumps(kept).encode()).decode()
