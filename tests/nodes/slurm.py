"""Real Slurm on rehearsal nodes: Debian's munged, slurmctld and slurmd, extracted by ``scripts/setup``.

slurmd needs a cgroup even with ``proctrack/linuxproc``. It refuses cgroup v2 where the kernel has both kinds, so every
node gets a tmpfs with the v1 freezer alone.
"""

import io
import os
import subprocess
import tarfile
import time
from pathlib import Path

EXTRACTED = Path(os.environ.get("XDG_CACHE_HOME") or "/var/cache") / "clusterctl/slurm"
CONF = """\
ClusterName=lab
SlurmctldHost={head}({address})
AuthType=auth/munge
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmUser=root
StateSaveLocation=/var/lib/slurm-s
SlurmdSpoolDir=/var/lib/slurm-d
PluginDir=/usr/lib/x86_64-linux-gnu/slurm-wlm
ReturnToService=2
JobRequeue=1
KillWait=5
SlurmdTimeout=10
BatchStartTimeout=10
MessageTimeout=5
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes={all} Default=YES State=UP MaxTime=INFINITE PriorityTier=1
PartitionName=urgent Nodes={all} State=UP MaxTime=INFINITE PriorityTier=10
PartitionName=small Nodes={head} State=UP MaxTime=INFINITE
"""
PREPARE = """\
set -eu
tar -xf - -C /
cd /usr/sbin
for each in slurmctld slurmd slurmstepd; do ln -sf "$each-wlm" "$each"; done
mkdir -p /etc/munge /run/munge /var/log/munge /var/lib/munge /var/lib/slurm-s /var/lib/slurm-d
chown -R root:root /etc/munge /var/log/munge /var/lib/munge
chmod 0700 /etc/munge
chmod 0755 /run/munge
ldconfig
mount -t tmpfs none /sys/fs/cgroup
mkdir -p /sys/fs/cgroup/freezer
mount -t cgroup -o freezer none /sys/fs/cgroup/freezer
munged --force
"""
DAEMON = "setsid {0} -D >/tmp/{0}.log 2>&1 </dev/null & echo $!"
ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}


class Slurm:
    """Slurm on a sandbox's nodes. The first node has the controller, all nodes are of the partition ``main``."""

    def __init__(self, box):
        self.box = box
        self.nodes = [node.name for node in box.nodes]
        addresses = {node.name: node.address for node in box.nodes}
        head = self.nodes[0]
        lines = "\n".join(
            f"NodeName={name} NodeAddr={address} CPUs=2 State=UNKNOWN" for name, address in addresses.items()
        )
        conf = CONF.format(head=head, address=addresses[head], nodes=lines, all=",".join(self.nodes))
        extra = {
            "etc/slurm/slurm.conf": conf.encode(),
            "etc/slurm/cgroup.conf": b"CgroupAutomount=yes\nCgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n",
            "etc/munge/munge.key": os.urandom(128),
        }
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for folder in ("usr/bin", "usr/sbin", "usr/lib/x86_64-linux-gnu"):
                tar.add(EXTRACTED / folder, arcname=folder)
            for name, data in extra.items():
                info = tarfile.TarInfo(name)
                info.size, info.mode = len(data), 0o600 if name.endswith("key") else 0o644
                tar.addfile(info, io.BytesIO(data))
        for name in self.nodes:
            self._enter(name, PREPARE, archive.getvalue())
        self._enter(head, DAEMON.format("slurmctld"))
        self.slurmd = {name: int(self._enter(name, DAEMON.format("slurmd"))) for name in self.nodes}
        self.wait(lambda: self.states() == dict.fromkeys(self.nodes, "idle"), 30, lambda: str(self.states()))

    def on(self, script, node=None, check=True):
        """The output of a script on a node, the first by default."""
        done = self.box.enter(node or self.nodes[0], ["sh", "-c", script], timeout=60)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def states(self):
        """Slurm's states of the nodes, by name."""
        lines = self.on("timeout 20 sinfo -h -N -p main -o '%N %t'", check=False).splitlines()
        return dict(line.split() for line in lines)

    def job(self, job):
        """Slurm's fields of a job."""
        text = self.on(f"timeout 20 scontrol -o show job {job}", check=False)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def jobs(self):
        """The jobs that have not ended: by id, their states. A controller that is busy does not answer in time."""
        text = self.on("timeout 20 squeue -h -o '%i %T' || echo '? UNKNOWN'")
        return dict(line.split() for line in text.splitlines())

    def wait(self, done, seconds, describe=lambda: ""):
        """Wait until ``done()``; Slurm has no event for a change."""
        until = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < until, describe() or "it did not happen in time"
            time.sleep(0.5)

    def start_slurmd(self, node):
        self._enter(node, DAEMON.format("slurmd"))

    def _enter(self, node, script, stdin=b""):
        pid = str(self.box.init_process(node).pid)
        argv = ["nsenter", "--target", pid, "--mount", "--uts", "--ipc", "--net", "--pid", "--", "sh", "-c", script]
        done = subprocess.run(argv, input=stdin, capture_output=True, timeout=60, check=False, env=ENV)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.decode().strip()
