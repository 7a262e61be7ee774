"""``clusterctl tunnel`` and the commands on top of it: a port of a node on this machine, with or without its program.

With a program, ``trainer/serve.py`` supervises it on the node. Its stdin is the lifeline: when this command ends in any
way, sshd closes it, and the program and its descendants end.
"""

from __future__ import annotations

import importlib.resources
import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from provision.errors import ClusterctlError, NodesFailedError, UsageError
from provision.launchers.kit.environment import SYSTEM_PATH, UNSET
from provision.model import LogLine, Node
from provision.render import render
from provision.ssh.forward import Forward, Pipe, listen
from provision.ssh.remote import PortRefused

if TYPE_CHECKING:
    import socket

    from provision.model import Inventory
    from provision.session import Session

PATIENCE = 300.0  # seconds until the program's port must be open: LLaMA Board imports torch from a slow disk
_BEAT = 15.0  # seconds between signs of life; trainer/serve.py waits for 60
_ENDING = 20.0  # seconds for the node to end the program: its grace and a margin
_LOOK = 1.0  # seconds
_MARK = "@serve "
_KEPT = 5  # lines of output in an error


@dataclass(frozen=True)
class Program:
    """A program to start on the node; ``{port}`` in a word or a value becomes its port.

    Attributes:
        commands: command lines; the first whose program the release has starts.
        env: variables in addition to the release's.
        paths: the URL's path, for each command line.
        absent: what to do if the release has none of them.
    """

    commands: tuple[tuple[str, ...], ...]
    env: Mapping[str, str] = field(default_factory=dict)
    paths: tuple[str, ...] = ()
    absent: str = "clusterctl run -- ls PREFIX/bin"


@dataclass(frozen=True)
class Opened:
    """An open tunnel.

    Attributes:
        node: the node's name.
        port: the node's port.
        local: this machine's port.
        command: the words of the program that was started; empty if none was.
        path: the URL's path.
        exposed: other machines can reach the node's port without the tunnel.
    """

    node: str
    port: int
    local: int
    command: tuple[str, ...] = ()
    path: str = "/"
    exposed: bool = False

    @property
    def url(self) -> str:
        """The URL on this machine."""
        return f"http://127.0.0.1:{self.local}{self.path}"


def environment(inventory: Inventory, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program inside the release: offline, with the inventory's ``train.env``."""
    return {
        "PATH": f"{inventory.prefix}/bin:{SYSTEM_PATH}",
        "CONDA_PREFIX": str(inventory.prefix),
        "LANG": "C.UTF-8",
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        **dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"),
        **inventory.train.env,
        **extra,
    }


def open_tunnel(
    session: Session,
    node: Node,
    port: int,
    opened: Callable[[Opened], None],
    *,
    program: Program | None = None,
    local: int | None = None,
) -> None:
    """Forward a port until Ctrl-C, or until the program ends.

    Args:
        session: the command's session.
        node: the node.
        port: its port on 127.0.0.1; with a program, 0 is a free one.
        opened: called once, when connections are accepted.
        program: the program to start; None: it is running already.
        local: this machine's port; None: the same as the node's, or a free one.

    Raises:
        UsageError: the local port is taken, or the release has no such program.
        NodesFailedError: the node did not answer, the connection was lost, or the program failed.
        KeyboardInterrupt: Ctrl-C; the program has ended.
    """
    listener = listen(local) if local is not None else None  # before anything starts on the node
    tunnel = _Tunnel(session, node, opened, listener)
    try:
        if program is None:
            tunnel.watch(port)
        else:
            tunnel.serve(port, program)
    except UsageError:
        raise
    except ClusterctlError as error:
        what = "the tunnel to {} has ended" if tunnel.is_open else "no tunnel to {}"
        raise NodesFailedError(
            what.format(node.name),
            reasons={node.name: str(getattr(error, "reason", error))},
            hint=error.hint or session.again(),
        ) from error
    finally:
        if listener:
            listener.close()


class _Tunnel:
    def __init__(
        self, session: Session, node: Node, opened: Callable[[Opened], None], listener: socket.socket | None
    ) -> None:
        self._session, self._node, self._opened, self._listener = session, node, opened, listener
        self._remote = session.connections[node]
        self._over = threading.Event()
        self._news: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()
        self._output: deque[str] = deque(maxlen=_KEPT)
        self._warned = threading.Event()
        self.is_open = False

    def watch(self, port: int) -> None:
        """Forward a port on which a program listens already."""
        try:
            self._dial(port).close()
        except PortRefused as error:
            error.hint = error.hint or (
                f"start the program there, or with the tunnel: clusterctl tunnel {self._node.name}:{port} -- CMD"
            )
            raise
        self._follow("exec cat >/dev/null", b"\n", lambda: self._forwarded(Opened(self._node.name, port, 0)))

    def serve(self, port: int, program: Program) -> None:
        """Start a program, and forward its port."""
        inventory = self._session.inventory
        wanted = {
            "commands": program.commands,
            "env": environment(inventory, program.env),
            "unset": UNSET,
            "port": port,
            "patience": PATIENCE,
        }
        text = (importlib.resources.files("trainer") / "serve.py").read_text(encoding="utf-8")
        script = render("run/serve.sh.j2", prefix=str(inventory.prefix), program=text)
        self._follow(script, json.dumps(wanted).encode() + b"\n", lambda: self._started(port, program))

    def _follow(self, script: str, head: bytes, work: Callable[[], None]) -> None:
        """Run the script in another thread, so that Ctrl-C can end it in order; ``work`` handles its news."""
        worker = threading.Thread(target=self._run, args=(script, head), daemon=True)
        worker.start()
        try:
            work()
        finally:
            self._over.set()
            worker.join(_ENDING)

    def _run(self, script: str, head: bytes) -> None:
        try:
            result = self._remote.run(script, stdin=self._lifeline(head), on_line=self._line)
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            self._news.put(error)
        else:
            why = result.err.strip() or f"its supervisor ended with status {result.rc}"
            self._news.put(ClusterctlError(why[-2000:]) if result.rc not in {0, 3} else None)

    def _lifeline(self, head: bytes) -> Iterator[bytes]:
        yield head
        while not self._over.wait(_BEAT):
            yield b"\n"

    def _line(self, text: str) -> None:
        if text.startswith(_MARK):
            self._news.put(text.removeprefix(_MARK))
        else:
            self._output.append(text)
            self._session.emit(LogLine(self._node.name, None, text))

    def _started(self, port: int, program: Program) -> None:
        """Wait until the program's port is open, then forward it until the program ends."""
        command, path = program.commands[0], "/"
        while True:
            match (self._next() or "gone").split():
                case ["missing"]:
                    names = " or ".join(dict.fromkeys(words[0] for words in program.commands))
                    raise UsageError(f"{self._node.name}: the release has no {names}", hint=program.absent)
                case ["taken", number]:
                    raise UsageError(
                        f"{self._node.name}: another program uses port {number}",
                        hint="choose another port, or none and {port} in CMD, for a free one",
                    )
                case ["started", index, number] if index.isdecimal() and number.isdecimal():
                    port = int(number)
                    command = program.commands[min(int(index), len(program.commands) - 1)]
                    path = program.paths[int(index)] if int(index) < len(program.paths) else "/"
                case ["ready", *more]:
                    exposed = "exposed" in more
                    self._forwarded(Opened(self._node.name, port, 0, command, path, exposed=exposed))
                    return
                case ["late"]:
                    raise self._broken(command, f"did not open port {port} within {PATIENCE:.0f} s")
                case ["ended", *code]:
                    raise self._broken(command, f"ended with status {' '.join(code)} before its port {port} was open")
                case ["gone"]:
                    raise self._broken(command, "ended")

    def _forwarded(self, tunnel: Opened) -> None:
        """Forward until the script ends."""
        port = tunnel.port
        self.is_open = True
        if self._node.is_local and self._listener is None:  # its port is this machine's
            self._opened(Opened(tunnel.node, port, port, tunnel.command, tunnel.path, tunnel.exposed))
            self._wait(tunnel.command)
            return
        listener = self._listener or _near(port)
        with Forward(listener, lambda: self._dial(port), self._failed) as forward:
            self._opened(Opened(tunnel.node, port, forward.port, tunnel.command, tunnel.path, tunnel.exposed))
            self._wait(tunnel.command)

    def _wait(self, command: Sequence[str]) -> None:
        while (news := self._next()) is not None:
            word, _, code = news.partition(" ")
            if word == "ended" and code not in {"0", "by the caller"}:
                raise self._broken(command, f"ended with status {code}")

    def _next(self) -> str | None:
        """The next news of the script; None after its end."""
        while True:
            # A signal just before the wait does not interrupt it: Python handles it when the wait ends.
            with suppress(queue.Empty):
                news = self._news.get(timeout=_LOOK)
                break
        if isinstance(news, BaseException):
            raise news
        return news

    def _dial(self, port: int) -> Pipe:
        return self._remote.dial(port)

    def _failed(self, error: ClusterctlError) -> None:
        """Warn once of a connection that the node refuses: a browser tries again and again."""
        if isinstance(error, PortRefused) and not self._warned.is_set():
            self._warned.set()
            self._session.warn(str(error))

    def _broken(self, command: Sequence[str], what: str) -> ClusterctlError:
        output = "".join(f"\n{line}" for line in self._output)
        return ClusterctlError(f"{command[0]} {what}{output}")


def _near(port: int) -> socket.socket:
    """A listener on the same port as the node's if it is free, else on any."""
    with suppress(UsageError):
        return listen(port)
    return listen(0)
