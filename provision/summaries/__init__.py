"""The output of finished commands: a mapping for ``--json`` and a text. Pure."""

from __future__ import annotations

from provision.summaries._summary import Summary
from provision.summaries.command import ran, ran_rows
from provision.summaries.environment import packed, tooled
from provision.summaries.health import checked, finding_rows
from provision.summaries.nodes import deployed, listed, pruned, pushed, switched, verified
from provision.summaries.os_packages import os_packed
from provision.summaries.run_commands import collected, logs_data, stopped_shown
from provision.summaries.runs import run_shown
from provision.summaries.services import serviced
from provision.summaries.setup import created, enrolled, sandbox_up, sandboxes
from provision.summaries.training import trained

__all__ = [
    "Summary",
    "checked",
    "collected",
    "created",
    "deployed",
    "enrolled",
    "finding_rows",
    "listed",
    "logs_data",
    "os_packed",
    "packed",
    "pruned",
    "pushed",
    "ran",
    "ran_rows",
    "run_shown",
    "sandbox_up",
    "sandboxes",
    "serviced",
    "stopped_shown",
    "switched",
    "tooled",
    "trained",
    "verified",
]
