#!/usr/bin/env python3
"""scripts/bench goodput: the effective training time of a run on sandbox nodes with a random fault again and again."""

import argparse
import json
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bench_machine
from bench_measure import BenchError, progress, run
from goodput_faults import FAULTS
from launch_cluster import CODE, Cluster, Lines, Run

from provision.errors import ClusterctlError
from provision.summaries.effective import effective_text
from trainer.agent.contract import effective
from trainer.agent.contract.effective import Effective

TRAINER = Path(__file__).with_name("goodput_trainer.py")
LOOK = 0.25  # seconds between looks at the events of rank 0's agent, which is a file on the node


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


class Watch:
    """Reads the events of rank 0's agent as they grow. ``folder`` is on the node."""

    def __init__(self, run_: Run) -> None:
        folder = str(run_.record()["folder"]).lstrip("/")
        self._path = run_.cluster.box.node_root(run_.names[0]) / folder / "logs/node0/events.jsonl"
        self._at = 0
        self.state: Mapping[str, Any] = {}
        self.steps: list[tuple[float, int]] = []  # of the newest attempt
        self.top = 0  # the highest step
        self.attempts = 0
        self.end: Mapping[str, Any] | None = None
        self.replaced: list[Mapping[str, Any]] = []

    def look(self) -> None:
        """Read what is new."""
        if not self._path.exists():  # the agent starts
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            whole, _, _ = file.read().rpartition(b"\n")
        self._at += len(whole) + bool(whole)
        for line in whole.splitlines():
            event = json.loads(line)
            if event["event"] == "progress" and isinstance(event.get("step"), int):
                self.steps.append((event["time"], event["step"]))
                self.top = max(self.top, event["step"])
            elif event["event"] == "end":
                self.end = event
            elif event["event"] == "attempt":
                self.end, self.steps = None, []
                self.attempts += 1
            elif event["event"] == "replaced":
                self.replaced.append(event)

    def spent(self) -> Effective | None:
        """The agent's own account."""
        return effective.read(json.loads(self._path.with_name("state.json").read_text()).get("spent"))


def hit(run_: Run, watch: Watch, kind: str, chance: random.Random, patience: float) -> Hit:
    """Inject a fault and wait until a new step is made."""
    watch.look()
    fault, top, attempts = FAULTS[kind], watch.top, watch.attempts
    node = chance.choice(run_.names[1:] if kind == "node" else run_.names)  # a lost rank 0 ends the agents' link
    struck = time.time()
    try:
        what = fault.inject(run_, node, chance)
    except BenchError as error:
        return Hit(kind, node, survived=False, why=f"not tried: {error}")
    while time.time() - struck < patience:
        time.sleep(LOOK)
        watch.look()
        after = [(at, step) for at, step in watch.steps if at > struck + fault.lasts]
        fresh = [at for at, step in after if step > top]
        if fresh and (watch.attempts > attempts or not fault.ends):
            again = sum(step <= top for _, step in after)
            return Hit(kind, what, True, after[0][0] - struck, fresh[0] - struck, again)
        if watch.end is not None:
            why = (watch.end.get("why") or {}).get("text") or watch.end.get("state")
            return Hit(kind, what, survived=False, why=f"the run ended: {why}")
    return Hit(kind, what, survived=False, why=f"no new step for {patience:g} s")


def measure(given: argparse.Namespace, cluster: Cluster) -> tuple[list[Hit], Effective | None, list[str]]:
    """Train for the given time with faults. Returns them, the account, and healthy nodes that were condemned."""
    chance = random.Random(given.seed)
    save_every = max(1, round(given.save_every / given.step))
    script = [f"{CODE}/{TRAINER.name}", "--", "--step", str(given.step), "--save-every", str(save_every)]
    options = ["--launcher", given.launcher, "--output", "out", "--resume-arg", "--resume {checkpoint}"]
    with progress(f"goodput: start on {given.nodes} nodes") as report:
        started = cluster.train(*options, "--gpus-per-node", "1", *shlex.split(given.train_args), *script)
        until_step(watch := Watch(started), 5, given.patience)
        report(f"step {watch.top}")
    hits: list[Hit] = []
    lost: set[str] = set()
    end = time.monotonic() + given.seconds
    kinds: list[str] = []
    while time.monotonic() + given.every < end:
        time.sleep(given.every * chance.uniform(0.75, 1.25))  # the time between two faults
        kinds = kinds or chance.sample(given.faults, len(given.faults))  # each kind as often as the others
        kind = kinds.pop()
        with progress(f"goodput: {FAULTS[kind].what}") as report:
            found = hit(started, watch, kind, chance, given.patience)
            hits.append(found)
            report(found.why or f"{found.what}: {found.first:.1f} s to a step, {found.new:.1f} s to a new one")
        lost |= {name for name in started.names if kind == "node" and name in found.what}
        if not found.survived and not found.why.startswith("not tried"):
            started = help_(given, cluster, started, watch)
    spent = watch.spent()
    cluster.finished("stop", "--yes", started.id)
    return hits, spent, sorted({str(each.get("node")) for each in watch.replaced} - lost)


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


def help_(given: argparse.Namespace, cluster: Cluster, run_: Run, watch: Watch) -> Run:
    """What a person would do: stop what is left of the run, and resume it.

    Raises:
        BenchError: it does not resume.
    """
    top = watch.top
    with progress("goodput: resume by hand"):
        cluster.command("stop", "--yes", run_.id).finish()
        lines: Lines = cluster.command("resume", run_.id)
        watch.end = None
        until_step(watch, top + 2, given.patience)
    return Run(cluster, lines, run_.id, run_.names)


def rows(hits: Sequence[Hit], spent: Effective | None, condemned: Sequence[str]) -> list[str]:
    """The figures, as lines of a Markdown table."""
    tried = [each for each in hits if not each.why.startswith("not tried")]
    good = [each for each in tried if each.survived]
    ended = [each for each in good if FAULTS[each.kind].ends]
    new = [each.new for each in ended if each.new is not None]
    first = [each.first for each in ended if each.first is not None]
    lost = [each.new for each in good if each.kind == "node" and each.new is not None]
    found = [
        (
            "effective training time",
            "unknown" if spent is None or spent.ratio is None else f"{100 * spent.ratio:.1f} %",
        ),
        ("faults survived without intervention", f"{len(good)} of {len(tried)}"),
        ("fault to the first step of the next attempt, median and longest", _median(first)),
        ("fault to the first new step, median and longest", _median(new)),
        ("lost node to the first new step, median and longest", _median(lost)),
        ("repeated steps after a fault, median and most", _median([float(each.repeated) for each in ended], "")),
        ("healthy nodes condemned", str(len(condemned))),
    ]
    lines = ["| figure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in found), ""]
    lines += ["| fault | survived | to a new step, median |", "|---|---|---|"]
    for kind, fault in FAULTS.items():
        mine = [each for each in tried if each.kind == kind]
        if not mine:
            continue
        times = [each.new for each in mine if each.new is not None]
        middle = f"{statistics.median(times):.1f} s" if times else "-"
        lines.append(f"| {fault.what} | {sum(each.survived for each in mine)} of {len(mine)} | {middle} |")
    lines += ["", effective_text(spent)]
    return lines + [f"{each.kind}: {each.what}: {each.why}" for each in hits if each.why]


def _median(values: Sequence[float], unit: str = " s") -> str:
    if not values:
        return "not tried"
    return f"{statistics.median(values):.3g}{unit}, {max(values):.3g}{unit}"


def main(argv: Sequence[str]) -> int:
    given = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        with tempfile.TemporaryDirectory(prefix="clusterctl-bench-", dir=given.work) as work:
            prefix = given.prefix or Path(
                run([sys.executable, bench_machine.ROOT / "scripts/lab/build.py"]).out.strip()
            )
            above = [f"machine: {bench_machine.machine(Path(work))}", bench_machine.versions(given.clusterctl)]
            with Cluster(given.clusterctl.absolute(), Path(work) / "cluster", prefix, given.nodes) as cluster:
                (cluster.folder / CODE / TRAINER.name).write_bytes(TRAINER.read_bytes())
                hits, spent, condemned = measure(given, cluster)
    except (BenchError, ClusterctlError) as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("scripts/bench: interrupted; nothing was left behind", file=sys.stderr)
        return 130
    command = shlex.join(["scripts/bench", "goodput", *argv])
    print("\n".join([*above, "", *rows(hits, spent, condemned), "", f"    {command}"]))
    if given.json:
        data = {"above": above, "command": command, "hits": [asdict(each) for each in hits], "condemned": condemned}
        given.json.write_text(json.dumps({**data, "spent": spent and spent.to_object()}, indent=1) + "\n")
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench goodput", description=(__doc__ or "").partition(": ")[2])
    default = [name for name, fault in FAULTS.items() if fault.by_default]
    parser.add_argument("--nodes", type=int, default=16, metavar="N", help="(default: 16)")
    parser.add_argument("--seconds", type=float, default=7200, metavar="S", help="of training (default: 7200)")
    parser.add_argument("--every", type=float, default=360, metavar="S", help="between two faults (default: 360)")
    parser.add_argument("--faults", type=_faults, default=default, metavar="KIND,…", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--step", type=float, default=0.5, metavar="S", help="of training for each step (default: 0.5)")
    parser.add_argument("--save-every", type=float, default=60, metavar="S", help="between saves (default: 60)")
    parser.add_argument("--patience", type=float, default=180, metavar="S", help="for a new step (default: 180)")
    parser.add_argument("--launcher", default="torchrun", help="plain needs no torch (default: torchrun)")
    parser.add_argument("--train-args", default="--restarts 1000", metavar="TEXT", help="more options of train")
    parser.add_argument("--seed", type=int, default=1, help="of the random faults (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--work", type=Path, default=Path("/var/tmp"), metavar="DIR")
    parser.add_argument("--prefix", type=Path, metavar="ENV", help="an environment (default: the rehearsal one)")
    parser.add_argument("--clusterctl", type=Path, default=bench_machine.ROOT / ".venv/bin/clusterctl", metavar="FILE")
    given = parser.parse_args(argv)
    if given.nodes < 2 or min(given.seconds, given.every, given.step, given.save_every, given.patience) <= 0:
        parser.error("at least two nodes, and times above 0")
    return given


def _faults(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in FAULTS]:
        raise argparse.ArgumentTypeError(f"there is no {unknown[0]}; there are {', '.join(FAULTS)}")
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
