"""What emulated machines hang on: processes that the kernel kills with this one, and a switch in a namespace."""

import contextlib
import os
import subprocess
from collections.abc import Sequence
from ipaddress import IPv4Network

from lab_run import LabError

SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def switch(stack: contextlib.ExitStack, names: Sequence[str], subnet: IPv4Network) -> int:
    """A bridge in a new network namespace, and this host's link to it. Returns the process that holds it."""
    holder = start(stack, ["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"])
    assert holder.stdout is not None
    holder.stdout.read(1)  # now the namespace is there
    cable = f"cclab{os.getpid()}"
    lines = ["link add switch up type bridge", "link set uplink master switch up"]
    for name in names:
        lines += [f"tuntap add dev {name} mode tap", f"link set {name} master switch up"]
    run(["ip", "link", "add", cable, "type", "veth", "peer", "name", "uplink", "netns", str(holder.pid)])
    # It goes with the namespace in any case, but that takes the kernel a moment.
    stack.callback(run, ["ip", "link", "delete", cable])
    run(["nsenter", f"--net=/proc/{holder.pid}/ns/net", "ip", "-batch", "-"], "\n".join(lines) + "\n")
    run(["ip", "address", "add", f"{subnet.network_address + 1}/{subnet.prefixlen}", "dev", cable])
    run(["ip", "link", "set", cable, "up"])
    return holder.pid


def start(stack: contextlib.ExitStack, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts what ends with us, and on leaving ``stack`` at the latest."""
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, "PATH": SYSTEM_PATH},
        bufsize=0,
    )

    def end() -> None:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    stack.callback(end)
    return process


def run(argv: Sequence[str], stdin: str = "") -> None:
    """Runs a program to its end.

    Raises:
        LabError: it failed.
    """
    done = subprocess.run(
        argv, input=stdin, capture_output=True, text=True, env={**os.environ, "PATH": SYSTEM_PATH}, check=False
    )
    if done.returncode:
        raise LabError(f"`{' '.join(argv)}` exited {done.returncode}: {done.stderr.strip()}")
