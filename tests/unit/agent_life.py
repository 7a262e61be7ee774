"""A run that is lived through in simulated time, and the agent's watch over it."""

from __future__ import annotations

import os

from agents import plan_of

from trainer.agent import hangs, processes
from trainer.agent.processes import Stat
from trainer.agent.reader import Reader

RUNNING = "[INFO|trainer.py:2519] >> ***** Running training *****"
EVALUATING = "[INFO|trainer.py:4643] >> ***** Running Evaluation *****"
SAVING = "[INFO|trainer.py:4309] >> Saving model checkpoint to out/checkpoint-10"
TOKENIZING = "[INFO] llamafactory.data.loader:143 >> Loading dataset identity.json..."
LOADING = "loading weights file model.safetensors"
LAUNCHER = 10


class Fake(processes.Proc):
    """A /proc of our own: pid 10 is the launcher, pid 100 + r rank r, pid 1000 + r a worker of its DataLoader."""

    def __init__(self, ranks=4):
        super().__init__()
        self.table = {LAUNCHER: Stat("S", os.getpid(), "1")}
        self.given = {}
        self.bytes = 0
        for rank in range(ranks):
            self.put(100 + rank, rank, LAUNCHER)
            self.put(1000 + rank, rank, 100 + rank)

    def put(self, pid, rank, parent, state="S", start="5"):
        self.table[pid] = Stat(state, parent, start)
        self.given[pid] = rank

    def set(self, pid, **fields):
        self.table[pid] = self.table[pid]._replace(**fields)

    def stat(self, pid):
        return self.table.get(pid)

    def rank(self, pid, stat):
        return self.given.get(pid)

    def bytes_moved(self, pid):
        return self.bytes if pid == 100 else 0

    def wchan(self, pid):
        return "nfs_wait_bit_killable"

    def members(self):
        return {pid: stat for pid, stat in self.table.items() if stat.state not in "ZX"}


class Life:
    """A run and the watch over it. One look a second, as the supervisor does."""

    def __init__(self, ranks=4, **plan):
        self.proc = Fake(ranks)
        self.watch = hangs.Watch(plan_of(**plan), self.proc)
        self.now = 1000.0
        self.step = 0
        self.readers = {}  # by rank
        self.found = []  # (seconds of this life, hang)
        self.began = self.now
        self.look()

    def look(self):
        found = self.watch.look(self.proc.members(), self.now)
        if found:
            self.found.append((self.now - self.began, found))

    def wait(self, seconds, each=None):
        """Let time pass; ``each`` is called every second with the second."""
        for second in range(int(seconds)):
            self.now += 1
            if each:
                each(second)
            self.look()
        return self

    def say(self, text, rank=0):
        self.watch.line(rank, text, self.now)
        for reading in self.readers.setdefault(rank, Reader(rank=rank)).feed(f"{text}\n"):
            self.watch.reading(rank, reading, self.now)
        return self

    def train(self, steps, seconds=3, total=1000):
        for _ in range(steps):
            self.wait(seconds)
            self.step += 1
            self.watch.progress({"step": self.step, "total": total}, self.now)
        return self

    @property
    def kinds(self):
        return [hang.kind for _, hang in self.found]


def trained(pace=3, **plan):
    """A run of LLaMA-Factory after ten steps. Its recorded life starts there."""
    life = Life(**plan).say(RUNNING).train(10, pace)
    life.began = life.now
    assert life.found == []
    return life
