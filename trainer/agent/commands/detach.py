"""Starts a daemon that outlives the session it was started from.

A session of its own and no descriptor of the starter's is enough, but where systemd-logind was told to end what a
user leaves behind (``KillUserProcesses=yes``). There the daemon is moved out of the session's scope by
``systemd-run --user --scope``; that lasts beyond the user's last session only where the user lingers
(loginctl(1), logind.conf(5)), which only root may decide, so it is said.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import subprocess
import sys
from pathlib import Path
from typing import Callable, List, NamedTuple, Optional, Tuple

PATIENCE = 5.0  # seconds for a question to logind
_MOST = 4096  # descriptors that this process may have open: it has opened hardly any
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
    """What to put before the daemon's command, and what the user should know."""
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
    """Ask. Where there is no logind, or it does not answer, it ends nothing."""
    cgroup = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    if not re.search(r"/session-[^/]*\.scope", cgroup):
        return Logind()
    user = user_name()
    return Logind(
        in_session=True,
        kills=_property("KillUserProcesses") == "b true",
        spared=_words(_property("KillExcludeUsers")),
        only=_words(_property("KillOnlyUsers")),
        lingers=_said(["loginctl", "show-user", user, "--property=Linger", "--value"]) == "yes",
    )


def user_name() -> str:
    """The user's name, or number."""
    return owner_name(os.getuid())


def owner_name(uid: int) -> str:
    """A user's name; the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _property(name: str) -> str:
    return _said(["busctl", "get-property", *_MANAGER, name])


def _words(said: str) -> Tuple[str, ...]:
    """The strings of an array as busctl prints it: ``as 2 "root" "alice"``."""
    return tuple(re.findall(r'"([^"]*)"', said))


def _said(argv: List[str]) -> str:
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
    """Start a daemon and wait for the line by which it says how its start went.

    The daemon writes one line to its stdout and lets go of it; until then it says on stdout and stderr what is
    wrong. Returns the first line and whatever else came.
    """
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd="/",  # it must not keep a file system from being unmounted
    ) as daemon:
        assert daemon.stdout is not None
        said = daemon.stdout.read().decode("utf-8", "replace")
        daemon.returncode = 0  # nobody waits for it: it is to outlive us
    return _parted(said)


def fork(work: Callable[[], int]) -> Tuple[str, str]:
    """The same without another program: a copy of this process does ``work`` as a daemon.

    It saves a second start of Python, which sixteen nodes on one machine feel.
    """
    ours, theirs = os.pipe()
    if os.fork() == 0:
        code = 1
        try:
            _detach(theirs)
            code = work()
        except BaseException:  # noqa: BLE001 - nothing above this process may go on
            import traceback  # noqa: PLC0415 - imported only after a crash

            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os._exit(code)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        return _parted(pipe.read().decode("utf-8", "replace"))


def _detach(out: int) -> None:
    """A session of its own, and no descriptor of the starter's but ``out`` as stdout and stderr."""
    os.setsid()
    os.chdir("/")  # it must not keep a file system from being unmounted
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, source in ((0, nothing), (1, out), (2, out)):
        os.dup2(source, number)
    os.closerange(3, _MOST)


def _parted(said: str) -> Tuple[str, str]:
    """What a daemon has said: its one line, and whatever else."""
    lines = said.splitlines()
    told = [line for line in lines if line.startswith("{")]
    return (told[-1] if told else ""), "\n".join(line for line in lines if not line.startswith("{"))
