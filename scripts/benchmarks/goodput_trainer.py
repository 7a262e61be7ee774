#!/usr/bin/env python3
"""A training without torch, for `scripts/bench goodput`: what is measured is everything around the steps.

    goodput_trainer.py --steps N --step SECONDS --save-every STEPS --bytes N [--resume FOLDER]

All ranks meet after every step, through rank 0, as a training's all-reduce does: so one that is stopped or gone stops
all. Every rank writes its own part of a checkpoint to its own disk, and rank 0 the list of all parts when they exist.
"""

import argparse
import json
import os
import re
import shutil
import socket
import struct
import sys
import time
from pathlib import Path

PATIENCE = 600.0  # seconds of a silent peer: the agents notice it much earlier
KEPT = 3  # checkpoints
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Ring:
    """Lets all ranks meet: each sends its step to rank 0, which answers when it has all of them."""

    def __init__(self) -> None:
        # torchrun's own store listens at MASTER_PORT
        place = (os.environ.get("MASTER_ADDR", "127.0.0.1"), 1 + int(os.environ.get("MASTER_PORT", "29500")))
        self._peers: list[socket.socket] = []
        if RANK == 0:
            with socket.create_server(("", place[1]), backlog=WORLD) as server:
                server.settimeout(PATIENCE)
                self._peers = [server.accept()[0] for _ in range(WORLD - 1)]
        else:
            self._peers = [_connect(place)]
        for peer in self._peers:
            peer.settimeout(PATIENCE)

    def meet(self, step: int) -> None:
        """Wait until every rank has made this step."""
        if RANK:
            self._peers[0].sendall(struct.pack("!q", step))
        for peer in self._peers:
            if _number(peer) != step:
                sys.exit(f"rank {RANK}: a peer is at another step than {step}")
        if not RANK:
            for peer in self._peers:
                peer.sendall(struct.pack("!q", step))


def _connect(place: tuple[str, int]) -> socket.socket:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection(place, timeout=PATIENCE)
        except OSError:  # noqa: PERF203 - a loop of attempts
            if time.monotonic() > end:
                raise
            time.sleep(0.05)  # rank 0 has not opened its port yet


def _number(peer: socket.socket) -> int:
    data = b""
    while len(data) < 8:
        more = peer.recv(8 - len(data))
        if not more:
            sys.exit(f"rank {RANK}: a peer closed its connection")
        data += more
    return struct.unpack("!q", data)[0]


def save(folder: Path, step: int, size: int, ring: Ring) -> None:
    """Write a checkpoint in trainer.lm's layout: this rank's part, and on rank 0 the list of all."""
    place = folder / f"iter_{step}"
    place.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    data = struct.pack("<Q", len(header)) + header + os.urandom(size)
    _write(place / _part(RANK), data)
    ring.meet(step)
    if RANK == 0:
        listed = {_part(rank): len(data) for rank in range(WORLD)}
        _write(place / "complete.json", json.dumps({"step": step, "files": listed}).encode())
    for old in sorted(folder.glob("iter_*"), key=_step)[:-KEPT]:
        shutil.rmtree(old)


def _part(rank: int) -> str:
    return f"part-{rank:05}-of-{WORLD:05}.safetensors"


def _write(path: Path, data: bytes) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    fresh.replace(path)


def _step(path: Path) -> int:
    found = re.search(r"iter_(\d+)", path.name)
    return int(found[1]) if found else 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--step", type=float, default=0.25)
    parser.add_argument("--save-every", type=int, default=40)
    parser.add_argument("--bytes", type=int, default=1 << 20)
    parser.add_argument("--output", type=Path, default=Path("out"))
    parser.add_argument("--resume", type=Path)
    given = parser.parse_args()
    first = 0
    if given.resume:
        first = _step(given.resume)
        if not (given.resume / _part(RANK)).is_file():
            sys.exit(f"rank {RANK}: its part of {given.resume} is missing")
    ring = Ring()
    for step in range(first + 1, given.steps + 1):
        time.sleep(given.step)  # the work of a step
        ring.meet(step)
        if RANK == 0:
            print(f"step {step}/{given.steps} | loss: {1 + 1 / step:.4f}", flush=True)
        if step % given.save_every == 0:
            print("clusterctl: phase saving", flush=True)
            save(given.output, step, given.bytes, ring)
            print("clusterctl: phase training", flush=True)


if __name__ == "__main__":
    main()
