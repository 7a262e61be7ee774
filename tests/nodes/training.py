"""Two nodes with a real environment, and the commands about runs as their user types them."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import command

# The whole job runs as an ordinary user, at a prefix that is longer than the 127 bytes of a shebang.
ROOT = "/home/trainer/" + "/".join(["a-folder-of-a-long-name"] * 5)
PREFIX, RUNS = f"{ROOT}/current", f"{ROOT}/runs"
TRAINERS = Path(__file__).with_name("trainers")
PLAIN = Path(__file__).with_name("plain_trainers")


class Training:
    """A user's folder, ``folder``, with an inventory of the nodes of the sandbox ``box`` and with ``trainers``."""

    def __init__(self, folder, box, trainers):
        self.folder, self.box, self.trainers = folder, box, trainers
        self.nodes = [node.name for node in box.nodes]
        shutil.copytree(trainers, folder, dirs_exist_ok=True)

    def run(self, *argv, timeout=600, **options):
        """``clusterctl`` in the folder, to its end."""
        return command.run(*argv, cwd=self.folder, timeout=timeout, **options)

    def own(self, folder, trainers=None):
        """The same nodes for another folder, where no other test starts runs; with other trainers, with these alone."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("inventory.yaml", "id_ed25519", "known_hosts"):
            shutil.copy2(self.folder / name, folder)
        if self.trainers == TRAINERS and trainers is None:
            shutil.copy2(self.folder / "train.yaml", folder)
            for name in ("model", "data"):
                shutil.copytree(self.folder / name, folder / name)
        return Training(folder, self.box, trainers or self.trainers)

    def write(self, node, path, text):
        """A file of the user's on a node."""
        script = 'mkdir -p "${1%/*}" && cat >"$1" && chown -R trainer:trainer "${1%/*}"'
        result = self.box.enter(node, ["sh", "-c", script, "sh", path], stdin=text)
        assert result.returncode == 0, result.stderr

    def config(self, name, **changes):
        """A copy of train.yaml with other values, or more."""
        text = (self.folder / "train.yaml").read_text()
        for key, value in changes.items():
            text = re.sub(rf"^{key}: .*\n", "", text, flags=re.MULTILINE) + f"{key}: {value}\n"
        (self.folder / name).write_text(text)
        return name

    def link(self, bundle):
        """The bundle lies in the folder."""
        (self.folder / bundle.name).hardlink_to(bundle)

    @staticmethod
    def has_release(root):
        """Whether a release is below a node's root."""
        return Path(f"{root}{ROOT}/current").is_symlink()

    @staticmethod
    def copy_release(source, target):
        """The release of one node's root to another's. Programs that run there write nothing to it: it is read-only."""
        script = (
            'mkdir -p "$2$3" && chown -R --reference="$1$3" "$2/home/trainer" && '
            'cp -a "$1$3/releases" "$1$3/current" "$2$3"'
        )
        subprocess.run(["sh", "-c", script, "sh", source, target, ROOT], check=True)

    def deploy(self, bundle):
        self.link(bundle)
        self.deployed = self.run("deploy", "--inventory", "inventory.yaml")
        assert self.deployed.returncode == 0, self.deployed.stderr

    def start(self, *argv, until, first=""):
        """``clusterctl train`` on its way, once a line of its output has matched ``until``; see ``Attached``.

        ``first``: Python that runs before the command, to change its defaults.
        """
        return Attached(self, argv, until, first)

    def detached(self, *argv):
        """The id of a detached run."""
        result = self.run("train", "--nodes", "2", "--detach", *argv)
        assert result.returncode == 0, result.stderr
        return self.last_run().name

    def last_run(self):
        """This machine's record of the newest run: ids start with the second in which a run was created."""
        stamp = len("20260101-000000")
        return max((self.folder / "runs").iterdir(), key=lambda path: (path.name[:stamp], path.stat().st_mtime_ns))

    def record(self, run=None):
        folder = self.folder / "runs" / run if run else self.last_run()
        return json.loads((folder / "run.json").read_text())

    def on(self, node, *argv):
        """The output of a program that root runs on a node."""
        result = self.box.enter(node, argv)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def marked(self, *names, among=None, run=""):
        """Processes of ``run`` or of any run on the nodes, as ``node:pid``.

        Only those that have all of ``names`` in their environment.
        """
        found = []
        mark = f"^CLUSTERCTL_RUN={run}" + ("$" if run else "")
        for node in among or self.nodes:
            script = f"grep -lz '{mark}' /proc/[0-9]*/environ 2>/dev/null; true"
            for name in names:
                script = f"({script}) | xargs -r grep -lz '^{name}=' 2>/dev/null; true"
            found += [f"{node}:{path.split('/')[2]}" for path in self.on(node, "sh", "-c", script).split()]
        return found

    def pids(self, node, pattern):
        """Processes of a run on a node whose command line holds the regular expression ``pattern``."""
        script = (
            "for pid in $(grep -lz '^CLUSTERCTL_RUN=' /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3); do "
            'printf "%s %s\\n" "$pid" "$(tr "\\000" " " <"/proc/$pid/cmdline")"; done 2>/dev/null; true'
        )
        lines = self.on(node, "sh", "-c", script).splitlines()
        return [int(line.split()[0]) for line in lines if re.search(pattern, line)]

    def kill(self, node, pid, number=signal.SIGKILL):
        self.on(node, "kill", f"-{int(number)}", str(pid))

    def rank(self, node, run=""):
        """The pid of the process that is a rank of the run on a node."""
        return min(int(each.partition(":")[2]) for each in self.marked("LOCAL_RANK", among=[node], run=run))

    def agent(self, node, run=None):
        """The agent's two processes on a node: its guard and its supervisor."""
        run = run or self.last_run().name
        rank = self.nodes.index(node)
        state = json.loads(self.on(node, "cat", f"{RUNS}/{run}/logs/node{rank}/state.json"))
        parent = self.on(node, "sh", "-c", f"cut -d')' -f2 /proc/{state['pid']}/stat").split()[1]
        return int(parent), state["pid"]

    def gone_within(self, seconds, among=None, run=""):
        """How long it took until no process of the run, or of any, was left; fails after ``seconds``."""
        began = time.monotonic()
        while left := self.marked(among=among, run=run):
            assert time.monotonic() - began < seconds, self.described(left)
            time.sleep(0.2)  # no event here shows when the nodes are done
        return time.monotonic() - began

    def described(self, left):
        return "\n".join(
            f"{each} " + self.box.enter(node, ["sh", "-c", f"tr '\\000' ' ' </proc/{pid}/cmdline"]).stdout
            for each in left
            for node, _, pid in [each.partition(":")]
        )


class Attached:
    """A running command; ``finish`` waits for its end. Its output is read all the time."""

    def __init__(self, training, argv, until, first=""):
        program = [sys.executable, "-c", f"{first}\nfrom provision.cli import main\nmain()"]
        self.process = subprocess.Popen(
            [*(program if first else [command.CLUSTERCTL]), *map(str, argv)],
            cwd=training.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self.until(until)

    def until(self, pattern):
        """Reads on, to the first line that matches ``pattern``."""
        for line in self.process.stdout:
            self.output += line
            if re.search(pattern, line):
                return
        self.end()
        raise AssertionError(f"nothing like {pattern!r}:\n{self.output}")

    def end(self):
        """However far it has come."""
        self.process.kill()
        self.process.stdout.close()
        self.process.wait()

    def send(self, number):
        self.process.send_signal(number)

    def finish(self, timeout=120):
        """The exit code; ``output`` is complete then."""
        rest, _ = self.process.communicate(timeout=timeout)
        self.output += rest
        # A rank's output is indented or follows its name; clusterctl's own lines start at the margin.
        assert not re.search(r"^Traceback", self.output, re.MULTILINE), self.output
        return self.process.returncode


def wait_until(true, what, seconds):
    """Waits until ``true()``; fails after so many seconds with ``what`` in the message."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, f"not within {seconds} s: {what}"
        time.sleep(0.05)  # only files of the node show the progress
