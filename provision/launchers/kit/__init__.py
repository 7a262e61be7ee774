"""The functions that launchers share. A launcher needs no other part of this package."""

from provision.launchers.kit.environment import RANKS, SYSTEM_PATH, UNSET, caches, environment
from provision.launchers.kit.network import network
from provision.launchers.kit.options import RESTARTS, USE_ENV, Options, by_name, names, parse_options
from provision.launchers.kit.plans import PORT, Command, first_rank, notices, put, ranks, require, resume

__all__ = [
    "PORT",
    "RANKS",
    "RESTARTS",
    "SYSTEM_PATH",
    "UNSET",
    "USE_ENV",
    "Command",
    "Options",
    "by_name",
    "caches",
    "environment",
    "first_rank",
    "names",
    "network",
    "notices",
    "parse_options",
    "put",
    "ranks",
    "require",
    "resume",
]
