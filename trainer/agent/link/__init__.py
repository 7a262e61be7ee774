"""The agents' link: one connection of every node's agent to rank 0's, messages, meetings, and copies of checkpoints."""


class LinkError(Exception):
    """The agents could not meet. The text names the missing nodes and the reason."""


class CopyError(Exception):
    """A file could not be copied. The text names it and says why."""
