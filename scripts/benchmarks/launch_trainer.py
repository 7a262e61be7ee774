#!/usr/bin/env python3
"""A training without torch, for `scripts/bench launch`: the launch is measured, not the imports.

    torchrun … launch_trainer.py [STEPS]

Its first line is the time at which it ran. Then it takes ten steps a second, with a worker in a separate session, as
data loaders and compilers have: killing only the process group of a rank leaves this worker behind.
"""

import time

print(f"first line at {time.time():.6f}", flush=True)

import os  # noqa: E402 - nothing may come before the first line
import subprocess  # noqa: E402
import sys  # noqa: E402

if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    worker = subprocess.Popen(["sleep", "3600"], start_new_session=True) if steps else None
    for step in range(1, steps + 1):
        print(f"step {step} on rank {os.environ['RANK']}", flush=True)
        time.sleep(0.1)
    if worker:
        worker.kill()
        worker.wait()
