"""What a finished command says: one mapping for ``--json``, one text for people. Pure; one file a room of ``cli``."""

from __future__ import annotations

from provision.summaries._summary import Summary
from provision.summaries.environment import packed, tooled
from provision.summaries.nodes import deployed, listed, pruned, pushed, switched, verified
from provision.summaries.os_packages import os_packed
from provision.summaries.services import serviced
from provision.summaries.setup import enrolled, sandbox_up, sandboxes
from provision.summaries.training import trained

__all__ = [
    "Summary",
    "deployed",
    "enrolled",
    "listed",
    "os_packed",
    "packed",
    "pruned",
    "pushed",
    "sandbox_up",
    "sandboxes",
    "serviced",
    "switched",
    "tooled",
    "trained",
    "verified",
]
