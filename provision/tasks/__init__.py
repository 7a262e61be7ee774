"""The tasks: what each command does, from its arguments to its result. They talk through events and never print."""

from provision.tasks.deploy import DeployResult, deploy, find_bundle
from provision.tasks.init import init, write_inventory
from provision.tasks.pack import PackResult, pack_env
from provision.tasks.train import TrainResult, find_config, train

__all__ = [
    "DeployResult",
    "PackResult",
    "TrainResult",
    "deploy",
    "find_bundle",
    "find_config",
    "init",
    "pack_env",
    "train",
    "write_inventory",
]
