"""The commands by subject, and an example of each, as ``--help`` shows them."""

from __future__ import annotations

from collections.abc import Mapping

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Environment": ("pack-env", "inspect", "diff", "deploy", "releases", "rollback", "prune", "verify"),
    "Nodes": ("init", "check", "status", "run", "push", "services", "pack-os", "bench"),
    "Training": ("train", "logs", "stop", "resume", "collect", "metrics", "diagnose"),
    "Planning": ("plan", "ds-config"),
    "This machine": ("completion", "pack-tool", "sandbox"),
}

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "bench": ("clusterctl bench nccl --nodes 2",),
    "bench nccl": ("clusterctl bench nccl --nodes 2", "clusterctl bench nccl --pairs"),
    "check": ("clusterctl check", "clusterctl check --limit 'gpu[01-04]' llm.ccb"),
    "collect": ("clusterctl collect sft --fp32",),
    "completion": ("source <(clusterctl completion bash)",),
    "deploy": ("clusterctl deploy llm.ccb", "clusterctl deploy --dry-run"),
    "diagnose": ("clusterctl diagnose sft",),
    "diff": ("clusterctl diff old.ccb new.ccb",),
    "ds-config": ("clusterctl ds-config --stage 2 --gpu A100 -o ds.json",),
    "init": (
        "clusterctl init --user root 'gpu[01-02]=192.168.20.[14-15]'",
        "clusterctl init --from hostfile",
    ),
    "inspect": ("clusterctl inspect llm.ccb",),
    "logs": ("clusterctl logs -f", "clusterctl logs sft --node gpu01"),
    "metrics": ("clusterctl metrics sft", "clusterctl metrics train.log"),
    "pack-env": ("clusterctl pack-env llm", "clusterctl pack-env --exclude '*.a' --split 4G"),
    "pack-os": ("clusterctl pack-os --release debian12",),
    "pack-tool": ("clusterctl pack-tool -o clusterctl.run",),
    "plan": ("clusterctl plan llama-3-8b --nodes 2",),
    "prune": ("clusterctl prune --keep 2 --dry-run",),
    "push": ("clusterctl push ./datasets /data/datasets",),
    "releases": ("clusterctl releases",),
    "resume": ("clusterctl resume sft", "clusterctl resume sft --exclude gpu03"),
    "rollback": ("clusterctl rollback", "clusterctl rollback --to 773efc33"),
    "run": ("clusterctl run -- nvidia-smi -L", "clusterctl run 'cat /proc/loadavg | cut -c1-4'"),
    "sandbox": ("clusterctl sandbox up --nodes 3",),
    "sandbox down": ("clusterctl sandbox down",),
    "sandbox list": ("clusterctl sandbox list",),
    "sandbox up": ("clusterctl sandbox up --nodes 3",),
    "services": ("clusterctl services apply --dry-run",),
    "services apply": ("clusterctl services apply", "clusterctl services apply hosts chrony --dry-run"),
    "services status": ("clusterctl services status",),
    "services undo": ("clusterctl services undo nfs",),
    "services verify": ("clusterctl services verify chrony",),
    "status": ("clusterctl status", "clusterctl status sft"),
    "stop": ("clusterctl stop sft --save",),
    "train": (
        "clusterctl train --nodes 2 sft.yaml",
        "clusterctl train --nodes 2 --restarts 3 --detach train.py -- --lr 1e-4",
        "clusterctl train --nodes 2 -- torchrun --nproc_per_node 8 train.py",
    ),
    "verify": ("clusterctl verify --limit gpu01",),
}


def epilog(path: str) -> str | None:
    """The text at the end of a command's help: its examples, each on a separate line."""
    if path not in EXAMPLES:
        return None
    title = "Examples:" if len(EXAMPLES[path]) > 1 else "Example:"
    return "\n".join(("\b", title, *(f"  {line}" for line in EXAMPLES[path])))
