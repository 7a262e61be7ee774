"""The functions that launchers share. A launcher needs no other part of this package."""

from provision.launchers.kit.environment import RANKS, SYSTEM_PATH, UNSET, caches, environment
from provision.launchers.kit.network import network
from provision.launchers.kit.options import RESTARTS, USE_ENV, Options, by_name, names, parse_options
from provision.launchers.kit.plans import (
    EVEN_SIZE,
    FIRST_RANK,
    MASTER,
    NNODES,
    NODE_RANK,
    PORT,
    SEVERAL,
    WORLD_INFO,
    Command,
    filled,
    first_rank,
    notices,
    ranks,
    require,
    resume,
)

__all__ = [
    "EVEN_SIZE",
    "FIRST_RANK",
    "MASTER",
    "NNODES",
    "NODE_RANK",
    "PORT",
    "RANKS",
    "RESTARTS",
    "SEVERAL",
    "SYSTEM_PATH",
    "UNSET",
    "USE_ENV",
    "WORLD_INFO",
    "Command",
    "Options",
    "by_name",
    "caches",
    "environment",
    "filled",
    "first_rank",
    "names",
    "network",
    "notices",
    "parse_options",
    "ranks",
    "require",
    "resume",
]
