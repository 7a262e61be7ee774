"""offline.env: what a run starts does not look for the internet.

What ``clusterctl train`` sets (provision/launchers) with the inventory's ``train: env:`` over it. The variables:
huggingface_hub, "Environment variables"; wandb, "Environment variables"; LLaMA-Factory's extras/misc.py for other hubs.
"""

from collections.abc import Mapping
from pathlib import PurePosixPath

from provision.checks.kit import Answers, Judgements, Plan, ok, unread, warn
from provision.launchers import environment
from provision.run import Facts, RunSpec, Worker

TITLE = "a run does not look for the internet"
PROBE = "env | grep -E '^USE_(MODELSCOPE|OPENMIND)_HUB='\necho looked\n"
WHY = "Every rank tries to reach a hub at its start, and gives up after minutes of retries."

_HUBS = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_ON = ("1", "on", "yes", "true", "y")
_QUIET = ("offline", "disabled", "dryrun")  # of WANDB_MODE


def judge(plan: Plan, answers: Answers) -> Judgements:
    """WARN for a variable that lets a library go online."""
    workers = tuple(Worker(node, Facts()) for node in plan.nodes)
    spec = RunSpec(
        id="check",
        workers=workers,
        prefix=plan.inventory.prefix,
        folder=PurePosixPath(plan.inventory.root),
        config="",
        master=plan.nodes[0].train_address,
        port=0,
        env=plan.inventory.train.env,
    )
    ranks = {node.name: rank for rank, node in enumerate(plan.nodes)}
    for node, answer in answers.items():
        if "looked" not in answer.lines:
            yield node, unread(answer)
            continue
        session = dict(line.split("=", 1) for line in answer.lines if "=" in line)
        online = _online(session | environment(spec, ranks[node]))
        if online:
            fix = "set it in the inventory (train: env:); a hub's switch also in /etc/environment on the node"
            yield node, warn("; ".join(online), fix=fix)
        else:
            yield node, ok("the hubs' libraries and wandb are offline")


def _online(env: Mapping[str, str]) -> list[str]:
    """The variables that let something go online, with their values."""
    found = [f"{name}={env.get(name, '')}" for name in _HUBS if env.get(name, "").lower() not in _ON]
    found += [
        f"{name}={env[name]}" for name in ("USE_MODELSCOPE_HUB", "USE_OPENMIND_HUB") if env.get(name, "").lower() in _ON
    ]
    if env.get("WANDB_MODE", "").lower() not in _QUIET and env.get("WANDB_DISABLED", "").lower() not in _ON:
        found.append(f"WANDB_MODE={env.get('WANDB_MODE', '')}")
    return found
