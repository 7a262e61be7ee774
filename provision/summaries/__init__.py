"""The output of finished commands: a mapping for ``--json`` and a text. Pure."""

from __future__ import annotations

from provision.output_text import Summary
from provision.summaries.bundles import os_pack_output, pack_output, tool_output
from provision.summaries.health import check_output, finding_rows
from provision.summaries.nodes import (
    command_output,
    command_rows,
    deploy_output,
    enroll_output,
    inventory_output,
    prune_output,
    push_output,
    releases_output,
    rollback_output,
    sandbox_up,
    sandboxes,
    services_output,
    verify_output,
)
from provision.summaries.runs import collect_output, logs_data, run_output, stop_output, train_output

__all__ = [
    "Summary",
    "check_output",
    "collect_output",
    "command_output",
    "command_rows",
    "deploy_output",
    "enroll_output",
    "finding_rows",
    "inventory_output",
    "logs_data",
    "os_pack_output",
    "pack_output",
    "prune_output",
    "push_output",
    "releases_output",
    "rollback_output",
    "run_output",
    "sandbox_up",
    "sandboxes",
    "services_output",
    "stop_output",
    "tool_output",
    "train_output",
    "verify_output",
]
