"""A thread for each node, which asks it again and again: what ``watch`` and ``top`` have in common."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError
from provision.model import Node

if TYPE_CHECKING:
    from typing_extensions import Self

    from provision.session import Session


class NodeThreads(ABC):
    """Asks nodes in the ``with`` block, so that a silent node delays no other.

    Args:
        session: has the connections.
        nodes: the nodes to ask.
        pause: seconds until a node is asked again.
    """

    def __init__(self, session: Session, nodes: Sequence[Node], pause: float) -> None:
        self.session = session
        self._nodes = nodes
        self._pause = pause
        self._bug: Exception | None = None
        self.over = threading.Event()  # set at the end of the block

    def __enter__(self) -> Self:
        _ = self.session.connections  # created in this thread
        for node in self._nodes:
            threading.Thread(target=self._run, args=(node,), name=f"ask-{node.name}", daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.over.set()

    @abstractmethod
    def ask(self, node: Node) -> None:
        """Ask a node, in its thread. A ``ClusterctlError`` becomes the reason of its silence."""

    @abstractmethod
    def silence(self, node: Node, reason: str) -> None:
        """Record that a node does not answer."""

    def check(self) -> None:
        """Raise the unexpected exception of a thread."""
        if self._bug is not None:
            raise self._bug

    def _run(self, node: Node) -> None:
        while not self.over.is_set():
            try:
                self.ask(node)
            except ClusterctlError as error:
                self.silence(node, str(getattr(error, "reason", "") or error).partition("\n")[0])
            except Exception as error:  # noqa: BLE001 - ``check`` raises it in the thread that shows
                self._bug = error
                return
            self.over.wait(self._pause)
