"""What a kill leaves at every moment of a training's checkpoints: before each change to their files.

``moments.py FOLDER ARGV…`` forks a training that saves in every step. It waits before each change to a file below
FOLDER, whichever of its threads makes it; meanwhile the folder is copied as it is, which is what SIGKILL would leave,
and what ``latest`` names is read in full from the copy. ``--evaluated``
decides the losses of the evaluations at each step (``evaluated.py``).

Prints a JSON object a line: the training's next change, the step and the lowest loss of ``latest``, the
step that ``best`` names, and the step that it names once the training is resumed.
"""

import json
import os
import shutil
import sys
import threading
from pathlib import Path

import evaluated
import torch

from trainer.lm import __main__ as program
from trainer.lm import checkpoint, ranks
from trainer.lm.model import Decoder

EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}
folder, argv = Path(sys.argv[1]).absolute(), sys.argv[2:]
losses = [float(loss) for loss in argv[argv.index("--evaluated") + 1].split(",")]
written = checkpoint.write_to


def child(says, goes_on):
    """The training; ``says`` and ``goes_on`` are descriptors of pipes."""
    one = threading.RLock()

    def happens(what):
        with one:
            os.write(says, what.encode() + b"\n")
            if not os.read(goes_on, 1):
                os._exit(1)  # the test has ended

    def heard(event, arguments):
        changes = event != "open" or (len(arguments) > 2 and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        path = str(arguments[0]) if arguments else ""
        if event in EVENTS and changes and path.startswith(str(folder)) and not path.endswith((".log", ".jsonl")):
            happens(f"{event} {path[len(str(folder)) :]}")

    def half(file, entries, tensors):
        made = list(tensors)
        written(file, entries, iter(made))
        file.truncate(file.tell() // 2)  # as a crash would leave it, had it not been synced
        happens(f"half of {file.name[len(str(folder)) :]}")
        file.seek(0)
        written(file, entries, iter(made))

    checkpoint.write_to = half
    sys.addaudithook(heard)
    program.main(evaluated.decide(argv))
    os._exit(0)


def look(folder):
    """What a training finds there."""
    found = checkpoint.find(folder / "latest")
    with torch.device("meta"):
        sizes = {name: parameter.numel() for name, parameter in Decoder(found.state.shape).named_parameters()}
    with found.reader() as reader:
        for name, numel in sizes.items():
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                assert reader.read(kind, name, 0, numel).isfinite().all()
    step, lowest = found.state.step, found.state.best_loss
    best = int(checkpoint.read_pointer(folder, "best")[5:])
    checkpoint.find(folder / "best")
    everyone = ranks.Ranks(0, 0, 1, torch.device("cpu"))
    resumed = checkpoint.Folder(folder, everyone, 1)
    resumed.prepare()
    assert resumed.resume(step) == min(losses[:step])
    again = int(checkpoint.read_pointer(folder, "best")[5:])
    checkpoint.find(folder / "best")
    return {"latest": step, "lowest": lowest, "best": best, "again": again}


shutil.rmtree(folder, ignore_errors=True)
sys.stdout.flush()
said, says = os.pipe()
goes_on, go = os.pipe()
pid = os.fork()
if not pid:
    os.close(said)
    os.close(go)
    child(says, goes_on)
os.close(says)
os.close(goes_on)
copy = folder.with_name(f"{folder.name} killed")
with os.fdopen(said, encoding="utf-8") as moments:
    for moment in moments:
        if folder.exists():
            shutil.copytree(folder, copy)
        there = (copy / "latest").exists()
        found = look(copy) if there else dict.fromkeys(("latest", "lowest", "best", "again"))
        sys.stdout.write(json.dumps({"before": moment.rstrip("\n"), **found}) + "\n")
        shutil.rmtree(copy, ignore_errors=True)
        os.write(go, b".")
status = os.waitpid(pid, 0)[1]
sys.exit(os.waitstatus_to_exitcode(status))
