"""``clusterctl`` in processes that are forked from one that has imported it: most of a short command is its imports.

What happens while it starts, and with its streams, is tested with whole commands: tests/unit/test_cli.py, for one.
"""

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from importlib import import_module
from pkgutil import walk_packages

CLOSED = b""


def run(*argv, cwd, env, timeout, first=""):
    """The finished command, as ``subprocess.run`` returns it."""
    command = Command(*argv, cwd=cwd, env=env, first=first)
    return subprocess.CompletedProcess(argv, command.wait(timeout), command.stdout, command.stderr)


class Command:
    """A command that was started, with an empty stdin.

    It has a ``pid``, and after its end a ``returncode``, ``stdout`` and ``stderr``.

    Args:
        argv: the words after ``clusterctl``.
        cwd: its folder.
        env: its whole environment; None for this process's.
        first: Python that runs before the command, to change its defaults.
    """

    def __init__(self, *argv, cwd, env=None, first=""):
        request = {"argv": [*map(str, argv)], "cwd": os.fspath(cwd), "env": dict(os.environ if env is None else env)}
        self.returncode = None
        self._out, self._err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 - _end closes them
        self._answers, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as text:
            text.write(json.dumps(request | {"first": first}).encode())
            text.flush()
            fds = [each.fileno() for each in (text, self._out, self._err, theirs)]
            socket.send_fds(_server(), [b"run"], fds)
        self.pid = int(self._answers.recv(20))

    def poll(self):
        """The exit code; None while it runs."""
        try:
            return self._end(0)
        except BlockingIOError:
            return None

    def wait(self, timeout=120):
        """The exit code; a command that takes longer than the timeout is killed, which is an error."""
        try:
            return self._end(timeout)
        except TimeoutError:
            self.kill()
            raise subprocess.TimeoutExpired("clusterctl", timeout) from None

    def send_signal(self, number):
        """Send a signal to it, unless it has exited."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        """End it with SIGKILL."""
        self.send_signal(signal.SIGKILL)
        self._end(None)

    def _end(self, timeout):
        if self.returncode is None:
            self._answers.settimeout(timeout)
            self.returncode = int(self._answers.recv(20))
            self._answers.close()
            self.stdout, self.stderr = _text(self._out), _text(self._err)
        return self.returncode


def _text(file):
    with file:
        file.seek(0)
        return file.read().decode()


@cache
def _server():
    """The socket of the process from which commands are forked; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        child = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])

    def end():
        ours.close()
        child.wait()

    atexit.register(end)
    return ours


def _serve(requests):
    """Forks a command for each request; returns, in the command's process, its words."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that no waiter stays as a zombie
    while True:
        word, fds, _, _ = socket.recv_fds(requests, 16, 4)
        if word == CLOSED:
            os._exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            break
        for each in fds:
            os.close(each)
    requests.close()
    text, out, err, answers = fds
    if pid := os.fork():
        os.write(answers, b"%-20d" % pid)
        os.write(answers, b"%-20d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    os.close(answers)
    with open(text, "rb", closefd=True) as file:  # noqa: PTH123 - a descriptor
        file.seek(0)
        request = json.loads(file.read())
    for number, each in ((1, out), (2, err)):
        os.dup2(each, number)
        os.close(each)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    exec(request["first"], {})
    return request["argv"]


if __name__ == "__main__":
    sys.path.pop(0)  # this folder
    import provision
    from provision.cli import main
    from provision.render import template_environment

    # All of them, because commands import lazily: fabric alone takes a third of a second of processor time.
    for module in walk_packages(provision.__path__, "provision."):
        import_module(module.name)
    for name in template_environment().list_templates(extensions=["j2"]):
        template_environment().get_template(name)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    gc.collect()
    gc.freeze()  # a collection in a command would write to, and so copy, every page
    sys.argv[:] = ["clusterctl", *_serve(socket.socket(fileno=int(sys.argv[1])))]
    main()
