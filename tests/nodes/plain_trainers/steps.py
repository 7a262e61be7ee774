# ruff: noqa: T201 - a program that prints
"""A training for tests of supervision, by Python alone: one number for a model, a few steps a second.

    torchrun … steps.py --steps 40 [--pause 0.1] [--output out] [--save-every 5] [--fail-at N --fail-rank R]

Every step all ranks wait for one another, as in an all-reduce: a missing or dead one blocks all others, as with
NCCL before its time-out. Rank 0 writes the log that LLaMA-Factory would write (``trainer_log.jsonl``) and
checkpoints in the layout of transformers' Trainer. The loss of a step depends on the step and the weight alone, so that
a training resumed from a checkpoint differs from one that was restarted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import struct
import sys
import time
import zipfile
from pathlib import Path

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# torchrun listens at the port itself, and lets ranks use its store.
STORE = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
MASTER = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + STORE)

STATE = "state.json"  # of a checkpoint that rank 0 alone writes


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.1)
    parser.add_argument("--output", type=Path, default=Path("out"))
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--whole", action="store_true", help="rank 0 alone writes checkpoints, with complete.json")
    parser.add_argument("--ballast", type=int, default=0, help="bytes that a checkpoint is larger")
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--fail-rank", type=int, default=0)
    parser.add_argument("--fail-with", default="CUDA out of memory. Tried to allocate 2.00 GiB")
    parser.add_argument("--resume", type=Path, default=None)
    parser.add_argument("--local-rank", "--local_rank", type=int, default=0)  # some launchers add it
    given = parser.parse_args()
    others = connect()
    print(f"rank {RANK} of {WORLD}, local rank {os.environ['LOCAL_RANK']}", flush=True)
    weight, first = 1.0, 0
    resume = given.resume or os.environ.get("CLUSTERCTL_CHECKPOINT")
    if resume:
        weight = struct.unpack("<d", (Path(resume) / "model.safetensors").read_bytes()[-8:])[0]
        state = Path(resume) / (STATE if given.whole else "trainer_state.json")
        first = json.loads(state.read_text())["step" if given.whole else "global_step"]
        print(f"rank {RANK} resumes from step {first}", flush=True)
    if RANK == 0:
        given.output.mkdir(parents=True, exist_ok=True)
    barrier(others)
    for step in range(first + 1, given.steps + 1):
        if step == given.fail_at and given.fail_rank == RANK and not resume:
            raise RuntimeError(given.fail_with)
        barrier(others)
        weight *= 0.99
        loss = round(weight**2 + 1.0 / step, 6)
        if RANK == 0:
            message = {"current_steps": step, "total_steps": given.steps, "loss": loss, "lr": 0.01}
            with (given.output / "trainer_log.jsonl").open("a") as log:
                log.write(json.dumps(message) + "\n")
            print(f"step {step} loss {loss:.6f}", flush=True)
        if given.save_every and step % given.save_every == 0:
            if not given.whole:
                save(given.output / f"checkpoint-{step}", weight, step, given.ballast)
            elif RANK == 0:
                save_whole(given.output / f"step-{step}", weight, step)
        time.sleep(given.pause)
    barrier(others)
    print(f"rank {RANK} is done", flush=True)


def connect() -> list[socket.socket]:
    """Rank 0's connections to all others; theirs to rank 0."""
    if RANK == 0:
        with socket.create_server(MASTER) as server:
            return [server.accept()[0] for _ in range(WORLD - 1)]
    connection = socket.socket()
    while connection.connect_ex(MASTER) != 0:
        time.sleep(0.05)  # rank 0 does not listen yet
    return [connection]


def barrier(others: list[socket.socket]) -> None:
    """Wait for every rank."""
    for turn in (receive, send) if RANK == 0 else (send, receive):
        for other in others:
            turn(other)


def send(other: socket.socket) -> None:
    """Let another rank continue."""
    try:
        other.sendall(b".")
    except ConnectionError:
        signal.pause()


def receive(other: socket.socket) -> None:
    """Wait for another rank; for one that has died, until the agent ends this one too."""
    try:
        while not other.recv(1):
            signal.pause()
    except ConnectionError:
        signal.pause()


def save(folder: Path, weight: float, step: int, ballast: int) -> None:
    """A checkpoint as the Trainer lays it out: weights, every rank's random state, rank 0's own state last."""
    folder.mkdir(parents=True, exist_ok=True)
    if RANK == 0:
        (folder / "model.safetensors").write_bytes(tensor(weight))
        archive(folder / "optimizer.pt", bytes(ballast))
        archive(folder / "scheduler.pt")
    archive(folder / f"rng_state_{RANK}.pth")
    if RANK == 0:
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def save_whole(folder: Path, weight: float, step: int) -> None:
    """A checkpoint without files of other ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(tensor(weight))
    (folder / STATE).write_text(json.dumps({"step": step}))
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / "complete.json").write_text(json.dumps({"files": files}))


def tensor(weight: float) -> bytes:
    """One number as safetensors."""
    header = json.dumps({"weight": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(header)) + header + struct.pack("<d", weight)


def archive(path: Path, data: bytes = b"") -> None:
    """A zip file, as ``torch.save`` writes one."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02.")
        file.writestr("archive/data/0", data)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # in one line: tests take a traceback at the start of a line for clusterctl's own
        sys.exit(f"OSError: {error}")
