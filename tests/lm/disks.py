"""Two nodes of one rank each that save, with one folder or with a private one each: ``disks.py FOLDER0 FOLDER1``.

The ranks are forked. Prints a JSON object for each: what it renamed and removed, and what its folder holds at the end.
"""

import json
import os
import socket
import sys
from pathlib import Path

with socket.create_server(("127.0.0.1", 0)) as free:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]), WORLD_SIZE="2", LOCAL_RANK="0")

import torch

from trainer.lm import checkpoint, ranks
from trainer.lm.shape import Shape

CHANGES = {"os.rename": "rename", "os.remove": "remove", "os.rmdir": "remove", "shutil.rmtree": "remove"}
done = []


def main():
    child = os.fork()
    rank = 0 if child else 1
    os.environ["RANK"] = str(rank)
    everyone = ranks.join("cpu")
    path = Path(sys.argv[1 + rank]).absolute()
    path.mkdir(exist_ok=True)
    if rank == 0:
        (path / ".saving-iter_9").mkdir()  # of a training that was killed
    everyone.all(True)

    def heard(event, arguments):
        if event in CHANGES and str(arguments[0]).startswith(str(path)):
            done.append([CHANGES[event], Path(arguments[0]).name])

    sys.addaudithook(heard)
    folder = checkpoint.Folder(path, everyone, 1)
    folder.prepare()
    mine = [checkpoint.Piece("w", rank, 1)]
    for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
        state = checkpoint.State(step, step, Shape(1, 1, 1, 1, 1), 1.0, 0, 1.0, 2, "plain", None, {}, loss)
        names = ["best"] if step < 3 else []
        saving = folder.begin(state, mine, None, names)
        assert folder.finish(saving, saving.write([torch.ones(1)] * 3)) is None
        everyone.all(True)
        folder.prune()
        everyone.all(True)
    best = folder.resume(3)
    reported = {"rank": rank, "done": done, "best": best, "named": checkpoint.read_pointer(path, "best")}
    reported["holds"] = sorted(str(each.relative_to(path)) for each in path.rglob("*"))
    everyone.all(True)
    os.write(1, (json.dumps(reported) + "\n").encode())
    everyone.all(True)
    ranks.leave()
    if child:
        sys.exit(os.waitpid(child, 0)[1])


main()
