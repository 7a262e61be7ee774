"""``agent start`` and ``agent run``: begin a plan as a daemon, or in the foreground."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any, Callable, Dict

from commands.detach import ask_logind, fork, spawn, user_name, way
from contract.untrusted import UntrustedError, parse_object
from life import guard
from plan import NodePlan

LOG = "agent.log"  # what the agent itself has to say: tracebacks


def start(plan: NodePlan) -> Dict[str, Any]:
    """Start the daemon and wait until it owns the run. Says how that went, see ``__main__.py``."""
    before, notice = way(ask_logind(), user_name())
    said = other = ""
    if before:
        flags = "-IB" if sys.dont_write_bytecode else "-I"
        argv = [sys.executable, flags, str(Path(__file__).absolute().parents[1]), "daemon", str(plan.path)]
        said, other = spawn([*before, *argv, *(["--notice", notice] if notice else [])])
        if not said:  # the user's own systemd cannot be reached: without it
            notice = "%s; systemd-run cannot move it out of the session: %s" % (
                notice or "the run stops at logout",
                other,
            )
    if not said:
        said, other = fork(lambda: daemon(plan, notice or ""))
    if not said:
        return {"started": False, "error": other.strip() or "the agent exited without reporting; see %s" % LOG}
    try:
        return parse_object(said)
    except UntrustedError as error:
        return {"started": False, "error": "the agent's answer %s; see %s" % (error, LOG)}


def daemon(plan: NodePlan, notice: str) -> int:
    """Be the daemon: own the run to its end. ``start`` reads what is written to stdout until both processes let go."""

    def ready(said: Dict[str, Any]) -> None:
        if said:
            with contextlib.suppress(OSError):  # the starter may be gone already
                os.write(1, json.dumps(said).encode() + b"\n")
        _let_go(plan)

    return guard.run(plan, ready, notice=notice)


def _let_go(plan: NodePlan) -> None:
    """From now on stdout and stderr are the agent's own log."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    try:
        fd = os.open(plan.logs / LOG, flags, 0o644)
    except OSError:  # a full disk
        fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for number in (1, 2):
        os.dup2(fd, number)
    os.close(fd)


def run(plan: NodePlan) -> int:
    """Own the run in the foreground; its events are printed as well."""
    return guard.run(plan, _complaining(), echo=1)


def _complaining() -> Callable[[Dict[str, Any]], None]:
    def ready(said: Dict[str, Any]) -> None:
        if said.get("error"):
            sys.stderr.write("agent: %s\n" % said["error"])

    return ready
