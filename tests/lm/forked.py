"""Runs programs in forks of one process that has imported torch and DeepSpeed: importing takes longer than they do.

It also imports what each training would import later: on the CPU, torch loads its compiler to make a model on the
device "meta" or an optimizer, and DeepSpeed compiles a function of its Muon.

Reads a JSON object a line: ``argv`` (what comes after ``python``), ``cwd``, ``env`` (variables to set), ``output`` (the
files for stdout and stderr) and ``ranks``. Each rank is a fork that has the variables which torchrun sets. Answers each
line with the first exit status that is not 0, once all ranks have exited. Exits when stdin closes.
"""

import gc
import json
import os
import runpy
import socket
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"  # else DeepSpeed starts programs to look for an accelerator

import deepspeed  # noqa: F401
import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.fsdp
import torch.utils.tensorboard
import transformers  # noqa: F401

del os.environ["DS_ACCELERATOR"]  # the trainer sets it


def serve():
    """Forks until stdin closes. Returns the work of a fork, and None in the process that forks."""
    for line in sys.stdin:
        request = json.loads(line)
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        pids = []
        for rank in range(request["ranks"]):
            if not (pid := os.fork()):
                if request["ranks"] > 1:
                    mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(request["ranks"])}
                    request["env"] = {**address, **mine, **request["env"]}
                return request
            pids.append(pid)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        sys.stdout.write(f"{next(filter(None, statuses), 0)}\n")
        sys.stdout.flush()
    return None


def start(request):
    """Becomes the program, as Python would start it."""
    for number, path in ((1, request["output"][0]), (2, request["output"][1])):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    torch.seed()  # a new process has its own seed
    first, *sys.argv = request["argv"]
    if first == "-m":
        sys.path[0] = request["cwd"]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv.insert(0, first)
        sys.path[0] = str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


gc.freeze()  # a fork that collects garbage need not read all that was imported
if request := serve():
    start(request)
