"""``clusterctl deploy``, ``releases``, ``rollback``, ``prune``, ``verify``, ``push`` and ``run``.

Each command imports its task when it is called: together they take much longer to import.
"""

from __future__ import annotations

from pathlib import Path

import click

from provision.cli.cluster import (
    Selection,
    load_inventory,
    no_answer,
    on_nodes,
    relaying,
    remember_failed,
    retrying,
    session_on,
    writing_scripts,
)
from provision.cli.options import COUNT, SECONDS, importing, number, reporting
from provision.errors import NodesFailedError, UsageError
from provision.hints import again
from provision.inventory import fold
from provision.output import Reporter
from provision.summaries.nodes import (
    command_output,
    command_rows,
    deploy_output,
    prune_output,
    push_output,
    releases_output,
    rollback_output,
    verify_output,
)


@click.command("deploy")
@on_nodes
@retrying
@click.option("--dry-run", is_flag=True, help="Show what would change; write nothing on any node.")
@relaying
@click.option("--repair", is_flag=True, help="Replace an installed release whose files were changed.")
@click.option("--no-services", is_flag=True, help="Do not apply the inventory's services.")
@click.option("--accept-unrewritable", is_flag=True, help="Continue even if some files keep the old prefix.")
@writing_scripts
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@reporting
def deploy_command(
    reporter: Reporter,
    selection: Selection,
    bundle: Path | None,
    *,
    dry_run: bool,
    scripts: Path | None,
    relay: str,
    repair: bool,
    accept_unrewritable: bool,
    no_services: bool,
    retry_failed: bool,
) -> None:
    """Install a bundle on every node.

    The bundle becomes the current release, which the inventory's prefix points to. BUNDLE defaults to the only .ccb
    file in this directory. A conda-pack archive works too. Deploying the same bundle again changes nothing.
    """
    with importing():
        from provision.env.bundle.layout import find_bundle  # noqa: PLC0415
        from provision.tasks.bundles import bundle_of  # noqa: PLC0415
        from provision.tasks.deploy import DeployOptions, deploy  # noqa: PLC0415

    if scripts and not dry_run:
        raise UsageError("--scripts goes with --dry-run", hint=again(reporter.typed, "deploy", "--dry-run"))
    inventory = load_inventory(selection.path, reporter)
    nodes = selection.nodes_for(reporter, inventory, "deploy", retry_failed=retry_failed)
    if not nodes:
        return
    options = DeployOptions(scripts, relay == "on", repair, accept_unrewritable, not no_services)
    with (
        remember_failed(inventory, "deploy", nodes, dry_run=dry_run),
        session_on(reporter, inventory, nodes, dry_run=dry_run) as session,
    ):
        result = deploy(session, bundle_of(bundle or find_bundle(Path()), emit=reporter), options)
    reporter.result(*deploy_output(result, inventory))


@click.command("releases")
@on_nodes
@reporting
def releases_command(reporter: Reporter, selection: Selection) -> None:
    """List the releases installed on each node."""
    with importing():
        from provision.tasks.releases import releases  # noqa: PLC0415

    with selection.session(reporter) as session:
        found = releases(session)
    reporter.result(*releases_output(found.ok))
    if found.failed:
        raise no_answer(session, found.reasons)


@click.command("rollback")
@on_nodes
@click.option("--to", metavar="RELEASE", help="Release to switch to.  [default: the previous one]")
@reporting
def rollback_command(reporter: Reporter, selection: Selection, to: str | None) -> None:
    """Switch back to the previous release."""
    with importing():
        from provision.tasks.releases import rollback  # noqa: PLC0415

    with selection.session(reporter) as session:
        result = rollback(session, to)
    reporter.result(*rollback_output(result))


@click.command("prune")
@on_nodes
@number(
    "--keep", metavar="N", type=COUNT, default=2, show_default=True, help="Number of releases to keep on each node."
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed; remove nothing.")
@reporting
def prune_command(reporter: Reporter, selection: Selection, keep: int, *, dry_run: bool) -> None:
    """Remove old releases.

    The current release and releases that a process runs from are always kept.
    """
    with importing():
        from provision.tasks.releases import prune  # noqa: PLC0415

    with selection.session(reporter, dry_run=dry_run) as session:
        result = prune(session, keep)
    reporter.result(*prune_output(result))


@click.command("verify")
@on_nodes
@click.option("--release", metavar="RELEASE", help="Release to check.  [default: the current one]")
@reporting
def verify_command(reporter: Reporter, selection: Selection, release: str | None) -> None:
    """Compare every file of a release with what was deployed."""
    with importing():
        from provision.tasks.releases import verify_release  # noqa: PLC0415

    with selection.session(reporter) as session:
        result = verify_release(session, release)
    reporter.result(*verify_output(result.findings))
    changed = [each.node for each in result.findings if each.verdict != "OK" and each.node not in result.absent]
    parts = {
        "changed": changed,
        "without a release": result.absent,
        "unreadable": result.unread,
    }
    if any(parts.values()):
        hints = [
            *(["to restore the deployed files: clusterctl deploy --repair"] if changed else []),
            *([f"clusterctl deploy --limit {fold(result.absent)}"] if result.absent and not release else []),
            *([f"clusterctl releases --limit {fold(result.absent)}"] if result.absent and release else []),
            *(result.hints or ([f"clusterctl check --limit {fold(result.unread)}"] if result.unread else [])),
        ]
        raise NodesFailedError(
            f"{sum(map(len, parts.values()))} of {len(session.nodes)} nodes differ from what was deployed: "
            + ", ".join(f"{len(names)} {what}" for what, names in parts.items() if names),
            reasons=result.unread,  # the findings show the rest
            hint="; ".join(hints),
        )


@click.command("push")
@on_nodes
@relaying
@click.option("--dry-run", is_flag=True, help="Show what would be sent; write nothing on any node.")
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path))
@click.argument("destination", metavar="DEST")
@reporting
def push_command(
    reporter: Reporter,
    selection: Selection,
    relay: str,
    source: Path,
    destination: str,
    *,
    dry_run: bool,
) -> None:
    """Copy a file or directory to every node.

    DEST is an absolute path on the nodes. Files that a node already has are not sent again. An interrupted push
    continues where it stopped.
    """
    with importing():
        from provision.tasks.push import push  # noqa: PLC0415

    with selection.session(reporter, dry_run=dry_run) as session:
        result = push(session, source, destination, relay=relay == "on")
    reporter.result(*push_output(result))


# Everything after the first word of CMD belongs to it, options too, so the `--` is optional.
@click.command("run", context_settings={"allow_interspersed_args": False})
@on_nodes
@retrying
@click.option("--root", is_flag=True, help="Run it as root, with sudo if the ssh user is not root.")
@number("--deadline", metavar="SECONDS", type=SECONDS, help="Time limit of each node.")
@click.argument("words", nargs=-1, required=True, metavar="CMD...", type=click.UNPROCESSED)
@reporting
def run_on_nodes(
    reporter: Reporter,
    selection: Selection,
    words: tuple[str, ...],
    deadline: float | None,
    *,
    root: bool,
    retry_failed: bool,
) -> None:
    """Run a command on every node.

    Nodes with the same output are shown together. CMD is a program with its arguments, or one quoted sh command line.
    """
    with importing():
        from provision.tasks.command import run_command  # noqa: PLC0415

    inventory = selection.load_or_here(reporter)
    nodes = selection.nodes_for(reporter, inventory, "run", retry_failed=retry_failed)
    if not nodes:
        return
    with remember_failed(inventory, "run", nodes):
        with session_on(reporter, inventory, nodes) as session:
            result = run_command(session, words, root=root, deadline=deadline)
        reporter.show(command_rows(result))
        reporter.result(*command_output(result))
        result.raise_failed()
