"""Follows a run to its end. The user may detach from it, stop it, or continue to follow it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from provision.errors import InterruptedByUser, NodesFailedError
from provision.model import Emit, Node
from provision.render import render
from provision.run import plan_name
from provision.run.follow import parsed
from provision.session.streams import Pool, Stream, Streams

if TYPE_CHECKING:
    from pathlib import PurePosixPath

    from provision.run.follow import Follower

Choice = Literal["detach", "stop", "continue"]
Ask = Callable[[], Choice]

# Seconds for an agent, beyond its grace, to see every process exit after the other nodes have ended.
PATIENCE = 75.0
LAST_WORD = 10.0  # seconds for a node without a connection to come back after all others have ended
FORSAKEN = 900.0  # seconds without any node until the command gives up; the run may still be running
LOOK = 1.0
SAME = 1.0  # seconds within which a second interrupt is the same one: a wrapper forwards the terminal's interrupt too


class HungUp(KeyboardInterrupt):
    """SIGTERM or SIGHUP: a command that follows a run detaches from it; any other command is interrupted."""


class Attachment:
    """Follows the agents of a run on ``nodes``, which are in the order of their ranks.

    ``folder`` is the run's folder on the nodes; ``offsets`` are the first bytes of ``events.jsonl`` to read, by node.
    """

    def __init__(
        self, nodes: Sequence[Node], follower: Follower, folder: PurePosixPath, offsets: Mapping[str, int]
    ) -> None:
        self.nodes = tuple(nodes)
        self.follower = follower
        self._folder = folder
        self._offsets = {node.name: offsets.get(node.name, 0) for node in nodes}

    def follow(
        self,
        pool: Pool,
        emit: Emit,
        *,
        until: Callable[[], bool] | None = None,
        stop: Callable[[], object],
        ask: Ask | None = None,
    ) -> Literal["ended", "detached"]:
        """Follow the run until it ends, or until the user detaches.

        Args:
            pool: the connections.
            emit: receives notices about lost connections.
            until: detach as soon as this is true.
            stop: stops the run on every node.
            ask: what Ctrl-C does; None: stop.

        Raises:
            InterruptedByUser: a second Ctrl-C, while the run was being stopped.
            NodesFailedError: no node could be reached for ``FORSAKEN`` seconds.
        """
        streams = Streams([self._stream(node, pool) for node in self.nodes], emit)
        streams.start()
        try:
            self._until_over(streams, until, stop, ask)
        except HungUp:
            pass
        finally:
            streams.close()
        return "ended" if self.follower.over else "detached"  # a signal after the last event changes nothing

    def _until_over(
        self, streams: Streams, until: Callable[[], bool] | None, stop: Callable[[], object], ask: Ask | None
    ) -> None:
        """Wait, and do what Ctrl-C asks for. Raises ``HungUp`` to detach."""
        # The stop has its own thread: this one still reads events.
        stopper = threading.Thread(target=stop, name="stop", daemon=True)
        stopping = 0.0
        while True:
            try:
                self._wait(streams, until)
            except KeyboardInterrupt as signal:  # noqa: PERF203 - one round for each Ctrl-C
                if isinstance(signal, HungUp) or (self.follower.over and not stopping):
                    raise HungUp from None
                if not stopping:
                    choice = ask() if ask else "stop"
                    if choice == "detach":
                        raise HungUp from None
                    if choice == "stop":
                        stopping = time.monotonic()
                        stopper.start()
                elif time.monotonic() - stopping > SAME:
                    raise InterruptedByUser(
                        f"interrupted while run {self.follower.run} was being stopped",
                        hint=f"clusterctl stop {self.follower.run}",
                    ) from None
            else:
                if stopping:
                    stopper.join()
                return

    def _stream(self, node: Node, pool: Pool) -> Stream:
        rank = self.nodes.index(node)

        def script() -> str:
            agent, plan = f"{self._folder}/agent", f"{self._folder}/{plan_name(rank)}"
            arguments = ["-IS", agent, "follow", plan, "--from", self._offsets[node.name]]
            return render("run/agent_python.sh.j2", run=str(self._folder), arguments=arguments)

        def line(text: str) -> bool:
            event = parsed(text)
            offset = event.pop("at", None)
            self.follower.take(node.name, event)
            if isinstance(offset, int):
                self._offsets[node.name] = offset  # last, so that an event that was not processed is read again
            return self.follower.ended(node.name)

        return Stream(node, pool, script, line)

    def _wait(self, streams: Streams, until: Callable[[], bool] | None) -> None:
        """Wait until the run ends or ``until`` is true. Nodes that cannot be reached are given up eventually."""
        follower = self.follower
        first_end: float | None = None
        while not (follower.over or (until and until())):
            streams.check()
            for stream in streams.streams:
                if stream.failure and not follower.ended(stream.node.name):
                    follower.lost(stream.node.name, stream.failure)
            going = [stream for stream in streams.streams if not follower.ended(stream.node.name)]
            if len(going) == len(streams.streams) - len(follower.unheard):  # no node has reported its end
                first_end = None
                self._forsaken(going)
            else:
                first_end = time.monotonic() if first_end is None else first_end
                self._give_up(going, time.monotonic() - first_end)
            follower.turned.wait(LOOK)
            follower.turned.clear()

    def _give_up(self, going: Sequence[Stream], waited: float) -> None:
        """Give up nodes that are still running ``waited`` seconds after the others ended."""
        for stream in going:
            if min(waited, stream.away()) > LAST_WORD:
                self.follower.lost(stream.node.name, "no connection; what became of the run there is not known")
            elif waited > PATIENCE:
                self.follower.lost(stream.node.name, "its agent has not ended, but another node's agent has")

    def _forsaken(self, going: Sequence[Stream]) -> None:
        if going and all(stream.away() > FORSAKEN for stream in going):
            raise NodesFailedError(
                f"no connection to any node of run {self.follower.run} for {FORSAKEN / 60:.0f} min; "
                "whether it is still running is not known",
                reasons={},
                hint=f"clusterctl logs -f {self.follower.run}",
            )
