"""The same four steps for each side: a block in /etc/hosts, a limits file, a block in /etc/fstab, the size of /dev/shm.

The peers come from PyPI into an environment of their own; Ansible needs Python on the nodes, the others do not.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from bench_measure import BenchError, Usage, progress, run

from provision.sandbox import Sandbox

PEERS = ("ansible-core", "pyinfra")
SHM = 64  # MiB
HOSTS_MARK, SHM_MARK = "# {mark} bench nodes", "# {mark} bench shm"

INVENTORY = "services:\n  hosts:\n  limits: {{memlock: 4096, nofile: 2000, shm: {shm}M}}\n"

PLAYBOOK = """\
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.blockinfile: {{path: /etc/hosts, marker: "{hosts_mark}", block: "{hosts}"}}
    - ansible.builtin.copy: {{dest: /etc/security/limits.d/90-bench.conf, mode: "0644", content: "{limits}"}}
    - ansible.builtin.blockinfile: {{path: /etc/fstab, marker: "{shm_mark}", block: "{fstab}"}}
    - ansible.builtin.shell: |
        now=$(stat -f -c "%b %S" /dev/shm); [ $((${{now% *}} * ${{now#* }})) -eq {size} ] && exit 0
        mount -o remount,size={shm}m /dev/shm && echo changed
      register: shm
      changed_when: "'changed' in shm.stdout"
"""

ANSIBLE_CFG = """\
[defaults]
forks = 32
host_key_checking = true
[ssh_connection]
pipelining = true
ssh_args = -F {config} -o ControlMaster=auto -o ControlPersist=60s
"""

DEPLOY = """\
import io
from pyinfra.operations import files, server

files.block(path="/etc/hosts", content={hosts!r}, marker={hosts_mark!r})
files.put(src=io.StringIO({limits!r}), dest="/etc/security/limits.d/90-bench.conf", mode="644")
files.block(path="/etc/fstab", content={fstab!r}, marker={shm_mark!r})
server.shell(commands=[
    'now=$(stat -f -c "%b %S" /dev/shm); '
    '[ $((${{now% *}} * ${{now#* }})) -eq {size} ] || mount -o remount,size={shm}m /dev/shm'
])
"""


class Sides:
    """What each side runs for one pass over all nodes."""

    def __init__(
        self,
        clusterctl: Path,
        box: Sandbox,
        folder: Path,
        peers: Path,
        ssh_config: Path,
        ports: Mapping[str, int] | None = None,
    ) -> None:
        """``ports``: by node name, the local port at which a relay reaches it."""
        self.box, self.folder, self.peers, self.ssh_config = box, folder, peers, ssh_config
        known_hosts = folder / box.known_hosts.name
        inventory = box.inventory.read_text()
        if ports:
            keys = known_hosts.read_text()
            for node in box.nodes:
                there = f"{{address: 127.0.0.1, port: {ports[node.name]}}}"
                inventory = inventory.replace(f"  {node.name}: {node.address}\n", f"  {node.name}: {there}\n")
                keys = keys.replace(f"\n{node.address} ", f"\n[127.0.0.1]:{ports[node.name]} ")
            known_hosts.write_text(keys)
        self._clusterctl = clusterctl
        hosts = "\n".join(f"{node.address} {node.name}" for node in box.nodes)
        limits = "".join(
            f"{who} - {item} {value}\n"
            for who in ("*", "root")
            for item, value in (("memlock", 4096), ("nofile", 2000))
        )
        words = {
            "hosts": hosts, "limits": limits, "shm": SHM, "size": SHM << 20,
            "fstab": f"tmpfs /dev/shm tmpfs rw,nosuid,nodev,size={SHM}m 0 0",
        }  # fmt: skip
        (folder / "inventory.yaml").write_text(inventory + INVENTORY.format(shm=SHM))
        escaped = {key: value.replace("\n", "\\n") if isinstance(value, str) else value for key, value in words.items()}
        (folder / "play.yaml").write_text(PLAYBOOK.format(hosts_mark=HOSTS_MARK, shm_mark=SHM_MARK, **escaped))
        (folder / "ansible.cfg").write_text(ANSIBLE_CFG.format(config=ssh_config))
        (folder / "hosts.ini").write_text("".join(f"{node.name}\n" for node in box.nodes))
        (folder / "deploy.py").write_text(DEPLOY.format(hosts_mark=HOSTS_MARK, shm_mark=SHM_MARK, **words))
        lines = "".join(
            f"    ({node.name!r}, {{'ssh_hostname': {('127.0.0.1' if ports else node.address)!r}, "
            f"'ssh_port': {ports[node.name] if ports else 22}, 'ssh_user': 'root', 'ssh_key': {str(box.key)!r}, "
            f"'ssh_known_hosts_file': {str(known_hosts)!r}, 'ssh_strict_host_key_checking': 'yes'}}),\n"
            for node in box.nodes
        )
        (folder / "targets.py").write_text(f"nodes = [\n{lines}]\n")

    def ours(self, _memory: object = None) -> Usage:
        """``clusterctl services apply``."""
        return self._run([self._clusterctl, "services", "apply", "--json"])

    def pyinfra(self, _memory: object = None) -> Usage:
        """``pyinfra``, with as many nodes at once as there are."""
        return self._run([self.peers / "bin/pyinfra", "-y", "--parallel", "32", "targets.py", "deploy.py"])

    def ansible(self, _memory: object = None) -> Usage:
        """``ansible-playbook`` with pipelining and 32 forks, its connections kept from pass to pass."""
        return self._run([self.peers / "bin/ansible-playbook", "-i", "hosts.ini", "play.yaml"])

    def _run(self, argv: list[str | Path]) -> Usage:
        environ = [f"ANSIBLE_CONFIG={self.folder / 'ansible.cfg'}", f"HOME={self.folder}", "LC_ALL=C.UTF-8"]
        return run(["env", *environ, *argv], cwd=self.folder).usage


def install(folder: Path) -> Path:
    """The peers in an environment of their own, made once."""
    if not (folder / "bin/pyinfra").exists():
        with progress(f"installing {', '.join(PEERS)}"):
            run([sys.executable, "-m", "venv", folder])
            run([folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PEERS])
    return folder


def versions(peers: Path) -> str:
    """Theirs, for the head of the table."""
    done = subprocess.run([peers / "bin/python", "-m", "pip", "list", "--format=json"], capture_output=True, check=True)
    found = {each["name"]: each["version"] for each in json.loads(done.stdout)}
    return ", ".join(f"{name} {found[name]}" for name in PEERS)


def sessions(box: Sandbox) -> dict[str, int]:
    """How often sshd has started a command on each node since the last call, as ~/.ssh/rc counts it: see sshd(8)."""
    found = {}
    for node in box.nodes:
        script = (
            "f=/root/sessions; [ -e $f ] && wc -c <$f || echo 0; : >$f; echo 'printf x >>/root/sessions' >/root/.ssh/rc"
        )
        done = box.enter(node.name, ["sh", "-c", script])
        if done.returncode:
            raise BenchError(f"{node.name}: {done.stderr.strip()}")
        found[node.name] = int(done.stdout)
    return found
