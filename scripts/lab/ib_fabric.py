"""An InfiniBand fabric in user space: ibsim, and the real tools and opensm on its hosts.

ibsim (packages ibsim-utils and libumad2sim0) simulates switches and adapters. What runs on a simulated host is the
real program with ``SIM_HOST`` and ``LD_PRELOAD`` in its environment; the library serves /dev/infiniband/umad* and those
files of /sys/class/infiniband that a program opens itself. So ``cat``, ``head`` and what dash's ``*`` lists are served,
and bash, busybox and dash's own ``<`` are not. ``counters``, ``link_layer`` and RoCE are not simulated. A manager in
reserve cannot be relied on to take over: ibsim drops the master's answer to its trap, and opensm waits for it for ever.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = ("ibsim", "opensm", "ibstat", "sminfo", "perfquery", "iblinkinfo", "saquery", "smpquery")
PATIENCE = 60.0  # seconds for anything that takes less than one on an idle machine
# The log is written as it happens; and a manager does not look for changes on its own, so that two masters stay and a
# port that comes back stays Initializing.
_OPENSM = """\
force_log_flush TRUE
sweep_interval 0
sweep_on_trap FALSE
"""
_NUMBERS = itertools.count()


def star(hosts: list[str], switch: str = "SW1", links: dict[str, str] | None = None) -> str:
    """A net file: every host at one port of one switch, in order.

    Args:
        hosts: names; the Nth is at port N of the switch.
        switch: its name.
        links: what ibsim shall know about a host's link, such as ``s=1 w=1`` (speed and width, bits of PortInfo).
    """
    links = links or {}
    lines = [f'Switch {max(8, len(hosts))} "{switch}"']
    lines += [f'[{port}] "{host}"[1] {links.get(host, "")}' for port, host in enumerate(hosts, 1)]
    for port, host in enumerate(hosts, 1):
        lines += ["", f'Hca 1 "{host}"', f'[1] "{switch}"[{port}] {links.get(host, "")}']
    return "\n".join(lines) + "\n"


class Fabric:
    """A running ibsim. ``fabric(...)`` makes one and ends it with all that was started on it."""

    def __init__(self, folder: Path, net: str) -> None:
        self.folder = folder
        self.name = f"clusterctl-{os.getpid()}-{next(_NUMBERS)}"
        (library,) = sorted(Path("/usr/lib").glob("*/umad2sim/libumad2sim.so"))[:1] or [None]
        if library is None:
            raise RuntimeError("libumad2sim.so is missing: apt-get install libumad2sim0")
        self._library = library
        self._managers: dict[str, subprocess.Popen[bytes]] = {}
        self._sent = 0
        self._talking = threading.Lock()
        (folder / "net").write_text(net)
        with (folder / "ibsim.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["ibsim", "-s", "net"],
                cwd=folder,
                env=self.environment() | {"IBSIM_SOCKNAME": self.name},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.console("")

    def environment(self, host: str = "") -> dict[str, str]:
        """The environment of a program; with ``host``, of one that runs on that simulated host."""
        plain = {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "LC_ALL": "C", "HOME": str(self.folder)}
        if not host:
            return plain
        units = self.folder / host / "units"
        if units.is_dir():
            plain |= {"PATH": f"{units}:{plain['PATH']}", "FABRIC_UNITS": str(units)}
        places = {"OSM_CACHE_DIR": str(self.folder / host), "OSM_TMP_DIR": str(self.folder / host)}
        return plain | places | {"IBSIM_SOCKNAME": self.name, "SIM_HOST": host, "LD_PRELOAD": str(self._library)}

    def home(self, host: str) -> Path:
        """The folder in which the host's programs run and its opensm keeps its files."""
        folder = self.folder / host
        folder.mkdir(exist_ok=True)
        return folder

    def console(self, command: str) -> str:
        """Give ibsim a command; returns its answer after the command has run."""
        with self._talking:
            return self._talk(command)

    def _talk(self, command: str) -> str:
        self._sent += 1
        mark = f"mark{self._sent}"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n{mark}\n")
        self._process.stdin.flush()
        answer = []
        for line in self._process.stdout:
            if f"'{mark}'" in line:  # an unknown command is named, and commands are carried out in order
                return "".join(answer)
            answer.append(line.removeprefix("sim> "))
        raise RuntimeError(f"ibsim ended: {(self.folder / 'ibsim.log').read_text()}")

    def run(self, host: str, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a program on a simulated host."""
        done = subprocess.run(
            argv,
            cwd=self.home(host),
            env=self.environment(host),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        self._forget_the_dead()
        return done

    def sh(self, host: str, script: str) -> subprocess.CompletedProcess[str]:
        """Run sh on a simulated host: dash, the one sh whose ``*`` the simulator's library serves.

        dash itself joins the simulator before it starts anything, so that its subshells are no clients of their own.
        """
        return self.run(host, "dash", "-c", f": /sys/class/infiniband/*\n{script}")

    def systemd(self, host: str, unit: str, *, oneshot: bool = False) -> Path:
        """Give a host a replacement of systemctl that knows ``unit`` and really starts and stops opensm.

        Args:
            host: its name.
            unit: ``opensm.service`` or ``opensmd.service``.
            oneshot: the unit stays active after opensm has exited, as Debian's does.

        Returns:
            Its folder, with ``opensm.log``, and ``UNIT.enabled`` and ``UNIT.pid`` for each unit.
        """
        folder = self.home(host) / "units"
        folder.mkdir()
        (folder / "systemctl").symlink_to(Path(__file__).parent / "standin_systemctl.sh")
        (folder / "opensm.conf").write_text(_OPENSM)
        (folder / unit).touch()
        if oneshot:
            (folder / f"{unit}.oneshot").touch()
        return folder

    def opensm(self, host: str, *options: str) -> subprocess.Popen[bytes]:
        """Start a subnet manager; returns when it is master of a subnet or in reserve."""
        home = self.home(host)
        log = home / "opensm.log"
        log.unlink(missing_ok=True)
        (home / "opensm.conf").write_text(_OPENSM)
        with (home / "opensm.out").open("wb") as out:
            process = subprocess.Popen(
                ["opensm", "-F", str(home / "opensm.conf"), *options, "-f", str(log)],
                cwd=home,
                env=self.environment(host),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        self._managers[host] = process
        self.wait_for(host, "SUBNET UP|Entering STANDBY")
        return process

    def wait_for(self, host: str, pattern: str) -> None:
        """Wait until the log of a host's opensm has a line that matches ``pattern``."""
        log, process = self.home(host) / "opensm.log", self._managers[host]
        deadline = time.monotonic() + PATIENCE
        while not re.search(pattern, log.read_text() if log.exists() else ""):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"opensm on {host} does not log {pattern}: {log.read_text() if log.exists() else ''}"
                )
            time.sleep(0.02)  # a log file gives no event

    def kill(self, host: str) -> None:
        """End the subnet manager of a host as a crash would."""
        process = self._managers.pop(host)
        process.kill()
        process.wait()
        self._forget_the_dead()

    def close(self) -> None:
        """End everything that was started."""
        for host in list(self._managers):
            self.kill(host)
        for path in self.folder.glob("*/units/*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        self._process.kill()
        self._process.communicate()

    def _forget_the_dead(self) -> None:
        """Free the places of clients that are gone: ibsim has ten, and dash ends without giving its own back."""
        for client, pid in re.findall(r"^Client (\d+): pid (\d+) connected", self.console("Attached"), re.MULTILINE):
            if not Path(f"/proc/{pid}").exists():
                self.console(f"X {client}")


@contextmanager
def fabric(folder: Path, net: str) -> Iterator[Fabric]:
    """A fabric that lives as long as the block."""
    made = Fabric(folder, net)
    try:
        yield made
    finally:
        made.close()
