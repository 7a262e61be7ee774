"""Kills a training before each change to the files of its checkpoints, each time before another one.

``moments.py FOLDER ARGV…`` forks trainings that save in every step; the N-th is killed (SIGKILL) before its N-th
change to a file below FOLDER. After each, what ``latest`` names is read in full. The first that ends by itself is the
last. ``--evaluated``
decides the losses of the evaluations at each step (``evaluated.py``).

Prints a JSON object a line: the training's next change, the step and the lowest loss of ``latest``, the
step that ``best`` names, and the step that it names once the training is resumed.
"""

import json
import os
import shutil
import signal
import sys
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


def child(number):
    seen = 0

    def happens(what):
        nonlocal seen
        seen += 1
        if seen == number:
            (folder.parent / "moment").write_text(what)
            os.kill(os.getpid(), signal.SIGKILL)

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


for number in range(1, 1000):
    shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        child(number)
    status = os.waitpid(pid, 0)[1]
    if status == 0:
        break
    step = best = lowest = again = None
    if (folder / "latest").exists():
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
    reported = {"before": (folder.parent / "moment").read_text(), "latest": step, "status": status}
    reported.update(best=best, lowest=lowest, again=again)
    sys.stdout.write(json.dumps(reported) + "\n")
