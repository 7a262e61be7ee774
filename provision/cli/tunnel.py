"""``clusterctl tunnel``, ``webui``, ``tensorboard`` and ``jupyter``: a port of a node, on this machine's 127.0.0.1."""

from __future__ import annotations

import secrets
import signal
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from provision.cli.cluster import Selection, on_nodes
from provision.cli.options import Number as NumberType
from provision.cli.options import importing, number, reporting
from provision.errors import UsageError
from provision.inventory import fold
from provision.model import Node, Notice
from provision.output import Reporter
from trainer.bounds import Bound

if TYPE_CHECKING:
    from provision.session import Session
    from provision.tasks.tunnel import Opened, Program

_PORT = NumberType(int, Bound(low=1, high=65535))
_LOOPBACK = {
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}  # for its own checks


def _opening(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every command that opens a tunnel."""
    command = click.option("--open", "browse", is_flag=True, help="Open the URL in this machine's browser.")(command)
    text = "This machine's port.  [default: the node's, or a free one]"
    return number("--port", "local", type=_PORT, metavar="N", help=text)(command)


# Everything after NODE:PORT belongs to CMD, options too.
@click.command("tunnel", context_settings={"allow_interspersed_args": False})
@on_nodes
@_opening
@click.argument("target", metavar="NODE:PORT")
@click.argument("words", nargs=-1, metavar="[-- CMD...]", type=click.UNPROCESSED)
@reporting
def tunnel_command(
    reporter: Reporter,
    selection: Selection,
    local: int | None,
    target: str,
    words: tuple[str, ...],
    *,
    browse: bool,
) -> None:
    """Make a port of a node available on this machine, until Ctrl-C.

    The program must listen on the node's 127.0.0.1. With CMD, starts it on the node with the release's programs first
    on its PATH, and ends it with the tunnel. NODE alone takes a free port: write {port} in CMD.
    """
    with importing():
        from provision.tasks.tunnel import Program  # noqa: PLC0415

    words = words[1:] if words[:1] == ("--",) else words
    name, _, port = target.rpartition(":") if ":" in target else (target, "", "0")
    if not port.isascii() or not port.isdecimal() or not (0 if ":" not in target else 1) <= int(port[:6]) <= 65535:
        raise UsageError(f"{target}: a port is a number from 1 to 65535", hint=f"clusterctl tunnel {name}:8080")
    if not words and port == "0":
        raise UsageError(f"{target}: which port of the node?", hint=f"clusterctl tunnel {target}:8080")
    if words and port == "0" and not any("{port}" in word for word in words):
        raise UsageError("without a port, CMD must contain {port}, which becomes a free one", hint=f"or: {target}:8080")
    with selection.session_or_here(reporter, starts=bool(words)) as session:
        absent = f"is the name right? clusterctl run -- ls {session.inventory.prefix}/bin"
        program = Program((words,), absent=absent)
        _run(reporter, session, _node(session, name), int(port), program if words else None, local, browse=browse)


@click.command("webui")
@on_nodes
@_opening
@click.argument("node", required=False)
@reporting
def webui_command(
    reporter: Reporter, selection: Selection, local: int | None, node: str | None, *, browse: bool
) -> None:
    """Start LLaMA Board on a node, and open it here.

    LLaMA-Factory's web interface runs inside the release until Ctrl-C. NODE is the first node by default.
    """
    with importing():
        from provision.tasks.tunnel import Program  # noqa: PLC0415

    env = {
        "GRADIO_SERVER_NAME": "127.0.0.1",
        "GRADIO_SERVER_PORT": "{port}",
        "GRADIO_ANALYTICS_ENABLED": "False",
        "BROWSER": "true",  # it would open one on the node
        **_LOOPBACK,
    }
    program = Program((("llamafactory-cli", "webui"),), env, absent=_install("llamafactory"))
    with selection.session_or_here(reporter, starts=True) as session:
        where = _node(session, node)
        _warn_open(reporter, where, "LLaMA Board has no password", "start programs as you")
        _run(reporter, session, where, 0, program, local, browse=browse)


@click.command("tensorboard")
@on_nodes
@_opening
@click.option("--node", metavar="NODE", help="The node that has DIR.  [default: the first]")
@click.argument("run", required=False, metavar="[RUN|DIR]")
@reporting
def tensorboard_command(
    reporter: Reporter,
    selection: Selection,
    local: int | None,
    node: str | None,
    run: str | None,
    *,
    browse: bool,
) -> None:
    """Start TensorBoard on a node for a run or a directory there, and open it here.

    RUN is a run's id or part of it, by default the newest run. DIR is an absolute path on the node.
    """
    with importing():
        from provision.tasks.tunnel import Program  # noqa: PLC0415
        from provision.tasks.written import tensorboard_of  # noqa: PLC0415

    with selection.session_or_here(reporter, starts=True) as session:
        if run is not None and run.startswith("/"):
            where, folders = _node(session, node), {"": run}
        elif node is not None:
            raise UsageError("--node is for a directory: a run's node is known", hint=session.again(drop=("--node",)))
        else:
            where, folders = tensorboard_of(session, run)
        flag = ["--logdir", *folders.values()] if len(folders) == 1 else ["--logdir_spec", _spec(folders)]
        words = ("tensorboard", *flag, "--host", "127.0.0.1", "--port", "{port}")
        program = Program((words,), _LOOPBACK, absent=_install("tensorboard"))
        _warn_open(reporter, where, "TensorBoard has no password", "see these curves")
        _run(reporter, session, where, 0, program, local, browse=browse)


@click.command("jupyter")
@on_nodes
@_opening
@click.argument("node", required=False)
@reporting
def jupyter_command(
    reporter: Reporter, selection: Selection, local: int | None, node: str | None, *, browse: bool
) -> None:
    """Start Jupyter on a node, and open it here.

    JupyterLab, Notebook or Server runs inside the release until Ctrl-C. A new token protects it; the URL contains it.
    NODE is the first node by default.
    """
    with importing():
        from provision.tasks.tunnel import Program  # noqa: PLC0415

    token = secrets.token_hex(24)
    options = ("--no-browser", "--allow-root", "--ip=127.0.0.1", "--port={port}", "--port-retries=0")
    kinds = {"jupyter-lab": "lab", "jupyter-notebook": "tree", "jupyter-server": ""}
    program = Program(
        tuple((name, *options) for name in kinds),
        {"JUPYTER_TOKEN": token, **_LOOPBACK},
        tuple(f"/{path}?token={token}" for path in kinds.values()),
        absent=_install("jupyterlab"),
    )
    with selection.session_or_here(reporter, starts=True) as session:
        _run(reporter, session, _node(session, node), 0, program, local, browse=browse)


def _spec(folders: dict[str, str]) -> str:
    return ",".join(f"{name}:{path}" for name, path in folders.items())


def _install(package: str) -> str:
    return f"pip install {package} in the environment here, then: clusterctl pack-env; clusterctl deploy"


def _node(session: Session, name: str | None) -> Node:
    """The named node, by default the first selected one.

    Raises:
        UsageError: there is none of this name among the selected nodes.
    """
    found = next((node for node in session.nodes if name in {None, node.name}), None)
    if found is None:
        names = fold(node.name for node in session.nodes)
        raise UsageError(f"{name} is none of the selected nodes", hint=f"these are {names}")
    return found


def _warn_open(reporter: Reporter, node: Node, what: str, may: str) -> None:
    where = "this machine" if node.is_local else f"{node.name} or of this machine"
    reporter.warn(f"{what}: until it ends, every user of {where} can open its port and {may}")


def _run(
    reporter: Reporter,
    session: Session,
    node: Node,
    port: int,
    program: Program | None,
    local: int | None,
    *,
    browse: bool,
) -> None:
    """Open the tunnel, print its URL, and wait for its end."""
    from provision.tasks.tunnel import open_tunnel  # noqa: PLC0415 - see importing

    is_open = False

    def opened(tunnel: Opened) -> None:
        nonlocal is_open
        is_open = True
        if tunnel.exposed:
            reporter.warn(
                f"{tunnel.command[0]} listens on every address of {node.name}, not only on 127.0.0.1: other machines "
                "can use it without this tunnel"
            )
        reporter.result(_data(tunnel), f"{tunnel.url}  ({tunnel.node}, port {tunnel.port}); to end it: Ctrl-C")
        reporter.finish()
        if browse:
            webbrowser.open(tunnel.url)

    with _hanging_up():
        try:
            open_tunnel(session, node, port, opened, program=program, local=local)
        except KeyboardInterrupt:
            if not is_open:
                raise
            reporter(
                Notice(f"the tunnel to {node.name} is closed" + (", and its program has ended" if program else ""))
            )


def _data(tunnel: Opened) -> dict[str, Any]:
    return {
        "node": tunnel.node,
        "port": tunnel.port,
        "local_port": tunnel.local,
        "url": tunnel.url,
        "exposed": tunnel.exposed,
    }


@contextmanager
def _hanging_up() -> Iterator[None]:
    """In this block SIGHUP, from a closed terminal, ends the tunnel like Ctrl-C."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGHUP, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
