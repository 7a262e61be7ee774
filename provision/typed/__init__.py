"""Command lines as people type them: what is around a launcher's command, and launch scripts. Pure, runs nothing.

- ``shell``: words, quotes, variables and operators of a POSIX shell
- ``wrappers``: ``export A=b``, ``nohup``, ``conda run``, redirections and the like around a command
- ``schedulers``: ``srun``, ``sbatch``, ``mpirun``
- ``scripts``: launch scripts (``.sh``, ``.bat``, ``.ps1``), which mean one launcher's command
- ``slashes``: paths with backslashes
"""

from provision.typed.slashes import to_slashes
from provision.typed.wrappers import Typed, unwrap

__all__ = ["Typed", "to_slashes", "unwrap"]
