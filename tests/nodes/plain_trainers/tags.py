# ruff: noqa: T201 - a program that prints
"""A training that saves as DeepSpeed's ``save_checkpoint(out_dir, tag="iter_N")`` does with ZeRO-2, by Python alone.

    torchrun … tags.py --steps 40 --out_dir out-tags --save-every 5

Every rank writes its ZeRO file, and rank 0 the model states; then it writes ``latest`` without waiting for the others.
Without ``--load_dir`` it starts at 0 and writes over whatever is there, as a user's script does.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from steps import RANK, archive, barrier, connect


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.1)
    parser.add_argument("--out_dir", type=Path, default=Path("out-tags"))
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--load_dir", type=Path, default=None)
    parser.add_argument("--ckpt_id", default=None)
    given = parser.parse_args()
    others = connect()
    first = 0
    if given.load_dir:
        first = int((given.load_dir / given.ckpt_id / "step.txt").read_text())
        if not (given.load_dir / given.ckpt_id / f"zero_pp_rank_{RANK}_mp_rank_00_optim_states.pt").exists():
            raise RuntimeError(f"rank {RANK} has no optimizer states")
        print(f"rank {RANK} resumes from step {first} of {given.ckpt_id}", flush=True)
    barrier(others)
    for step in range(first + 1, given.steps + 1):
        barrier(others)
        if RANK == 0:
            given.out_dir.mkdir(parents=True, exist_ok=True)
            with (given.out_dir / "trainer_log.jsonl").open("a") as log:
                log.write(json.dumps({"current_steps": step, "total_steps": given.steps, "loss": 1 / step}) + "\n")
            print(f"step {step} loss {1 / step:.6f}", flush=True)
        if step % given.save_every == 0:
            save(given.out_dir, f"iter_{step}", step)
            barrier(others)
        time.sleep(given.pause)
    barrier(others)


def save(out_dir: Path, tag: str, step: int) -> None:
    """One tag."""
    folder = out_dir / tag
    folder.mkdir(parents=True, exist_ok=True)
    if RANK == 0:
        archive(folder / "mp_rank_00_model_states.pt")
        (folder / "step.txt").write_text(str(step))
    archive(folder / f"zero_pp_rank_{RANK}_mp_rank_00_optim_states.pt")
    if RANK == 0:
        (out_dir / "latest").write_text(tag)


if __name__ == "__main__":
    main()
