"""plain: the agent starts a node's processes itself, without a launcher on the node.

Each process gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and NODE_RANK. That is what
``torch.distributed.init_process_group``, JAX, Lightning and hand-written programs read. There is no torchrun to import,
and rank 0 itself listens at MASTER_PORT.
"""

from __future__ import annotations

from collections.abc import Sequence

from provision.errors import UsageError
from provision.launchers.kit import Command, Options
from provision.run import Job, RunSpec

NAME = "plain"
ABOUT = "one process for each rank, which the agent starts itself"
COMMANDS = ()
KINDS = ("script", "module")
REQUIRES = ()
OPTIONS = Options()


def suits(job: Job) -> bool:
    """Plain starts only jobs with ``--launcher plain``."""
    del job
    return False


def parse(command: str, words: Sequence[str]) -> Job:
    """No typed command names this launcher.

    Raises:
        UsageError: always.
    """
    raise UsageError(f"{command} {' '.join(words)}: not a command", hint="clusterctl train --launcher plain SCRIPT.py")


def command(spec: RunSpec, rank: int) -> Command:
    """The command of each rank of one node."""
    del rank
    module = ["-m"] if spec.job.kind == "module" else []
    return Command(
        [f"{spec.prefix}/bin/python", *module, spec.config, *spec.job.args],
        each_rank=True,
    )
