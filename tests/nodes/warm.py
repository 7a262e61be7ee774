"""Starts ``clusterctl`` without importing it each time: a process that has imported everything forks for each command.

Importing takes half a second of processor time, many times what most commands take besides. Each command is still a
process of its own, with its own folder, environment, streams and signals. As a program, this is the process that forks:
``warm.py SOCKET``, with the number of a descriptor.
"""

import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

_lock = threading.Lock()


def run(argv, *, cwd, env, timeout):
    """What ``subprocess.run`` gives for ``clusterctl`` with these words, an empty stdin and text."""
    answer, theirs = socket.socketpair()
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    ends = (theirs.fileno(), os.open(os.devnull, os.O_RDONLY), out_end, err_end)
    with answer, ThreadPoolExecutor(2) as readers:
        request = json.dumps({"argv": argv, "cwd": str(cwd), "env": env}).encode()
        with _lock:
            control, _ = _started()
            socket.send_fds(control, [len(request).to_bytes(4, "little")], ends)
            control.sendall(request)
        theirs.detach()
        for end in ends:
            os.close(end)
        read = [readers.submit(_text, end) for end in (out, err)]
        pid = int.from_bytes(answer.recv(4), "little")
        answer.settimeout(timeout)
        try:
            status = answer.recv(4)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(argv, timeout) from None
        code = os.waitstatus_to_exitcode(int.from_bytes(status, "little"))
        return subprocess.CompletedProcess(argv, code, *(each.result() for each in read))


def _text(end):
    with os.fdopen(end, encoding="utf-8") as file:
        return file.read()


@cache  # one for each process of pytest
def _started():
    """The process that forks, and the way to it."""
    control, theirs = socket.socketpair()
    with theirs:
        argv = [sys.executable, __file__, str(theirs.fileno())]
        return control, subprocess.Popen(argv, pass_fds=[theirs.fileno()])


def serve(control):
    """Fork for each command, until nobody can ask any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets who ends
    while True:
        size, ends, _, _ = socket.recv_fds(control, 4, 4)
        if not size:
            return None
        request = control.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
        if not os.fork():
            control.close()
            return json.loads(request), ends
        for end in ends:
            os.close(end)


def command(request, ends):
    """Fork once more: the parent tells who the command is and how it ended, the child becomes it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    answer, *streams = ends
    pid = os.fork()
    if pid:
        for end in streams:
            os.close(end)
        os.write(answer, pid.to_bytes(4, "little"))
        os.write(answer, os.waitpid(pid, 0)[1].to_bytes(4, "little"))
        os._exit(0)
    os.close(answer)
    for number, end in enumerate(streams):
        os.dup2(end, number)
        os.close(end)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    time.tzset()
    random.seed()
    sys.argv = request["argv"]


if __name__ == "__main__":
    import importlib
    import pkgutil

    import provision.cli
    import provision.tasks

    del sys.path[0]  # the folder of this file
    for package in (provision.cli, provision.tasks):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    gc.collect()
    gc.freeze()  # what is here already is no garbage of a command; looking would also copy all pages
    if asked := serve(socket.socket(fileno=int(sys.argv[1]))):
        command(*asked)
        provision.cli.main()
