"""How ZeRO-3 and FSDP start on two forked ranks: ``shards.py FOLDER``.

Rank 0 prints a JSON object for each beginning: bytes of tensors that were alive at the same time on each rank, as
shares of the whole model in fp32, and how many weights are not what they are to be.
"""

import json
import os
import socket
import sys
import weakref
from pathlib import Path

with socket.create_server(("127.0.0.1", 0)) as free:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]), WORLD_SIZE="2")
os.environ.update(DS_ACCELERATOR="cpu", DEEPSPEED_LOG_LEVEL="warning")

import deepspeed  # noqa: F401 - once for both ranks
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.lm import checkpoint, engine, log, ranks, start, weights
from trainer.lm.model import first_weights, sizes
from trainer.lm.options import from_arguments
from trainer.lm.shape import Shape

SHAPE = Shape(n_layer=12, n_head=2, n_embd=64, block_size=32, vocab_size=100)
NAMED = dict(first_weights(SHAPE, 5, torch.device("cpu")))
WHOLE = 4 * sum(size.numel() for size in sizes(SHAPE).values())


class Alive(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside it, until they are freed. Views do not count."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {storage._cdata for storage in self._storages((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for storage in self._storages(made):
            if storage._cdata not in before:
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return made

    def _storages(self, tree):
        with torch.no_grad():
            tensors = [
                each.to_local() if isinstance(each, DTensor) else each  # its own storage is not allocated
                for each in tree_leaves(tree)
                if isinstance(each, torch.Tensor)
            ]
        return [each.untyped_storage() for each in tensors if each.device.type != "meta"]

    def _add(self, size):
        self.now += size
        self.most = max(self.most, self.now)


def begin(everyone, engine_name, begun, reader, *options):
    """A training up to its first step: how much was alive, and the share of the weights."""
    argv = ["--data", "none", "--batch-size", "1", "--seed", "5", "--engine", engine_name, *options]
    given = from_arguments(argv)
    with Alive() as making:
        model = start.make_model(begun, given, everyone, 1)
    motor = engine.make_engine(model, given, everyone, 1, log.Watch(everyone.device))
    with Alive() as loading:
        if reader:
            motor.load(reader, 3)
    expected = {name: tensor.bfloat16().float() if "bfloat16" in options else tensor for name, tensor in NAMED.items()}
    wrong, count = 0, 0
    tensors = motor.tensors()
    for piece in motor.pieces():
        ours, *averages = (next(tensors) for _ in checkpoint.KINDS)
        theirs = expected[piece.name].reshape(-1)[piece.start : piece.start + piece.numel]
        wrong += int((ours != theirs).sum()) + sum(int((each != (3 if reader else 0)).sum()) for each in averages)
        count += piece.numel
    reported = [making.most / WHOLE, loading.most / WHOLE, wrong, 4 * count / WHOLE]
    return everyone.gather(torch.tensor(reported, dtype=torch.float64)).tolist()


def main(folder):
    child = os.fork()
    os.environ.update(RANK="0" if child else "1", LOCAL_RANK="0" if child else "1")
    everyone = ranks.join("cpu")
    if child:
        folder.mkdir()
        weights.export(SHAPE, lambda name, _: NAMED[name], folder)
        own = [checkpoint.Piece(name, 0, tensor.numel()) for name, tensor in NAMED.items()]
        held = (each for tensor in NAMED.values() for each in (tensor, *[torch.full_like(tensor, 3.0)] * 2))
        checkpoint.write_tensors(folder / "all", checkpoint.entries(own), held)
    everyone.all(True)
    scratch, hugging_face = start.Start(SHAPE), start.Start(SHAPE, folder=folder)
    resumed = start.Start(SHAPE, resumed=True)
    with checkpoint.Reader(folder, ["all"]) as reader:
        cases = {
            "plain": ("plain", scratch, None),
            "scratch": ("zero3", scratch, None),
            "bfloat16": ("zero3", scratch, None, "--dtype", "bfloat16"),
            "hugging face": ("zero3", hugging_face, None, "--offload", "all"),
            "checkpoint": ("zero3", resumed, reader),
            "fsdp scratch": ("fsdp", scratch, None),
            "fsdp hugging face": ("fsdp", hugging_face, None, "--offload", "all"),
            "fsdp checkpoint": ("fsdp", resumed, reader),
        }
        for name, case in cases.items():
            both = begin(everyone, *case)
            if child:
                keys = ("making", "loading", "wrong", "share")
                reported = {key: list(row) for key, row in zip(keys, zip(*both, strict=True), strict=True)}
                sys.stdout.write(json.dumps({"name": name, **reported}) + "\n")
    ranks.leave()
    if child:
        sys.exit(os.waitpid(child, 0)[1])


main(Path(sys.argv[1]))
