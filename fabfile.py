"""The tasks as Fabric tasks: ``fab --list`` shows them. They are the same functions that ``clusterctl`` calls."""

from fabric import task

from provision.cli import main


@task(help={"env": "path or name of a conda environment; the active one by default"})
def pack_env(_context, env=""):
    """Pack a conda environment into one file."""
    main(["pack-env", *([env] if env else [])])


@task(help={"inventory": "the inventory file", "bundle": "the bundle; the only one here by default"})
def deploy(_context, inventory="inventory.yaml", bundle=""):
    """Bring a bundle to every node of the inventory."""
    main(["deploy", "--inventory", inventory, *([bundle] if bundle else [])])


@task(help={"nodes": "how many nodes", "config": "the training configuration", "inventory": "the inventory file"})
def train(_context, nodes=1, config="", inventory="inventory.yaml"):
    """Train on the first NODES nodes."""
    main(["train", "--inventory", inventory, "--nodes", str(nodes), *([config] if config else [])])
