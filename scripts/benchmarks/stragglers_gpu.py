"""Slows one rank of a real training on two GPUs, and measures when the agent names it.

    python3 scripts/benchmarks/stragglers_gpu.py --out FOLDER [--faults share,data,core] [--round 20]

Needs Python and torch with NCCL alone: it starts the agent as clusterctl would. The faults are of rank 1: ``share``, a
second process on its GPU; ``data``, a data loader that sleeps; ``core``, a busy process on the processor that it is
bound to. After the last fault it waits until the agent reports that the rank is as fast as the others again.

Prints one line of JSON: by fault, the rank and the cause that were named, the seconds since its start, and the times of
a step; false alarms before it; the agent's CPU time as a part of a core. FOLDER gets the run's events and samples.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NAMED = 8  # rounds in which a fault must be named


# --- a rank ---------------------------------------------------------------------------------------


def train(folder: Path) -> None:
    """Train a transformer with DistributedDataParallel until the run is stopped."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(1)
    wide, deep, length, batch = (2048, 16, 1024, 8) if device.type == "cuda" else (64, 2, 32, 2)
    layer = torch.nn.TransformerEncoderLayer(wide, 16, 4 * wide, dropout=0.0, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, deep, enable_nested_tensor=False).to(device)
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    fault = folder / f"slow-{rank}"
    step = 0
    while True:
        step += 1
        if fault.exists():
            time.sleep(float(fault.read_text()))
        data = torch.randn(batch, length, wide, device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(data).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        number = float(loss.detach())  # every step waits for the GPU, as trainers that log do
        if rank == 0:
            print(f"step {step} loss {number:.5f} at {time.time():.3f}", flush=True)


def hog(share: float, index: int) -> None:
    """Use a GPU for a part of the time. The part adapts to what the training leaves of it."""
    import torch  # noqa: PLC0415

    with torch.cuda.device(index):
        data = torch.randn(4096, 4096, device=f"cuda:{index}", dtype=torch.bfloat16)
        while True:
            began = time.monotonic()
            for _ in range(8):
                data @ data
            torch.cuda.synchronize(index)
            took = time.monotonic() - began
            time.sleep(took * (1 - share) / share)


# --- the measurement ------------------------------------------------------------------------------


class Run:
    """A run of the agent on this machine."""

    def __init__(self, folder: Path, round_: float) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONPATH") if name in os.environ}
        env = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "CLUSTERCTL_STRAGGLER_ROUND": str(round_), **kept}
        plan: dict[str, Any] = {
            "version": 2,
            "run": "stragglers-gpu",
            "node": socket.gethostname(),
            "argv": [sys.executable, str(Path(__file__).resolve()), "--train", str(folder)],
            "env": env,
            "processes": 2,
            "each_rank": True,
            "port": port,
            "logs": "logs",
        }
        (folder / "logs").mkdir()
        path = folder / "plan-0.json"
        path.write_text(json.dumps(plan))
        path.chmod(0o600)
        argv = [sys.executable, "-I", str(ROOT / "trainer/agent"), "run", str(path)]
        self.agent = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def events(self) -> list[dict[str, Any]]:
        """The events so far."""
        with contextlib.suppress(OSError):
            text = (self.folder / "logs/events.jsonl").read_text(errors="replace")
            return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]
        return []

    def steps(self) -> list[float]:
        """The times of the steps, by rank 0's clock."""
        lines = [str(each.get("line")) for each in self.events() if each["event"] == "log"]
        return [float(line.rpartition(" at ")[2]) for line in lines if line.startswith("step ") and " at " in line]

    def until(self, what: str, test: Any, seconds: float) -> Any:
        """Wait for something in the files of the run, which are all that shows it."""
        limit = time.monotonic() + seconds
        while not (found := test()):
            if self.agent.poll() is not None:
                tail = [str(each.get("line") or each.get("text")) for each in self.events()][-15:]
                raise SystemExit(f"the run ended before {what}:\n" + "\n".join(tail))
            if time.monotonic() > limit:
                return None
            time.sleep(0.5)
        return found

    def rank_pid(self, rank: int) -> int | None:
        """The process of a rank."""
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (path / "environ").read_bytes().split(b"\0")
                if b"CLUSTERCTL_RUN=stragglers-gpu" in words and f"RANK={rank}".encode() in words:
                    return int(path.name)
        return None

    def agent_seconds(self) -> float:
        """The CPU time of the agent's processes and of its nvidia-smi so far, without the ranks."""
        ticks = 0
        pids = [self.agent.pid]
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").glob("*"):
                with contextlib.suppress(OSError):
                    children = (task / "children").read_text().split()
                    pids += [int(child) for child in children if b"CLUSTERCTL_RUN=" not in environ(child)]
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def environ(pid: str) -> bytes:
    """The environment of a process; empty if it has exited."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


@contextlib.contextmanager
def injected(fault: str, run: Run, step: float, share: float) -> Iterator[None]:
    """Slow rank 1 down."""
    children: list[subprocess.Popen[bytes]] = []
    slow = run.folder / "slow-1"
    pid = run.rank_pid(1)
    cores = os.sched_getaffinity(pid) if pid else set()
    try:
        if fault == "data":
            slow.write_text(f"{0.12 * step:.4f}")
        elif fault == "share":
            children.append(subprocess.Popen([sys.executable, __file__, "--hog", str(share)]))
        elif fault == "core" and pid:
            core = max(cores)
            for task in Path(f"/proc/{pid}/task").glob("*"):
                os.sched_setaffinity(int(task.name), {core})
            for _ in range(2):
                child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                os.sched_setaffinity(child.pid, {core})
                children.append(child)
        yield
    finally:
        slow.unlink(missing_ok=True)
        for child in children:
            child.kill()
            child.wait()
        if fault == "core" and pid:
            for task in Path(f"/proc/{pid}/task").glob("*"):
                os.sched_setaffinity(int(task.name), cores)


def pace(times: list[float], since: float, until: float) -> float | None:
    """The median seconds of a step between two times."""
    found = [after - before for before, after in itertools.pairwise(times) if since <= before and after <= until]
    return round(statistics.median(found), 4) if found else None


def named(run: Run, since: float, state: str) -> dict[str, Any] | None:
    """The first event about a straggler since a time."""
    events = [each for each in run.events() if each["event"] == "straggler"]
    return next((each for each in events if each["time"] >= since and each["state"] == state), None)


def measure(out: Path, faults: list[str], round_: float, healthy: int, share: float) -> dict[str, Any]:
    """Run the training with each fault in turn."""
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name), round_)
        try:
            return _measure(run, faults, round_, healthy, share)
        finally:
            run.agent.send_signal(signal.SIGTERM)
            try:
                run.agent.wait(60)
            except subprocess.TimeoutExpired:
                run.agent.kill()
            for path in Path(name, "logs").glob("*.jsonl*"):
                shutil.copy(path, out)


def _measure(run: Run, faults: list[str], round_: float, healthy: int, share: float) -> dict[str, Any]:
    run.until("the first steps", lambda: len(run.steps()) > 3, 240)
    began, used = time.time(), run.agent_seconds()
    time.sleep(healthy * round_ + 5)  # the measured time itself
    usual = pace(run.steps(), began, time.time())
    found: dict[str, Any] = {"step": usual, "healthy_seconds": round(time.time() - began)}
    found["agent_cpu_percent_of_a_core"] = round(100 * (run.agent_seconds() - used) / (time.time() - began), 3)
    found["false_alarms"] = len([each for each in run.events() if each["event"] == "straggler"])
    for fault in faults:
        since = time.time()
        with injected(fault, run, usual or 0.3, share):
            event = run.until("it was named", lambda since=since: named(run, since, "slow"), NAMED * round_)
        found[fault] = {
            "named": event and event["rank"],
            "cause": event and event["kind"],
            "by": event and event["by"],
            "seconds": event and round(event["time"] - since, 1),
            "step": pace(run.steps(), since, time.time()),
            "text": event and event["text"],
        }
    if faults:
        since = time.time()
        event = run.until("it was over", lambda: named(run, since, "over"), NAMED * round_)
        found["over_seconds"] = event and round(event["time"] - since, 1)
    return found


def main() -> None:
    """Run one of the three programs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="the folder for events and samples")
    parser.add_argument("--faults", default="share,data", help="of share, data and core, in this order; or none")
    parser.add_argument("--round", type=float, default=20.0, help="seconds of a round")
    parser.add_argument("--healthy", type=int, default=6, help="rounds before the first fault")
    parser.add_argument("--share", type=float, default=0.2, help="of the time in which the second process computes")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--hog", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.train)
    elif given.hog:
        hog(given.hog, 1)
    else:
        given.out.mkdir(parents=True, exist_ok=True)
        faults = [each for each in given.faults.split(",") if each != "none"]
        result = measure(given.out, faults, given.round, given.healthy, given.share)
        (given.out / "result.json").write_text(json.dumps(result) + "\n")
        print(json.dumps(result))


if __name__ == "__main__":
    main()
