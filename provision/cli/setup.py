"""The commands that come before everything else: known nodes, and a cluster to rehearse on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from provision import sandbox, summaries
from provision.cli.cluster import INVENTORY, load_inventory, prompts_of
from provision.cli.numbers import Number, number
from provision.cli.options import reporting
from provision.errors import UsageError
from provision.inventory.choosing import wanted
from provision.output import Reporter
from provision.session import Session
from provision.tasks.init import create, foreign, init
from trainer.bounds import Bound


@click.command("init")
@click.option("--inventory", "-i", "path", default=INVENTORY, show_default=True, type=click.Path(path_type=Path))
@click.option(
    "--from",
    "source",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Ansible's inventory, a hostfile, or ClusterShell's groups.",
)
@click.option("--group", metavar="NAME", help="With --from: only this group.")
@click.option("--user", "-u", help="The user on the nodes.")
@click.option("--prefix", help="Where the environment shall be known on the nodes.  [default: /opt/llm/current]")
@click.option("--accept-host-keys", is_flag=True, help="Pin every host key that is not known yet without asking.")
@click.argument("hosts", nargs=-1, metavar="[NAME=][USER@]ADDRESS[:PORT]...")
@reporting
def init_command(
    reporter: Reporter,
    path: Path,
    source: Path | None,
    group: str | None,
    user: str | None,
    prefix: str | None,
    hosts: tuple[str, ...],
    *,
    accept_host_keys: bool,
) -> None:
    """Pin the nodes' host keys, install an ssh key where only a password works, and write the inventory.

    With HOSTS or --from, the nodes are asked for their names, GPUs and networks, and the inventory is written; ranges
    such as gpu[01-04]=10.0.0.[1-4] are understood. Without, what the inventory names is enrolled.
    """
    prompts = prompts_of(reporter, accept_host_keys=accept_host_keys)
    if group and not source:
        raise UsageError("--group goes with --from")
    if hosts and source:
        raise UsageError("name the hosts, or a file that does: not both")
    if not (hosts or source):
        if user or prefix:
            raise UsageError("--user and --prefix go with hosts: they are written into a new inventory")
        inventory = load_inventory(path, reporter)
        with Session(inventory, typed=reporter.typed, prompts=prompts, emit=reporter) as session:
            reporter.result(*summaries.enrolled(init(session)))
        return
    found = foreign(source, group=group, emit=reporter) if source else None
    ssh = {**(found.ssh if found else {}), **({"user": user} if user else {})}
    named = found.hosts if found else wanted(hosts)
    created = create(path, named, ssh=ssh, prefix=prefix, found=found, prompts=prompts, emit=reporter)
    reporter.result(*summaries.created(created))
    created.raise_failed()


@click.group("sandbox")
def sandbox_group() -> None:
    """A rehearsal cluster on this machine: nodes in network namespaces with a real sshd."""


@sandbox_group.command("up")
@number("--nodes", "-n", type=Number(int, Bound(low=1, high=250)), default=2, show_default=True)
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
            hint="clusterctl sandbox down NAME; clusterctl sandbox down --all"
            if known
            else "clusterctl sandbox up --nodes 2",
        )
    ended = known if everything else [name or known[0]]
    for item in ended:
        sandbox.down(item)
    reporter.result({"ended": ended}, "ended " + ", ".join(ended))


COMMANDS = (init_command, sandbox_group)
