"""``agent start`` and ``agent run``: start a plan as a daemon that outlives the session, or in the foreground.

A new session and no inherited descriptor are enough, except where systemd-logind ends what a user leaves behind
(``KillUserProcesses=yes``). There ``systemd-run --user --scope`` moves the daemon out of the session's scope. After the
user's last session that lasts only where the user lingers (loginctl(1), logind.conf(5)). Only root may enable that, so
the run starts with a notice.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from .contract.untrusted import UntrustedError, parse_object
from .run_files import EVENTS, NodePlan, read_state, running_agents
from .supervisor import guard

PATIENCE = 5.0  # seconds for an answer of logind
_MOST = 4096  # highest descriptor that this process may have open: it opens few
SCOPE = ("systemd-run", "--user", "--scope", "--quiet", "--collect", "--")
_MANAGER = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")


class Logind(NamedTuple):
    """What logind would do with this user's processes at logout."""

    in_session: bool = False  # this process belongs to a session
    kills: bool = False  # KillUserProcesses
    spared: Tuple[str, ...] = ()  # KillExcludeUsers
    only: Tuple[str, ...] = ()  # KillOnlyUsers
    lingers: bool = False


def way(logind: Logind, user: str) -> Tuple[List[str], Optional[str]]:
    """The prefix of the daemon's command, and a notice for the user."""
    aimed_at = user not in logind.spared and (not logind.only or user in logind.only)
    if not (logind.in_session and logind.kills and aimed_at):
        return [], None
    if logind.lingers:
        return list(SCOPE), None
    return list(SCOPE), (
        "this machine kills the processes of %s at the last logout (KillUserProcesses=yes in logind.conf), "
        "so the run stops then. As root, run: loginctl enable-linger %s" % (user, user)
    )


def ask_logind() -> Logind:
    """Ask logind. Where it is missing or does not answer, it ends nothing."""
    cgroup = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    if not re.search(r"/session-[^/]*\.scope", cgroup):
        return Logind()
    user = user_name()
    return Logind(
        in_session=True,
        kills=_property("KillUserProcesses") == "b true",
        spared=_words(_property("KillExcludeUsers")),
        only=_words(_property("KillOnlyUsers")),
        lingers=_output_of(["loginctl", "show-user", user, "--property=Linger", "--value"]) == "yes",
    )


SYSTEM = 1000  # logind never cleans up after users with lower numbers


def removes_ipc() -> bool:
    """Whether logind deletes this user's files in /dev/shm at the last logout."""
    if os.getuid() < SYSTEM or _property("RemoveIPC") != "b true":
        return False
    return _output_of(["loginctl", "show-user", user_name(), "--property=Linger", "--value"]) != "yes"


def user_name() -> str:
    """This user's name, or its number."""
    return owner_name(os.getuid())


def owner_name(uid: int) -> str:
    """A user's name; the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _property(name: str) -> str:
    return _output_of(["busctl", "get-property", *_MANAGER, name])


def _words(text: str) -> Tuple[str, ...]:
    """The strings of an array as busctl prints it: ``as 2 "root" "alice"``."""
    return tuple(re.findall(r'"([^"]*)"', text))


def _output_of(argv: List[str]) -> str:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace").strip()


def spawn(argv: List[str]) -> Tuple[str, str]:
    """Start a daemon and wait for the line that reports the start.

    The daemon writes errors and one JSON line to its stdout and stderr, and then closes them. Returns that line and
    the other output.
    """
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd="/",  # so that it does not block unmounting
    ) as daemon:
        assert daemon.stdout is not None
        output = daemon.stdout.read().decode("utf-8", "replace")
        daemon.returncode = 0  # Popen must not wait for it: it outlives this process
    return _split_output(output)


def fork(work: Callable[[], int]) -> Tuple[str, str]:
    """Like ``spawn``, without another program: a copy of this process does ``work`` as a daemon.

    It saves a second start of Python, which matters for sixteen nodes on one machine.
    """
    ours, theirs = os.pipe()
    if os.fork() == 0:
        code = 1
        try:
            _detach(theirs)
            code = work()
        except BaseException:  # noqa: BLE001 - the caller's code must not continue in this process
            import traceback  # noqa: PLC0415 - imported only after a crash

            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os._exit(code)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        return _split_output(pipe.read().decode("utf-8", "replace"))


def _detach(out: int) -> None:
    """Start a new session, and close all inherited descriptors except ``out``, which becomes stdout and stderr."""
    os.setsid()
    os.chdir("/")  # so that it does not block unmounting
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, source in ((0, nothing), (1, out), (2, out)):
        os.dup2(source, number)
    os.closerange(3, _MOST)


def _split_output(output: str) -> Tuple[str, str]:
    """Split a daemon's output into its JSON line and the rest."""
    lines = output.splitlines()
    answers = [line for line in lines if line.startswith("{")]
    return (answers[-1] if answers else ""), "\n".join(line for line in lines if not line.startswith("{"))


LOOK = 0.2  # seconds between looks for an agent
LOG = "agent.log"  # the agent's own messages: tracebacks


def start(plan: NodePlan) -> Dict[str, Any]:
    """Start the daemon and wait until it owns the run. Returns the answer that ``__main__.py`` documents."""
    before, notice = way(ask_logind(), user_name())
    answer = other = ""
    if before:
        flags = "-IB" if sys.dont_write_bytecode else "-I"
        argv = [sys.executable, flags, str(Path(__file__).absolute().parent), "daemon", str(plan.path)]
        answer, other = spawn([*before, *argv, *(["--notice", notice] if notice else [])])
        if not answer:  # the user's systemd cannot be reached: start without it
            notice = "%s; systemd-run cannot move it out of the session: %s" % (
                notice or "the run stops at logout",
                other,
            )
    if not answer:
        answer, other = fork(lambda: daemon(plan, notice or ""))
    if not answer:
        return {"started": False, "error": other.strip() or "the agent exited without reporting; see %s" % LOG}
    try:
        return parse_object(answer)
    except UntrustedError as error:
        return {"started": False, "error": "the agent's answer %s; see %s" % (error, LOG)}


def wait_for_agent(plan: NodePlan, after: int, patience: float) -> Dict[str, Any]:
    """Wait for an agent that another program starts. Returns what ``start`` returns.

    An agent may have exited already: its events are behind byte ``after`` then. Waits for ``patience`` seconds.
    """
    limit = time.monotonic() + patience
    while True:
        agents = running_agents(read_state(plan.logs))
        events = plan.logs / EVENTS
        if agents or (events.exists() and events.stat().st_size > after):
            return {"started": True, "pid": agents[0][0] if agents else None, "at": after}
        if time.monotonic() >= limit:
            return {"started": False, "error": "no agent started within %g s" % patience}
        time.sleep(LOOK)  # there is nothing of it yet that has an event


def daemon(plan: NodePlan, notice: str) -> int:
    """Be the daemon: own the run until its end. ``start`` reads stdout until both processes have closed it."""

    def ready(answer: Dict[str, Any]) -> None:
        if answer:
            with contextlib.suppress(OSError):  # the starter may have exited
                os.write(1, json.dumps(answer).encode() + b"\n")
        _let_go(plan)

    return guard.run(plan, ready, notice=notice)


def _let_go(plan: NodePlan) -> None:
    """Redirect stdout and stderr to the agent's own log."""
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
    return guard.run(plan, _error_reporter(), echo=1)


def _error_reporter() -> Callable[[Dict[str, Any]], None]:
    def ready(answer: Dict[str, Any]) -> None:
        if answer.get("error"):
            sys.stderr.write("agent: %s\n" % answer["error"])

    return ready
