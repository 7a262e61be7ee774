#!/usr/bin/env python3
"""scripts/bench goodput: the effective training time of runs on sandbox nodes with a random fault again and again."""

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import bench_machine
from bench_measure import BenchError, progress, run
from goodput_faults import FAULTS, mount
from launch_cluster import CODE, Cluster, Run

from provision.diagnosis.reading import parse_objects
from provision.errors import ClusterctlError
from provision.summaries.effective import effective_text
from trainer.agent.account import account
from trainer.agent.contract.effective import PARTS, Effective

TRAINER = Path(__file__).with_name("goodput_trainer.py")
LOOK = 0.25  # seconds between looks at the events of the agents, which are files on the nodes
NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Hit:
    """A fault, and what became of the run. Times are seconds after it; None: it did not happen.

    Attributes:
        kind: a key of ``FAULTS``.
        what: what was hit.
        survived: the run made a new step without anybody's help.
        first: until a step was made, also one made again.
        new: until a step beyond the highest one before.
        repeated: steps made again.
        why: why it did not survive, or was not tried.
    """

    kind: str
    what: str
    survived: bool
    first: float | None = None
    new: float | None = None
    repeated: int = 0
    why: str = ""


@dataclass
class Found:
    """What all runs gave: the faults, each run's account, and healthy nodes that a run continued without."""

    hits: list[Hit] = field(default_factory=list)
    spent: list[Effective] = field(default_factory=list)
    condemned: list[str] = field(default_factory=list)

    @property
    def tried(self) -> list[Hit]:
        return [each for each in self.hits if not each.why.startswith(NOT_TRIED)]


class Watch:
    """Reads the events of all agents as they grow: rank 0 moves to another node when its own is lost."""

    def __init__(self, run_: Run) -> None:
        folder = str(run_.record()["folder"]).lstrip("/")
        self._run = run_
        self._folders = {name: f"{folder}/logs/node{position}" for position, name in enumerate(run_.names)}
        self._at = dict.fromkeys(run_.names, 0)
        self._events: list[Mapping[str, Any]] = []  # of rank 0's nodes
        self.steps: list[tuple[float, int]] = []  # of the newest attempt
        self.top = 0  # the highest step
        self.attempts = 0
        self.members: list[str] = []  # the nodes that have ranks
        self.struck: set[str] = set()  # nodes that a fault has taken from the run
        self.ends: dict[str, Mapping[str, Any]] = {}
        self.lost: set[str] = set()  # nodes that the run continued without

    def look(self) -> None:
        """Read what is new."""
        fresh = [(event["time"], name, event) for name in self._folders for event in self._read(name)]
        for _, name, event in sorted(fresh, key=lambda each: each[0]):
            self._take(name, event)

    def _read(self, name: str) -> list[Mapping[str, Any]]:
        try:
            path = self._run.cluster.box.node_root(name) / self._folders[name] / "events.jsonl"
            with path.open("rb") as file:
                file.seek(self._at[name])
                whole, _, _ = file.read().rpartition(b"\n")
        except (OSError, ClusterctlError):  # the agent starts, or the node is off
            return []
        self._at[name] += len(whole) + bool(whole)
        return list(parse_objects(whole.decode(errors="replace")))  # a full disk tears lines

    def _take(self, name: str, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "attempt" and event["attempt"] > self.attempts:
            self.attempts, self.members, self.steps = event["attempt"], list(event["nodes"]), []
        if kind == "end":
            self.ends[name] = event
        if kind == "replaced":  # from the node that gets rank 0, before it starts
            self.lost.add(event["node"])
        if name != (self.members or [name])[0]:
            return
        self._events.append(event)
        if kind == "progress" and isinstance(event.get("step"), int):
            self.steps.append((event["time"], event["step"]))
            self.top = max(self.top, event["step"])

    @property
    def end(self) -> Mapping[str, Any] | None:
        """The end of the run on all nodes that it had left; None while it runs on one."""
        left = [name for name in self.members if name not in self.struck]
        return self.ends[left[0]] if left and all(name in self.ends for name in left) else None

    @property
    def spares(self) -> int:
        """The spares that are left."""
        return len(set(self._run.names) - set(self.members) - self.lost - self.struck)

    def spent(self) -> Effective | None:
        """The account of the run from the events of rank 0's nodes: one agent's own lacks the time of another."""
        return account(self._events)


def hit(run_: Run, watch: Watch, kind: str, chance: random.Random, patience: float) -> Hit:
    """Inject a fault and wait until a new step is made."""
    watch.look()
    fault, top, attempts = FAULTS[kind], watch.top, watch.attempts
    node = chance.choice([name for name in watch.members if name not in watch.struck])
    struck = time.time()
    try:
        what = fault.inject(run_, node, chance)
    except BenchError as error:
        return Hit(kind, node, survived=False, why=f"{NOT_TRIED}: {error}")
    if fault.spare:
        watch.struck.add(node)
    while time.time() - struck < patience:
        time.sleep(LOOK)
        watch.look()
        after = [(at, step) for at, step in watch.steps if at > struck + fault.lasts]
        fresh = [at for at, step in after if step > top]
        if fresh and (watch.attempts > attempts or not fault.ends):
            if node in watch.members:
                watch.struck.discard(node)  # it kept its rank
            again = sum(step <= top for _, step in after)
            return Hit(kind, what, True, after[0][0] - struck, fresh[0] - struck, again)
        if watch.end is not None:
            why = (watch.end.get("why") or {}).get("text") or watch.end.get("state")
            return Hit(kind, what, survived=False, why=f"the run ended: {why}")
    return Hit(kind, what, survived=False, why=f"no new step for {patience:g} s")


def measure(given: argparse.Namespace, prefix: Path, work: Path) -> Found:
    """Train with faults for the given time. When a run has no spare left, or has ended, another one starts."""
    found, chance, number = Found(), random.Random(given.seed), 0
    end = time.monotonic() + given.seconds
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        while time.monotonic() + given.every < end and len(found.tried) < given.most:
            number += 1
            folder = work / f"cluster{number}"
            with Cluster(given.clusterctl.absolute(), folder, prefix, given.nodes + given.spares) as cluster:
                (folder / CODE / TRAINER.name).write_bytes(TRAINER.read_bytes())
                for name in cluster.names:
                    mount(cluster.box, name, str(prefix.parent / "runs"))
                one_run(given, cluster, found, chance, end, number)
    except KeyboardInterrupt:
        print("scripts/bench: interrupted; these are the figures so far", file=sys.stderr)
    return found


def one_run(
    given: argparse.Namespace, cluster: Cluster, found: Found, chance: random.Random, end: float, number: int
) -> None:
    """One run, until it has ended, a fault would need a spare and none is left, or the time is over."""
    save_every = max(1, round(given.save_every / given.step))
    script = [f"{CODE}/{TRAINER.name}", "--", "--step", str(given.step), "--save-every", str(save_every)]
    options = ["--launcher", given.launcher, "--output", "out", "--resume-arg", "--resume {checkpoint}"]
    options += ["--spares", str(given.spares)] if given.spares else []
    with progress(f"goodput: run {number} on {given.nodes} nodes and {given.spares} spares") as report:
        started = cluster.train(
            *options, "--gpus-per-node", "1", *shlex.split(given.train_args), *script, nodes=given.nodes
        )
        started = replace(started, names=cluster.names)
        until_step(watch := Watch(started), 5, given.patience)
        report(f"step {watch.top}")
    kinds: list[str] = []
    try:
        while time.monotonic() + given.every < end and len(found.tried) < given.most:
            time.sleep(given.every * chance.uniform(0.75, 1.25))  # the time between two faults
            kinds = kinds or chance.sample(given.faults, len(given.faults))  # each kind as often as the others
            kind = kinds.pop()
            watch.look()
            if FAULTS[kind].spare and not watch.spares:
                break
            with progress(f"goodput: {len(found.tried) + 1}: {FAULTS[kind].what}") as report:
                now = hit(started, watch, kind, chance, given.patience)
                found.hits.append(now)
                report(now.why or f"{now.what}: {now.first:.1f} s to a step, {now.new:.1f} s to a new one")
            if not now.survived and not now.why.startswith(NOT_TRIED):
                print(f"goodput: not survived: {now}", file=sys.stderr)
                keep(given, started, number)
                break
    finally:
        watch.look()
        found.spent += [spent] if (spent := watch.spent()) else []
        found.condemned += [f"{name} in run {number}" for name in sorted(watch.lost - watch.struck)]
        if watch.lost - watch.struck:
            keep(given, started, number)


def keep(given: argparse.Namespace, run_: Run, number: int) -> None:
    """Copy the logs of a run's nodes, as far as they are on, to the folder of ``--keep``."""
    for name in run_.names if given.keep else ():
        with suppress(OSError, ClusterctlError):
            root = run_.cluster.box.node_root(name) / str(run_.record()["folder"]).lstrip("/")
            shutil.copytree(root / "logs", given.keep / f"run{number}" / name, dirs_exist_ok=True)
            listed = "".join(f"{path.relative_to(root)} {path.stat().st_size}\n" for path in sorted(root.rglob("*")))
            (given.keep / f"run{number}" / name / "files.txt").write_text(listed)
    if given.keep:
        (given.keep / f"run{number}" / "command.txt").write_text(run_.lines.text)


def until_step(watch: Watch, step: int, patience: float) -> None:
    """Wait until a step was made.

    Raises:
        BenchError: it is not within ``patience`` seconds.
    """
    end = time.monotonic() + patience
    while watch.top < step:
        watch.look()
        if time.monotonic() > end or watch.end is not None:
            raise BenchError(f"no step {step} after {patience:g} s: {watch.end}")
        time.sleep(LOOK)


def added(spent: Sequence[Effective]) -> Effective | None:
    """The accounts of several runs in one."""
    if not spent:
        return None
    names = [*PARTS, "stopped", "saves", "restarts", "failures", "repeated"]
    summed = {name: sum(getattr(each, name) for each in spent) for name in names}
    return Effective(**summed, top=max(each.top or 0 for each in spent))


def rows(found: Found, every: float) -> list[str]:
    """The figures, as lines of a Markdown table. ``every``: the steps between two saves."""
    tried, spent = found.tried, added(found.spent)
    good = [each for each in tried if each.survived]
    ended = [each for each in good if FAULTS[each.kind].ends]
    new = [each.new for each in ended if each.new is not None]
    first = [each.first for each in ended if each.first is not None]
    lost = [each for each in good if each.kind == "node"]
    figures = [
        (
            "effective training time",
            "unknown" if spent is None or spent.ratio is None else f"{100 * spent.ratio:.1f} %",
        ),
        ("faults survived without intervention", f"{len(good)} of {len(tried)}"),
        ("fault to the first step of the next attempt, median and longest", _median(first)),
        ("fault to the first new step, median and longest", _median(new)),
        (
            "lost node to the first new step, median and longest",
            _median([each.new for each in lost if each.new is not None]),
        ),
        (
            f"steps repeated after a lost node, of {every} between two saves, median and most",
            _median([float(each.repeated) for each in lost], ""),
        ),
        ("repeated steps after a fault, median and most", _median([float(each.repeated) for each in ended], "")),
        ("healthy nodes condemned", str(len(found.condemned))),
    ]
    lines = ["| figure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in figures), ""]
    lines += ["| fault | survived | to a new step, median |", "|---|---|---|"]
    for kind, fault in FAULTS.items():
        mine = [each for each in tried if each.kind == kind]
        if not mine:
            continue
        times = [each.new for each in mine if each.new is not None]
        middle = f"{statistics.median(times):.1f} s" if times else "-"
        lines.append(f"| {fault.what} | {sum(each.survived for each in mine)} of {len(mine)} | {middle} |")
    lines += ["", effective_text(spent)]
    lines += [f"{each} was healthy and condemned" for each in found.condemned]
    return lines + [f"{each.kind}: {each.what}: {each.why}" for each in found.hits if each.why]


def _median(values: Sequence[float], unit: str = " s") -> str:
    if not values:
        return NOT_TRIED
    return f"{statistics.median(values):.3g}{unit}, {max(values):.3g}{unit}"


def main(argv: Sequence[str]) -> int:
    given = parse(argv)
    command = shlex.join(["scripts/bench", "goodput", *argv])
    try:
        with tempfile.TemporaryDirectory(prefix="clusterctl-bench-", dir=given.work) as work:
            prefix = given.prefix or Path(
                run([sys.executable, bench_machine.ROOT / "scripts/lab/build.py"]).out.strip()
            )
            above = [f"machine: {bench_machine.machine(Path(work))}", bench_machine.versions(given.clusterctl)]
            print(f"goodput: seed {given.seed}: {command}", file=sys.stderr)
            found = measure(given, prefix, Path(work))
    except (BenchError, ClusterctlError) as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("scripts/bench: interrupted; nothing was left behind", file=sys.stderr)
        return 130
    above.append(f"load at the end: {os.getloadavg()[0]:.0f}; seed {given.seed}; {len(found.spent)} runs")
    print("\n".join([*above, "", *rows(found, given.save_every / given.step), "", f"    {command}"]))
    if given.json:
        data = {"above": above, "command": command, "hits": [asdict(each) for each in found.hits]}
        spent = [each.to_object() for each in found.spent]
        given.json.write_text(json.dumps({**data, "condemned": found.condemned, "spent": spent}, indent=1) + "\n")
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench goodput", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("--nodes", type=int, default=16, metavar="N", help="(default: 16)")
    parser.add_argument("--spares", type=int, default=6, metavar="N", help="nodes that replace lost ones (default: 6)")
    parser.add_argument("--seconds", type=float, default=7200, metavar="S", help="of training (default: 7200)")
    parser.add_argument("--every", type=float, default=360, metavar="S", help="between two faults (default: 360)")
    parser.add_argument("--most", type=int, default=10_000, metavar="N", help="end after this number of faults")
    parser.add_argument("--faults", type=_faults, metavar="KIND,…", help=f"of {', '.join(FAULTS)} (default: all)")
    parser.add_argument("--step", type=float, default=0.5, metavar="S", help="of training for each step (default: 0.5)")
    parser.add_argument("--save-every", type=float, default=60, metavar="S", help="between saves (default: 60)")
    parser.add_argument("--patience", type=float, default=180, metavar="S", help="for a new step (default: 180)")
    parser.add_argument("--launcher", default="torchrun", help="plain needs no torch (default: torchrun)")
    parser.add_argument("--train-args", default="--restarts 1000", metavar="TEXT", help="more options of train")
    parser.add_argument("--seed", type=int, default=1, help="of the random faults (default: 1)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the logs of runs that did not survive a fault")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--work", type=Path, default=Path("/var/tmp"), metavar="DIR")
    parser.add_argument("--prefix", type=Path, metavar="ENV", help="an environment (default: the rehearsal one)")
    parser.add_argument("--clusterctl", type=Path, default=bench_machine.ROOT / ".venv/bin/clusterctl", metavar="FILE")
    given = parser.parse_args(argv)
    if given.nodes < 2 or min(given.seconds, given.every, given.step, given.save_every, given.patience) <= 0:
        parser.error("at least two nodes, and times above 0")
    if given.faults is None:
        given.faults = [name for name, fault in FAULTS.items() if fault.launcher in ("", given.launcher)]
        given.faults = [name for name in given.faults if given.spares or not FAULTS[name].spare]
    return given


def _faults(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in FAULTS]:
        raise argparse.ArgumentTypeError(f"there is no {unknown[0]}; there are {', '.join(FAULTS)}")
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
