"""The command line: arguments in, one task called, its result shown. Nothing is decided here."""

from __future__ import annotations

import os
import signal
import sys
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from provision import __version__, sandbox, summaries, tasks
from provision.errors import ClusterctlError, InterruptedByUser, UsageError
from provision.inventory import load, select
from provision.output import Reporter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from provision.model import Inventory, Node
    from provision.ssh.prompts import Prompts

INVENTORY = "inventory.yaml"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code: 0 ok, 2 usage, 3 bundle, 4 refused, 5 nodes, 6 run, 130 interrupted."""
    signal.signal(signal.SIGTERM, _terminated)
    reporter = Reporter()
    try:
        cli.main(args=argv, prog_name="clusterctl", standalone_mode=False, obj=reporter)
        code = 0
    except ClusterctlError as error:
        reporter.show_error(error)
        code = error.exit_code
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = UsageError.exit_code
    except (KeyboardInterrupt, click.Abort):
        reporter.show_error(InterruptedByUser("interrupted", hint="run the same command again"))
        code = InterruptedByUser.exit_code
    except BrokenPipeError:
        # The reader of our output went away (clusterctl ... | head): nothing to tell, and nobody to tell it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    finally:
        reporter.close()
    sys.exit(code)


def _terminated(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM cleans up like Ctrl-C."""
    raise KeyboardInterrupt


OVERVIEW = """Move a conda environment into an air-gapped GPU cluster and train on it.

\b
  clusterctl pack-env                            the active environment becomes one file
  clusterctl deploy --inventory inventory.yaml   that file becomes every node's environment
  clusterctl train --nodes 2                     LLaMA-Factory runs on the first two nodes
"""


@click.group(help=OVERVIEW, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="clusterctl")
def cli() -> None:
    """All commands; their help is what ``OVERVIEW`` and their docstrings say."""


def reporting(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options ``--json`` and ``--quiet`` and, as first argument, the reporter they set up."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
    @click.option("--quiet", "-q", is_flag=True, help="Print results and errors only.")
    @wraps(command)
    def wrapped(*args: Any, as_json: bool, quiet: bool, **kwargs: Any) -> None:
        reporter: Reporter = click.get_current_context().obj
        reporter.configure(as_json=as_json, quiet=quiet)
        command(reporter, *args, **kwargs)

    return wrapped


def on_nodes(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that choose an inventory and some of its nodes."""
    for option in (
        click.option("--exclude", metavar="NODES", help="All but these, such as gpu[03,07]."),
        click.option("--limit", metavar="NODES", help="Only these, such as gpu[01-04]."),
        click.option(
            "--inventory", "-i", "inventory_path", default=INVENTORY, show_default=True, type=click.Path(path_type=Path)
        ),
    ):
        command = option(command)
    return command


@cli.command("pack-env")
@click.argument("env", required=False)
@click.option("--output", "-o", type=click.Path(path_type=Path), help="The bundle's path.  [default: ./NAME.ccb]")
@reporting
def pack_env_command(reporter: Reporter, env: str | None, output: Path | None) -> None:
    """Pack a conda environment into one file.

    ENV is a path or the name of a conda environment; by default the active one.
    """
    reporter.result(*summaries.packed(tasks.pack_env(env, environ=os.environ, output=output, emit=reporter)))


@cli.command("deploy")
@on_nodes
@click.option("--dry-run", is_flag=True, help="Say what would be done; write nothing on any node.")
@click.option(
    "--scripts", "-O", type=click.Path(path_type=Path, file_okay=False), help="With --dry-run: write the scripts here."
)
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@reporting
def deploy_command(
    reporter: Reporter,
    inventory_path: Path,
    limit: str | None,
    exclude: str | None,
    bundle: Path | None,
    *,
    dry_run: bool,
    scripts: Path | None,
) -> None:
    """Bring a bundle to every node, as the release behind the inventory's prefix.

    BUNDLE is by default the only .ccb file in this folder. Running it again changes nothing.
    """
    if scripts and not dry_run:
        raise UsageError("--scripts goes with --dry-run", hint=f"clusterctl deploy --dry-run --scripts {scripts}")
    inventory = _load(inventory_path, reporter)
    nodes = select(inventory, limit=limit, exclude=exclude)
    result = tasks.deploy(
        inventory,
        nodes,
        bundle or tasks.find_bundle(Path()),
        prompts=_prompts(reporter),
        dry_run=dry_run,
        scripts_to=scripts,
        emit=reporter,
    )
    reporter.result(*summaries.deployed(result, inventory))


@cli.command("train")
@on_nodes
@click.option("--nodes", "-n", "count", type=click.IntRange(min=1), help="Train on the first N nodes.")
@click.argument("config", required=False, type=click.Path(path_type=Path))
@reporting
def train_command(
    reporter: Reporter,
    inventory_path: Path,
    limit: str | None,
    exclude: str | None,
    count: int | None,
    config: Path | None,
) -> None:
    """Train with LLaMA-Factory over several nodes.

    CONFIG is a LLaMA-Factory YAML; by default the inventory's train.config, else train.yaml in this folder.
    Relative paths in it travel with the run, absolute ones are paths on the nodes.
    """
    inventory = _load(inventory_path, reporter)
    nodes = select(inventory, limit=limit, exclude=exclude, count=count)
    result = tasks.train(
        inventory, nodes, tasks.find_config(config, inventory), prompts=_prompts(reporter), emit=reporter
    )
    reporter.result(*summaries.trained(result))


@cli.command("init")
@click.option("--inventory", "-i", "path", default=INVENTORY, show_default=True, type=click.Path(path_type=Path))
@click.option("--user", "-u", help="The user on the nodes.")
@click.option("--prefix", help="Where the environment shall be known on the nodes.  [default: /opt/llm/current]")
@click.option("--accept-host-keys", is_flag=True, help="Pin every host key that is not known yet without asking.")
@click.argument("hosts", nargs=-1, metavar="[NAME=]ADDRESS...")
@reporting
def init_command(
    reporter: Reporter,
    path: Path,
    user: str | None,
    prefix: str | None,
    hosts: tuple[str, ...],
    *,
    accept_host_keys: bool,
) -> None:
    """Pin the nodes' host keys, and install an ssh key where only a password works.

    With HOSTS, the inventory is written first; ranges such as gpu[01-04]=10.0.0.[1-4] are understood.
    """
    if hosts:
        tasks.write_inventory(path, hosts, user=user, prefix=prefix)
    elif user or prefix:
        raise UsageError("--user and --prefix go with hosts: they are written into a new inventory")
    inventory = _load(path, reporter)
    prompts = _prompts(reporter, accept_host_keys=accept_host_keys)
    reporter.result(*summaries.enrolled(tasks.init(inventory, prompts=prompts, emit=reporter)))


@cli.group("sandbox")
def sandbox_group() -> None:
    """A rehearsal cluster on this machine: nodes in network namespaces with a real sshd."""


@sandbox_group.command("up")
@click.option("--nodes", "-n", type=click.IntRange(1, 250), default=2, show_default=True)
@click.option("--rootfs", type=click.Choice(["minimal", "host"]), default="minimal", show_default=True)
@click.option("--link", metavar="RATE", help="Shape every link, such as 1gbit.")
@click.option("--name", help="Its name.  [default: sandbox, or the next free sandbox-2]")
@click.option("--prefix", default="/opt/llm/current", show_default=True, help="The inventory's prefix.")
@click.option("--user", type=click.Choice(["root", "trainer"]), default="root", show_default=True)
@reporting
def sandbox_up(reporter: Reporter, **options: Any) -> None:
    """Start nodes, and write inventory.yaml, known_hosts and the key id_ed25519 into this folder.

    minimal nodes have no Python, zstd or rsync; host nodes are a copy-on-write view of this machine.
    """
    reporter.result(*summaries.sandbox_up(sandbox.up(directory=Path.cwd(), emit=reporter, **options)))


@sandbox_group.command("list")
@reporting
def sandbox_list(reporter: Reporter) -> None:
    """List the sandboxes of this machine."""
    reporter.result(*summaries.sandboxes(sandbox.list_all()))


@sandbox_group.command("down")
@click.argument("name", required=False)
@click.option("--all", "everything", is_flag=True, help="End all of them.")
@reporting
def sandbox_down(reporter: Reporter, name: str | None, *, everything: bool) -> None:
    """End a sandbox; nothing of it stays behind. Without NAME, the only one there is."""
    known = [item.name for item in sandbox.list_all()]
    if not everything and name is None and len(known) != 1:
        raise UsageError(
            f"there are {len(known)} sandboxes" + (f": {', '.join(known)}" if known else ""),
            hint="clusterctl sandbox down NAME, or --all" if known else "clusterctl sandbox up --nodes 2",
        )
    ended = known if everything else [name or known[0]]
    for item in ended:
        sandbox.down(item)
    reporter.result({"ended": ended}, "ended " + ", ".join(ended))


class _Terminal:
    """Asks the person at the terminal, with the progress display out of the way."""

    def __init__(self, reporter: Reporter, *, accept_host_keys: bool) -> None:
        self._reporter = reporter
        self._accept = accept_host_keys

    def confirm_host_key(self, node: Node, key_type: str, fingerprint: str) -> bool:
        """Show the fingerprint and ask, unless every new key is accepted."""
        if self._accept:
            self._reporter.warn(f"{node.name} ({node.address}): pinned {key_type} {fingerprint}")
            return True
        if not sys.stdin.isatty():
            return False
        with self._reporter.paused():
            click.echo(f"{node.name} ({node.address}) shows the host key {key_type} {fingerprint}", err=True)
            return click.confirm("Is that its key?", default=False, err=True)

    def password(self, user: str, where: str) -> str | None:
        """Ask without echo."""
        if not sys.stdin.isatty():
            return None
        with self._reporter.paused():
            answer: str = click.prompt(f"Password of {user} on {where}", hide_input=True, err=True)
            return answer


def _prompts(reporter: Reporter, *, accept_host_keys: bool = False) -> Prompts | None:
    """Somebody to ask; None where nobody can answer."""
    if sys.stdin.isatty() or accept_host_keys:
        return _Terminal(reporter, accept_host_keys=accept_host_keys)
    return None


def _load(path: Path, reporter: Reporter) -> Inventory:
    """The inventory, its warnings shown."""
    inventory = load(path)
    for warning in inventory.warnings:
        reporter.warn(warning)
    return inventory
