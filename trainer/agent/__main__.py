"""The agent of a run on one node: reports the node's facts, or owns the run's processes.

::

    python -I agent probe --master ADDR --rank N [--port P] [--folder DIR]
    python -I agent digest [--patience SECONDS] PATH...
    python -I agent talk [--patience SECONDS] [PATH...]
    python -I agent usage [--path PATHS] FOLDER WORD...
    python -I agent start plan.json
    python -I agent follow plan.json [--from OFFSET]
    python -I agent stop plan.json [--save] [--who TEXT] [--patience SECONDS]
    python -I agent await [--after BYTES] [--patience SECONDS] plan.json
    python -I agent statuses [--patience SECONDS] plan.json
    python -I agent run [--resume] plan.json
    python -I agent notify plan.json
    python -I agent end-job plan.json
    python -I agent requeue --nodes NAMES --least N plan.json
    python -I agent top [--every SECONDS] [--once] [--folder DIR]
    python -I agent watch [--every SECONDS] [--events BYTE] [--log BYTE] RUNS LOGS

``probe`` prints one JSON object (see ``probe.py``). It exits with 0, also when the object's ``error`` says that
the node cannot take part.

``usage`` prints ``{"text", "rc"}``: what a program answers to a question for its options, see ``usage.py``.

``start`` reads the plan (``contract/plan.py``) and starts a daemon that outlives this command and its session. When the
daemon owns the run, ``start`` prints ``{"started": true, "pid", "guard", "at"}``: the daemon's events start at byte
``at`` of ``events.jsonl``. Otherwise it prints ``{"started": false, "error"}`` and exits with 1. ``run`` does the same
in the foreground; with ``--resume`` from the newest checkpoint, if there is one. ``await`` waits for an agent that
another program starts, such as Slurm, and prints what ``start`` prints. ``--after``: the bytes of events that an
earlier agent wrote.

``follow`` prints new events from a byte on. Each has ``at``, the byte after it. It ends after the event ``end``, or
with ``{"event": "gone"}`` when the agent no longer exists and has not written one.

``stop`` ends the run on this node, also when its agent was killed, and verifies the result. It prints ``{"event":
"stopped", "left": [pids], "gpu": [pids], "port_free", "step", "saved", "state"}``. It exits with 1 when something is
left, or with ``{"error"}`` when the run belongs to another user. ``step`` is the step of the checkpoint when a
checkpoint was ``saved``.

``statuses`` prints what every agent of the run says about its node, see ``statuses.py``.

``notify`` runs the user's command for the event on its stdin, see ``notify.py``. ``end-job`` and
``requeue`` are for Slurm jobs that survive the loss of nodes, see ``slurm.py``.

``top`` prints samples of the node until its stdin ends, see ``top.py``. ``watch`` does so with what is new of a run,
see ``watch.py``.

Events, each with ``event``, ``time`` in seconds since the epoch, and ``attempt``:

==================================================  ===================================================================
``attempt`` ``checkpoint port``                     all nodes have met, the attempt starts
``started`` ``pid``                                 the command is running
``log`` ``rank line``                               a complete line; rank null: the launcher
``progress`` ``step total loss lr epoch …``         a line of the trainer's own log; null: not a finite number
``phase`` ``phase``                                 what the run is doing, see ``silence.py``
``dropped`` ``lines``                               lines dropped because they came too fast or the disk was full
``notice`` ``text level kind why``                  a warning while the run continues; level "info": no problem;
                                                    kind: restart, disk_full or slowdown, which ``--notify`` reports
``hang`` ``kind rank text stacks``                  see ``hangs.py``
``straggler`` ``state rank node kind by text``      the rank that the others wait for; kind: the cause; state: slow or
                                                    over; see ``stragglers.py``
``stack`` ``rank text stack``                       where the main thread of a straggler on this node was, once
``peer`` ``node state text``                        another agent's message, or that it is lost, gone or back
``exit`` ``rc signal stopped``                      the attempt ended here; ``rc`` is null and ``signal`` "SIGKILL"
                                                    after a signal; ``error``: why it could not start; ``left``:
                                                    processes that could not be ended
``end`` ``state why step saved``                    always the last; ``state`` finished, failed or stopped; ``why`` the
                                                    first failure, ``{"node", "rank", "text"}``
==================================================  ===================================================================

Readers must ignore unknown events and fields. The run is stopped by ``stop``, and by SIGTERM, SIGINT and SIGHUP to the
agent. However the run ends, every process of it on this node is ended before the event ``end``.

Exit code of ``run``: 0 when the run finished, 1 otherwise, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Dict, List, Optional

if not __package__:  # started as ``python -I <folder>``: the folder is the package, whatever its name
    _folder = Path(__file__).absolute().parent
    sys.path[0] = str(_folder.parent)
    __package__ = _folder.name
    __spec__ = ModuleSpec("%s.__main__" % __package__, None)  # Python 3.13 warns when these differ


def main(arguments: Optional[List[str]] = None) -> int:
    """Run the command of the command line. Modules are imported late, so that the guard stays small."""
    gc.set_threshold(10_000)  # the default collects 26 times during the imports and frees nothing
    options = _parser().parse_args(arguments)
    if options.command == "probe":
        from . import probe  # noqa: PLC0415

        return _print(probe.facts(options.master, options.rank, port=options.port, folder=options.folder))
    if options.command == "digest":
        from . import talk  # noqa: PLC0415

        return _print(talk.digests(options.paths, options.patience))
    if options.command == "talk":
        from . import talk  # noqa: PLC0415

        return talk.talk(options.paths, options.patience)
    if options.command == "usage":
        from . import usage  # noqa: PLC0415

        return _print(usage.usage(options.folder, options.words, path=options.path))
    if options.command == "top":
        from . import top  # noqa: PLC0415

        return top.top(options.every, options.folder, once=options.once)
    if options.command == "watch":
        from . import watch  # noqa: PLC0415

        return watch.watch(watch.Place(options.runs, options.logs, options.events, options.log), options.every)
    from .contract.plan import PlanError  # noqa: PLC0415
    from .run_files import load_plan  # noqa: PLC0415

    try:
        return _do(options, load_plan(options.plan))
    except PlanError as error:
        sys.stderr.write("agent: %s\n" % error)
        return 2
    except PermissionError as error:
        return _refuse(options.plan, error)


def _do(options: argparse.Namespace, plan: Any) -> int:
    if options.command == "follow":
        from .follow import follow  # noqa: PLC0415

        return follow(plan, options.offset)
    if options.command == "stop":
        from .stop import RefusedError, stop  # noqa: PLC0415

        try:
            answer = stop(plan, save=options.save, who=options.who, patience=options.patience)
        except RefusedError as error:
            return _print({"event": "stopped", "error": str(error)}, 1)
        return _print(answer, 1 if answer["left"] or answer["gpu"] or not answer["port_free"] else 0)
    if options.command == "statuses":
        from .statuses import statuses  # noqa: PLC0415

        return statuses(plan, options.patience)
    if options.command in ("end-job", "requeue"):
        from . import slurm  # noqa: PLC0415

        if options.command == "end-job":
            slurm.end_job(plan, os.environ)
        else:
            slurm.request_usable(os.environ, slurm.Request(tuple(options.nodes.split(",")), options.least))
        return 0
    if options.command == "notify":
        from . import notify  # noqa: PLC0415

        return notify.deliver(plan, sys.stdin.buffer.read(notify.LIMIT))
    from . import start  # noqa: PLC0415

    if options.command in ("start", "await"):
        waits = options.command == "await"
        answer = start.wait_for_agent(plan, options.after, options.patience) if waits else start.start(plan)
        return _print(answer, 0 if answer["started"] else 1)
    if options.command == "daemon":
        return start.daemon(plan, options.notice)
    return start.run(plan.resumed() if options.resume else plan)


def _refuse(path: str, error: PermissionError) -> int:
    """Report the owner of a plan that is not readable, or of a folder that is not writable."""
    text = str(error)
    try:
        from .stop import refusal  # noqa: PLC0415

        text = refusal(Path(path).stat().st_uid)
    except OSError:
        pass
    return _print({"event": "stopped", "started": False, "error": text}, 1)


def _print(answer: Dict[str, Any], code: int = 0) -> int:
    sys.stdout.write(json.dumps(answer, sort_keys=True) + "\n")
    sys.stdout.flush()
    return code


def _parser() -> argparse.ArgumentParser:
    # Without a width, argparse imports shutil for every option.
    form = functools.partial(argparse.HelpFormatter, width=100)
    parser = argparse.ArgumentParser(prog="agent", formatter_class=form)
    commands = parser.add_subparsers(dest="command", required=True, prog="agent")
    probe = commands.add_parser("probe", help="print the facts of this node", formatter_class=form)
    probe.add_argument("--master", required=True, help="address of rank 0")
    probe.add_argument("--rank", required=True, type=int, help="rank of this node")
    probe.add_argument("--port", type=int, help="the port that rank 0 listens on")
    probe.add_argument(
        "--folder", default=str(Path(__file__).resolve().parent), help="the folder to which the run writes"
    )
    for name, number, text in (
        ("digest", "+", "print fingerprints of paths of this node"),
        ("talk", "*", "the same, and answer the lines of stdin"),
    ):
        read = commands.add_parser(name, help=text, formatter_class=form)
        read.add_argument("--patience", type=float, default=2.0, help="seconds to spend on reading")
        read.add_argument("paths", nargs=number)
    usage = commands.add_parser("usage", help="print what a program answers to a question", formatter_class=form)
    usage.add_argument("--path", default="", help="its PYTHONPATH")
    usage.add_argument("folder", help="the folder of its files")
    usage.add_argument("words", nargs="+", help="the arguments of Python")
    top = commands.add_parser("top", help="print samples of this node", formatter_class=form)
    top.add_argument("--every", type=float, default=2.0, help="seconds between two samples")
    top.add_argument("--once", action="store_true", help="print one sample")
    top.add_argument("--folder", default="/", help="a folder on the disk whose free space counts")
    watch = commands.add_parser("watch", help="print what is new of a run", formatter_class=form)
    watch.add_argument("--every", type=float, default=2.0, help="seconds between two looks")
    watch.add_argument("--events", type=int, default=0, help="the byte of the events to start at")
    watch.add_argument("--log", type=int, default=-1, help="the byte of the log to start at; -1: near its end")
    watch.add_argument("runs", help="the folder of the runs")
    watch.add_argument("logs", help="the part's log folder, relative to it")
    for name, text in (
        ("start", "start a plan as a daemon"),
        ("follow", "print the events of a run"),
        ("stop", "stop a run and verify that nothing is left"),
        ("await", "wait for an agent that another program starts"),
        ("statuses", "print what every agent of the run says about its node"),
        ("run", "start a plan in the foreground"),
        ("daemon", "the daemon that start starts"),
        ("notify", "run the user's command for an event"),
        ("end-job", "end the Slurm job of a run that is over, if nothing else does"),
        ("requeue", "remove lost nodes from what a requeued Slurm job asks for"),
    ):
        command = commands.add_parser(name, help=text, formatter_class=form)
        command.add_argument("plan", help="the plan, a JSON file")
        if name == "follow":
            command.add_argument("--from", dest="offset", type=int, default=0, help="the byte to start at")
        elif name == "stop":
            command.add_argument("--save", action="store_true", help="let the trainer save a checkpoint first")
            command.add_argument("--who", default="an unknown user", help="the name of the user who stops the run")
            command.add_argument("--patience", type=float, help="seconds to wait for the agent")
        elif name == "await":
            command.add_argument("--after", type=int, default=0, help="bytes of events of an earlier agent")
            command.add_argument("--patience", type=float, default=60.0, help="seconds to wait")
        elif name == "statuses":
            command.add_argument("--patience", type=float, default=5.0, help="seconds to wait for all answers")
        elif name == "run":
            command.add_argument("--resume", action="store_true", help="resume from the newest checkpoint")
        elif name == "requeue":
            command.add_argument("--nodes", required=True, help="the nodes that the job asked for, by Slurm's names")
            command.add_argument("--least", required=True, type=int, help="with how many of them it may start")
        elif name == "daemon":
            command.add_argument("--notice", default="", help="the text of the run's first event")
    return parser


if __name__ == "__main__":
    _code = main()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(_code)  # everything is written; Python's own cleanup is a tenth of the CPU time of an agent's start
