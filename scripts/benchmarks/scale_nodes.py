"""Commands on real nodes, for the model of ``scale_model``: seconds, and CPU time here and on the nodes.

- ``on_sandbox``: ``status``, ``check``, ``train`` and ``stop`` on sandbox nodes, each with its sshd and file system.
- ``status_of_many``: ``status`` of up to a thousand nodes on this machine: loopback addresses of one sshd, which starts
  a process for each connection. The controller does for them what it does for a thousand machines.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench_monitor import used, used_by_nodes
from scale_agents import Agents

from provision import sandbox

ROOT = Path(__file__).parents[2]
COMMAND = "import sys; from provision.cli import main; sys.exit(main())"
RELEASE = "0123456789ab"
# An environment that is only Python, and no rc file of this machine's user.
PREPARE = f"""
rm -f /root/.bashrc /root/.profile
mkdir -p /opt/llm/releases/{RELEASE}/bin
ln -sfn releases/{RELEASE} /opt/llm/current
touch /opt/llm/releases/{RELEASE}.ok
ln -sf {Path(sys.executable).resolve()} /opt/llm/releases/{RELEASE}/bin/python
"""
JOB = "import time\nprint('step 1 loss 1.0', flush=True)\ntime.sleep(600)\n"
COMMANDS = {
    "status": ("status",),
    "check": ("check",),
    "start": ("train", "--launcher", "plain", "--detach", "job.py"),
    "stop": ("stop",),
}
PORT = 2222
STARTING = 10.0  # seconds in which sshd writes its pid
LIMIT = 600.0  # seconds for a command


@dataclass(frozen=True)
class Measured:
    """A command on real nodes: seconds, the controller's CPU seconds and memory in MB, and the nodes' CPU seconds."""

    seconds: float
    here: float
    memory: float
    there: float


def run(argv: Sequence[str], folder: Path, on_nodes: Callable[[], float]) -> Measured:
    """Run clusterctl. Its exit code may report findings, or nodes that do not answer."""
    before, began = on_nodes(), time.monotonic()
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    with (folder / "output").open("w") as out:
        child = subprocess.Popen([sys.executable, "-c", COMMAND, *argv], cwd=folder, stdout=out, stderr=out, env=env)
        _, status, usage = os.wait4(child.pid, 0)
    seconds = time.monotonic() - began
    if os.waitstatus_to_exitcode(status) not in {0, 4, 5}:
        raise SystemExit(f"clusterctl {' '.join(argv)} failed:\n{(folder / 'output').read_text()[-2000:]}")
    return Measured(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, on_nodes() - before)


def on_sandbox(counts: Sequence[int]) -> dict[int, dict[str, Measured]]:
    """Every command on the first nodes of a sandbox, by their number."""
    with tempfile.TemporaryDirectory(prefix="clusterctl-scale-", dir="/var/tmp") as text:
        folder = Path(text)
        (folder / "job").mkdir()
        (folder / "job/job.py").write_text(JOB)
        options = sandbox.Options(nodes=max(counts), name=f"scale-{os.getpid()}", rootfs="host", directory=folder)
        with sandbox.up(options) as box:
            for node in box.nodes:
                box.enter(node.name, ["sh", "-c", PREPARE])
            names = [node.name for node in box.nodes]
            found: dict[int, dict[str, Measured]] = {}
            for count in counts:
                limit = ("-i", str(box.inventory), "--limit", ",".join(names[:count]))
                found[count] = {
                    name: run([*words, *limit], folder / "job", lambda: sum(used_by_nodes(box).values()))
                    for name, words in COMMANDS.items()
                }
            return found


def status_of_many(
    count: int, dead: int = 0, *, through_agents: bool = False, jumps: int = 0, dead_jumps: int = 0
) -> Measured:
    """``status`` of so many addresses of one sshd, and of others that never answer.

    ``through_agents``: all are the nodes of a run, whose agents tell of those that are alive. ``jumps``: as many jump
    hosts, which are addresses of that sshd too; the last ``dead_jumps`` never answer.
    """
    folder = Path(tempfile.mkdtemp(prefix="clusterctl-scale-", dir="/var/tmp"))
    silent = socket.create_server(("0.0.0.0", 0), backlog=512)  # the kernel accepts, and no banner follows
    sshd = _start_sshd(folder)
    try:
        addresses = [f"127.0.{1 + number // 250}.{1 + number % 250}" for number in range(count - dead)]
        hosts = [f"127.0.100.{1 + number}" for number in range(jumps)]
        host = " ".join((folder / "host.pub").read_text().split()[:2])
        (folder / "known_hosts").write_text("".join(f"[{each}]:{PORT} {host}\n" for each in (*addresses, *hosts)))
        hosts[jumps - dead_jumps :] = [f"{each}:{silent.getsockname()[1]}" for each in hosts[jumps - dead_jumps :]]
        lines = "".join(f"  node{number + 1:04}: {address}\n" for number, address in enumerate(addresses))
        lines += "".join(
            f"  node{number + 1:04}: 127.0.{8 + number // 250}.{1 + number % 250}:{silent.getsockname()[1]}\n"
            for number in range(count - dead, count)
        )
        ssh = f"{{user: root, key: {folder}/key, port: {PORT}, known_hosts: {folder}/known_hosts, jump_hosts: {hosts}}}"
        (folder / "inventory.yaml").write_text(f"prefix: {folder}/env/current\nssh: {ssh}\nnodes:\n{lines}")
        command = ["status", "-i", str(folder / "inventory.yaml")]
        if not through_agents:
            return run(command, folder, lambda: used(sshd, children=True))
        with Agents(folder / "env", [f"node{number + 1:04}" for number in range(count - dead)]) as agents:
            return run(command, folder, lambda: used(agents.hub))
    finally:
        silent.close()
        os.kill(sshd, 15)
        shutil.rmtree(folder, ignore_errors=True)  # sshd deletes its pid


def _start_sshd(folder: Path) -> int:
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    config = {
        "Port": PORT, "ListenAddress": "0.0.0.0", "HostKey": folder / "host", "AuthorizedKeysFile": folder / "key.pub",
        "StrictModes": "no", "UsePAM": "no", "PidFile": folder / "pid", "MaxStartups": 500, "LogLevel": "ERROR",
        "UseDNS": "no", "PrintMotd": "no", "PermitRootLogin": "prohibit-password",
    }  # fmt: skip
    (folder / "config").write_text("".join(f"{key} {value}\n" for key, value in config.items()))
    # root's shell without rc files: as fast as on a node that was set up for this.
    users = Path("/etc/passwd").read_text().splitlines()
    mine = [f"root:x:0:0:root:{folder}:/bin/sh" if line.startswith("root:") else line for line in users]
    (folder / "passwd").write_text("\n".join(mine) + "\n")
    Path("/run/sshd").mkdir(exist_ok=True)
    script = f"mount --bind {folder}/passwd /etc/passwd && exec {shutil.which('sshd')} -f {folder}/config"
    subprocess.run(["unshare", "-m", "--propagation", "private", "sh", "-c", script], check=True)
    until = time.monotonic() + STARTING
    while not (folder / "pid").exists() and time.monotonic() < until:
        time.sleep(0.01)
    return int((folder / "pid").read_text())
