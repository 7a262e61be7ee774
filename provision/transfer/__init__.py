"""Sends parts to many nodes, which relay them to one another.

- ``engine``: the transfer; ``prepare``: surveys nodes, brings zstd, forms chains; ``chain``: the stream to one chain
- ``nodes``: the state of each node; ``keys``: the keys with which nodes log in to one another
- ``fetch``: files from a node to this machine
- ``templates/transfer/receive.sh.j2``: the receiver on a node
"""

from provision.transfer.engine import Options, clean, transfer
from provision.transfer.nodes import Target, Transferred

__all__ = ["Options", "Target", "Transferred", "clean", "transfer"]
