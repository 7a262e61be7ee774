"""A rehearsal cluster on one machine: every node has its own namespaces and a real sshd.

::

    with sandbox.up(sandbox.Options(nodes=3, directory=folder)) as cluster:
        inventory.load(cluster.inventory)
"""

from provision.sandbox.bring_up import Options, require, up
from provision.sandbox.cluster import Sandbox, Status, down, list_all

__all__ = ["Options", "Sandbox", "Status", "down", "list_all", "require", "up"]
