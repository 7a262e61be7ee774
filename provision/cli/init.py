"""``clusterctl init`` and ``clusterctl sandbox``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from provision import sandbox
from provision.cli.cluster import INVENTORY, load_inventory, prompts_of
from provision.cli.options import Number, number, reporting
from provision.errors import UsageError
from provision.inventory.new_nodes import parse_hosts
from provision.output import Reporter
from provision.session import Session
from provision.summaries.nodes import enroll_output, inventory_output, sandbox_output, sandboxes_output
from provision.tasks.init import create, foreign, init
from trainer.bounds import Bound


@click.command("init")
@click.option("--inventory", "-i", "path", default=INVENTORY, show_default=True, metavar="FILE",
              type=click.Path(path_type=Path), help="Inventory to write, or to enroll.")  # fmt: skip
@click.option(
    "--from",
    "source",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Import an Ansible inventory, a hostfile or ClusterShell groups.",
)
@click.option("--group", metavar="NAME", help="With --from: import only this group.")
@click.option("--user", "-u", metavar="NAME", help="User on the nodes.")
@click.option("--prefix", metavar="PATH", help="Path of the environment on the nodes.  [default: /opt/llm/current]")
@click.option(
    "--jump-host",
    "jump_hosts",
    multiple=True,
    metavar="HOST",
    help="Reach the nodes through this host. Repeat it for alternatives.",
)
@click.option("--accept-host-keys", is_flag=True, help="Pin new host keys without asking.")
@click.argument("hosts", nargs=-1, metavar="[NAME=][USER@]ADDRESS[:PORT]...")
@reporting
def init_command(
    reporter: Reporter,
    path: Path,
    source: Path | None,
    group: str | None,
    user: str | None,
    prefix: str | None,
    jump_hosts: tuple[str, ...],
    hosts: tuple[str, ...],
    *,
    accept_host_keys: bool,
) -> None:
    """Enroll nodes and write the inventory.

    Pins the nodes' host keys and installs an ssh key where only a password works. With hosts or --from, clusterctl
    reads the nodes' names, GPUs and networks and writes the inventory. Hosts can be ranges such as
    gpu[01-04]=10.0.0.[1-4]. Without hosts, clusterctl enrolls the nodes of the existing inventory.
    """
    prompts = prompts_of(reporter, accept_host_keys=accept_host_keys)
    if group and not source:
        raise UsageError("--group goes with --from")
    if hosts and source:
        raise UsageError("hosts and --from cannot be used together")
    if not (hosts or source):
        if user or prefix or jump_hosts:
            raise UsageError("--user, --prefix and --jump-host need hosts: they are written into a new inventory")
        inventory = load_inventory(path, reporter)
        with Session(inventory, typed=reporter.typed, prompts=prompts, emit=reporter) as session:
            reporter.result(*enroll_output(init(session)))
        return
    found = foreign(source, group=group, emit=reporter) if source else None
    typed = {"user": user, "jump_hosts": list(jump_hosts)}
    ssh = {**(found.ssh if found else {}), **{key: value for key, value in typed.items() if value}}
    named = found.hosts if found else parse_hosts(hosts)
    created = create(
        path, named, ssh=ssh, prefix=prefix, found=found, prompts=prompts, emit=reporter, typed=reporter.typed
    )
    reporter.result(*inventory_output(created))
    created.raise_failed()


@click.group("sandbox")
def sandbox_group() -> None:
    """Run a rehearsal cluster on this machine.

    Each node is a network namespace with its own sshd.
    """


@sandbox_group.command("up")
@number("--nodes", "-n", type=Number(int, Bound(low=1, high=250)), default=2, show_default=True,
        help="Number of nodes.")  # fmt: skip
@click.option("--rootfs", type=click.Choice(["minimal", "host"]), default="minimal", show_default=True,
              help="File system of the nodes.")  # fmt: skip
@click.option("--link", metavar="RATE", help="Limit every link to this rate, such as 1gbit.")
@click.option("--name", metavar="NAME", help="Name of the sandbox.  [default: sandbox, sandbox-2, ...]")
@click.option(
    "--prefix", metavar="PATH", default="/opt/llm/current", show_default=True, help="Prefix in the inventory."
)
@click.option("--user", type=click.Choice(["root", "trainer"]), default="root", show_default=True,
              help="User on the nodes.")  # fmt: skip
@reporting
def sandbox_up(reporter: Reporter, **options: Any) -> None:
    """Start the nodes of a sandbox.

    Writes inventory.yaml, known_hosts and the ssh key id_ed25519 to this directory. Nodes with the minimal file system
    have no Python, zstd or rsync. Nodes with the host file system see a copy-on-write view of this machine.
    """
    reporter.result(*sandbox_output(sandbox.up(sandbox.Options(directory=Path.cwd(), **options), emit=reporter)))


@sandbox_group.command("list")
@reporting
def sandbox_list(reporter: Reporter) -> None:
    """List the sandboxes on this machine."""
    reporter.result(*sandboxes_output(sandbox.list_all()))


@sandbox_group.command("down")
@click.argument("name", required=False)
@click.option("--all", "everything", is_flag=True, help="Remove all sandboxes.")
@reporting
def sandbox_down(reporter: Reporter, name: str | None, *, everything: bool) -> None:
    """Stop and remove a sandbox.

    NAME defaults to the only sandbox on this machine.
    """
    known = [item.name for item in sandbox.list_all()]
    if not everything and name is None and len(known) != 1:
        raise UsageError(
            f"which sandbox? There are {len(known)}: {', '.join(known)}"
            if known
            else "there is no sandbox on this machine",
            hint="clusterctl sandbox down NAME; clusterctl sandbox down --all"
            if known
            else "clusterctl sandbox up --nodes 2",
        )
    ended = known if everything else [name or known[0]]
    for item in ended:
        sandbox.down(item)
    reporter.result({"ended": ended}, "removed " + ", ".join(ended))
