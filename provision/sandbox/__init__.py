"""A rehearsal cluster on one machine: nodes in namespaces of their own with a real sshd.

::

    with sandbox.up(nodes=3, directory=folder) as cluster:
        inventory.load(cluster.inventory)
"""

from provision.sandbox.bring_up import require, up
from provision.sandbox.cluster import Sandbox, Status, list_all
from provision.sandbox.take_down import down

__all__ = ["Sandbox", "Status", "down", "list_all", "require", "up"]
