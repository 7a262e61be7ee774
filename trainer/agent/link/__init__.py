"""The agents' link: one connection of every node's agent to rank 0's, messages, meetings, and copies of checkpoints."""


class LinkError(Exception):
    """The agents could not meet. The text names the missing nodes and the reason."""


class CopyError(Exception):
    """A file could not be copied. The text names it and says why."""


class DigestError(CopyError):
    """A copy differs from its recorded digest: the disk damaged it. ``holder`` has it as ``source``."""

    def __init__(self, holder: int, source: str) -> None:
        super().__init__("%s: its content differs from its recorded digest" % source)
        self.holder, self.source = holder, source
