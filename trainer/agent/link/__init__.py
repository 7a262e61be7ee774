"""The agents' link: each agent's connection to one of them, the hub; messages, meetings, and copies of checkpoints."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Optional, Set

Offers = Dict[int, Dict[str, Any]]  # of a meeting, by the agent's position


class LinkError(Exception):
    """The agents could not meet. The text names the missing nodes and the reason."""


class HubLostError(LinkError):
    """The hub of the link exited or is silent, or this agent is the hub and too few others are connected."""


class RefusedLinkError(LinkError):
    """The hub refuses this agent: it does not belong to the run, or no longer."""


class CopyError(Exception):
    """A file could not be copied. The text names it and says why."""


class HolderLostError(CopyError):
    """The node at the position ``holder``, from which or through which files are copied, is lost."""

    def __init__(self, holder: int) -> None:
        super().__init__("the node is lost")
        self.holder = holder


class Tolerance(NamedTuple):
    """How a meeting does without agents that are lost.

    Attributes:
        silence: the seconds of silence after which an agent counts as lost.
        enough: whether the agents at these positions may decide for all.
        agents: the number of agents that exist; None: all may come.
    """

    silence: Callable[[], float]
    enough: Callable[[Set[int]], bool]
    agents: Optional[int] = None


class DigestError(CopyError):
    """A copy differs from its recorded digest: the disk damaged it. ``holder`` has it as ``source``."""

    def __init__(self, holder: int, source: str) -> None:
        super().__init__("%s: its content differs from its recorded digest" % source)
        self.holder, self.source = holder, source
