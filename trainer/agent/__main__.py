"""The agent of a run on one node: says what the node is, or owns the run's processes.

::

    python -I agent probe --master ADDR --rank N [--port P] [--folder DIR]
    python -I agent run plan.json

``probe`` prints one JSON object (see ``probe.py``) and ends with 0, also when the object's ``error`` says that
the node cannot take part.

``run`` reads the plan (see ``supervise.py``), starts its command and prints one JSON object a line:

=========================================================================  ==========================================
``{"event": "started", "pid": N}``                                         the command runs
``{"event": "log", "rank": 0, "line": "…"}``                               a finished line; rank null: the launcher
``{"event": "progress", "step": 3, "total": 12, "loss": 6.2, "lr": 1e-4}``  a line of the trainer's own log; also
                                                                           ``epoch``, ``eval_loss``, ``throughput``;
                                                                           null: not a finite number
``{"event": "dropped", "lines": N}``                                       lines that came faster than the reader
                                                                           took them; the log files have them all
``{"event": "notice", "text": "…"}``                                       the run goes on, but something is wrong
``{"event": "exit", "rc": 0, "signal": null, "stopped": false}``           always the last; ``rc`` is null and
                                                                           ``signal`` "SIGKILL" after a signal;
                                                                           ``error`` when it could not be started,
                                                                           ``left``: processes nothing could end
=========================================================================  ==========================================

Every event also carries ``time``, in seconds since the epoch. Whoever reads must ignore events and fields it
does not know.

The run is stopped by the end of stdin, by a stdout nobody reads any more, and by SIGTERM, SIGINT and SIGHUP.
However it ends, every process of the run on this node is ended before the exit event.

Exit code: 0 when the command ended with 0, 1 otherwise, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import List, Optional

import probe
import supervise


def main(arguments: Optional[List[str]] = None) -> int:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(prog="agent")
    commands = parser.add_subparsers(dest="command", required=True)
    asked = commands.add_parser("probe", help="print the facts of this node")
    asked.add_argument("--master", required=True, help="address of rank 0")
    asked.add_argument("--rank", required=True, type=int, help="rank of this node")
    asked.add_argument("--port", type=int, help="the port rank 0 is to listen on")
    asked.add_argument("--folder", default=str(Path(__file__).resolve().parent), help="where the run writes")
    started = commands.add_parser("run", help="start a plan and own its processes")
    started.add_argument("plan", help="the plan, a JSON file")
    given = parser.parse_args(arguments)
    if given.command == "run":
        return supervise.main(given.plan)
    facts = probe.facts(given.master, given.rank, port=given.port, folder=given.folder)
    sys.stdout.write(json.dumps(facts, sort_keys=True) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
