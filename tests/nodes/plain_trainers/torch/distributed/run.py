"""Starts ranks as torchrun does, in a few hundredths of a second: torchrun and its ranks need 8 CPU-seconds for torch.

What an agent sees is the same: each rank in its own session with torchrun's variables, its output in the files of
``--log-dir``, SIGTERM for the others when one has failed, and exit status 1 then.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main():
    """Start this node's ranks and wait for them."""
    parser = argparse.ArgumentParser()
    for name in ("nnodes", "node-rank", "nproc-per-node", "redirects", "master-port"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--master-addr")
    parser.add_argument("--log-dir", type=Path)
    parser.add_argument("script")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    ranks = []
    try:
        ranks += [start(given, local) for local in range(given.nproc_per_node)]
        while True:
            time.sleep(0.1)  # torchrun looks as often; until then an agent can see the rank's exit status
            ended = [rank.poll() for rank in ranks]
            if any(ended):
                return 1
            if None not in ended:
                return 0
    finally:
        for rank in ranks:
            rank.terminate()
        for rank in ranks:
            rank.wait()


def start(given, local):
    """One rank."""
    environ = {
        **os.environ,
        "RANK": str(given.node_rank * given.nproc_per_node + local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(given.nnodes * given.nproc_per_node),
        "MASTER_ADDR": given.master_addr,
        "MASTER_PORT": str(given.master_port),
    }
    logs = given.log_dir / f"none_{os.getpid()}" / "attempt_0" / str(local)
    logs.mkdir(parents=True)
    argv = [sys.executable, "-u", given.script, *given.words]
    with (logs / "stdout.log").open("wb") as out, (logs / "stderr.log").open("wb") as err:
        return subprocess.Popen(argv, env=environ, stdout=out, stderr=err, start_new_session=True)


if __name__ == "__main__":
    sys.exit(main())
