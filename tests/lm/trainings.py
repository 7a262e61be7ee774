"""The trainer's programs, run as their user runs them, with the Python of a real environment."""

import json
import signal
import subprocess
from pathlib import Path

from forks import HERE

# A model that trains in a second.
TINY = ["--data", "first", "--n-layer", "2", "--n-head", "2", "--n-embd", "32", "--block-size", "32"]
TINY += ["--eval-interval", "3", "--eval-iters", "3", "--max-iters", "6", "--keep", "0", "--trackers", "none"]


class Run:
    """One training of a session: ``out``, and why it was refused."""

    def __init__(self, folder, argv):
        self.out = folder / argv[argv.index("--out") + 1] if "--out" in argv else None
        self.refused = None

    def records(self, key):
        """The last value of ``key`` for every step that has one."""
        lines = (json.loads(line) for line in (self.out / "trainer_log.jsonl").read_text().splitlines())
        return {line["current_steps"]: line[key] for line in lines if key in line}

    @property
    def losses(self):
        return self.records("loss")


class Trainings:
    """All in one ``folder``."""

    def __init__(self, forks, folder):
        self.forks, self.env, self.folder = forks, forks.env, folder

    def argv(self, *argv, ranks=1):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        return [str(self.forks.python), *torchrun, *map(str, argv)]

    def run(self, *argv, ranks=1, env=None, timeout=900, typed=False):
        """A program to its end, in a fork; ``typed``: in a new process, by torchrun where it has several ranks."""
        if not typed:
            return self.forks.run(*argv, cwd=self.folder, ranks=ranks, env=env, timeout=timeout)
        command = self.argv(*argv, ranks=ranks)
        environment = dict(self.env, **(env or {}))
        options = {"capture_output": True, "text": True, "timeout": timeout}
        return subprocess.run(command, cwd=self.folder, env=environment, check=False, **options)

    def program(self, name, *argv, typed=False):
        """Runs ``python -m trainer.lm.NAME``, which must succeed; returns its output."""
        result = self.run("-m", f"trainer.lm.{name}", *argv, typed=typed)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def train(self, *argv, ranks=1, **options):
        return self.run("-m", "trainer.lm", *TINY, *argv, ranks=ranks, **options)

    def session(self, runs, ranks=1, tiny=True, typed=False, program="session.py"):
        """Several trainings in the same processes, each ``TINY`` with other options; a ``Run`` for each."""
        reported = [[*(TINY if tiny else ()), *map(str, argv)] for argv in runs]
        path = self.folder / f"session-{len(list(self.folder.glob('session-*')))}.json"
        path.write_text(json.dumps(reported))
        result = self.run(HERE / program, path, ranks=ranks, typed=typed)
        assert result.returncode == 0, result.stdout + result.stderr
        found = []
        for line in result.stdout.splitlines():
            if line.startswith("session: ") and len(found) < len(reported):
                found.append(Run(self.folder, reported[len(found)]))
            elif line.startswith("refused: "):
                found[-1].refused = json.loads(line.partition(" ")[2])
        return found

    def start(self, *argv, ranks=1):
        """A training on its way; see ``Going``."""
        return Going(self, self.argv("-m", "trainer.lm", *TINY, *argv, ranks=ranks))


class Going:
    """A running training. Its output is read by ``until`` and ``finish``."""

    def __init__(self, trainings, argv):
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(argv, cwd=trainings.folder, env=trainings.env, **pipe)
        self.output = ""

    def until(self, words):
        for line in self.process.stdout:
            self.output += line
            if words in line:
                return
        raise AssertionError(f"nothing like {words!r}:\n{self.output}")

    def rank(self, rank):
        """The pid of a rank, which is a child of torchrun."""
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and f"RANK={rank}" in (path / "environ").read_text().split("\0"):
                    return int(path.name)
            except (FileNotFoundError, ProcessLookupError):  # noqa: PERF203 - it has just exited
                continue
        raise AssertionError(f"there is no rank {rank}")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.finish()

    def finish(self):
        rest, _ = self.process.communicate(timeout=900)
        self.output += rest
        return self.process.returncode
