"""The tasks: what each command does, from its arguments to its result. They talk through events and never print."""

from provision.tasks.deploy import DeployResult, deploy, find_bundle
from provision.tasks.init import init, write_inventory
from provision.tasks.inspect import diff, differed, inspect, inspected
from provision.tasks.interchange import archived, bundle_of, pack_archive
from provision.tasks.pack import PackResult, pack_env, parse_size
from provision.tasks.push import PushResult, push
from provision.tasks.releases import Pruned, Switched, prune, releases, rollback, verify
from provision.tasks.tool import ToolResult, pack_tool
from provision.tasks.train import TrainResult, find_config, train

__all__ = [
    "DeployResult",
    "PackResult",
    "Pruned",
    "PushResult",
    "Switched",
    "ToolResult",
    "TrainResult",
    "archived",
    "bundle_of",
    "deploy",
    "diff",
    "differed",
    "find_bundle",
    "find_config",
    "init",
    "inspect",
    "inspected",
    "pack_archive",
    "pack_env",
    "pack_tool",
    "parse_size",
    "prune",
    "push",
    "releases",
    "rollback",
    "train",
    "verify",
    "write_inventory",
]
