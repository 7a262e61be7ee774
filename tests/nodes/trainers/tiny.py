# ruff: noqa: T201 - a program that prints
"""A training for tests of supervision: real torch and gloo, one tensor for a model, a few steps a second.

    torchrun … tiny.py --steps 40 [--pause 0.1] [--output out] [--save-every 5] [--fail-at N --fail-rank R]

Every step all ranks take part in one all-reduce, so that one that is missing holds up all others. Rank 0 writes the log
that LLaMA-Factory would write (``trainer_log.jsonl``) and checkpoints in the layout of transformers' Trainer. The loss
of a step depends on the step and the weights alone, so that a training resumed from a checkpoint differs from
a restarted one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.1)
    parser.add_argument("--output", type=Path, default=Path("out"))
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--ballast", type=int, default=0, help="bytes that a checkpoint is larger")
    parser.add_argument("--fail-at", type=int, default=-1)
    parser.add_argument("--fail-rank", type=int, default=0)
    parser.add_argument("--fail-with", default="CUDA out of memory. Tried to allocate 2.00 GiB")
    parser.add_argument("--resume", type=Path, default=None)
    given, _ = parser.parse_known_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    print(f"rank {rank} of {world}, local rank {os.environ['LOCAL_RANK']}", flush=True)
    weight, first = torch.ones(16), 0
    resume = given.resume or os.environ.get("CLUSTERCTL_CHECKPOINT")
    if resume:
        weight = load_file(str(Path(resume) / "model.safetensors"))["weight"]
        first = json.loads((Path(resume) / "trainer_state.json").read_text())["global_step"]
        print(f"rank {rank} resumes from step {first}", flush=True)
    if rank == 0:
        given.output.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    for step in range(first + 1, given.steps + 1):
        if step == given.fail_at and rank == given.fail_rank and not resume:
            raise RuntimeError(given.fail_with)
        gradient = torch.full((16,), float(rank + 1)) * weight
        dist.all_reduce(gradient)
        weight = weight - 0.01 * gradient / world
        loss = float(weight.square().mean()) + 1.0 / step
        if rank == 0:
            message = {"current_steps": step, "total_steps": given.steps, "loss": round(loss, 6), "lr": 0.01}
            with (given.output / "trainer_log.jsonl").open("a") as log:
                log.write(json.dumps(message) + "\n")
            print(f"step {step} loss {loss:.6f}", flush=True)
        if given.save_every and step % given.save_every == 0:
            save(given.output / f"checkpoint-{step}", weight, step, rank, given.ballast)
        time.sleep(given.pause)
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} is done", flush=True)


def save(folder: Path, weight: torch.Tensor, step: int, rank: int, ballast: int) -> None:
    """A checkpoint as the Trainer lays it out: weights, every rank's random state, rank 0's own state last."""
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        save_file({"weight": weight}, str(folder / "model.safetensors"))
        torch.save({"step": step, "ballast": torch.zeros(ballast, dtype=torch.uint8)}, folder / "optimizer.pt")
        torch.save({"step": step}, folder / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, folder / f"rng_state_{rank}.pth")
    if rank == 0:
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))


if __name__ == "__main__":
    sys.exit(main())
