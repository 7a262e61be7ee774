"""Many bytes from here to many nodes, by a relay between the nodes. Knows legs, never what they hold.

- ``engine``: the transfer; ``muster``: what is asked of nodes before a stream; ``lane``: one stream
- ``decompressor``: brings zstd to nodes that lack it
- ``target``, ``units``, ``chains``, ``members``, ``survey``, ``keys``: what is decided, without a connection
- ``templates/transfer/receive.sh.j2``: what runs on a node
"""

from provision.transfer.engine import clean, transfer
from provision.transfer.target import Target, Transferred

__all__ = ["Target", "Transferred", "clean", "transfer"]
