"""os_packages: OS packages from an offline bundle of ``clusterctl pack-os``, without mirrors and network.

Every node gets the packages for its ``/etc/os-release`` and architecture. Installed packages do not change. apt first
simulates the installation; a node where it would remove or downgrade packages is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from provision.errors import UsageError
from provision.inventory.document import shown
from provision.inventory.schema import Section, Text
from provision.model import Step
from provision.ospackages import families, node, releases
from provision.ospackages.bundle import SUFFIX
from provision.services.kit.changes import require
from provision.services.kit.plans import NodeSteps

if TYPE_CHECKING:
    from provision.model import Inventory
    from provision.ospackages.node import Choice

ABOUT = "packages from a bundle, on nodes without a network"
AFTER: tuple[str, ...] = ()

_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]{0,126}[a-z0-9+.]")  # deb-control(5)


class Options(Section):
    """``services: os_packages:``."""

    bundle: Text | dict[Text, Text] | None = None  # a file, or by release; None: every *.osb next to the inventory
    packages: tuple[Text, ...] = ()  # none: all packages that were requested when the bundle was packed
    # Packages that others may replace. dpkg allows one program that sets the clock, and Debian and Ubuntu install this
    # one; undo restores it.
    replace: tuple[Text, ...] = ("systemd-timesyncd",)


def problems(options: Options, _inventory: Inventory) -> Iterator[tuple[str, str]]:
    """Releases that cannot be packed, and invalid names of packages."""
    if isinstance(options.bundle, dict):
        yield from (("bundle", why) for name in options.bundle if (why := _unsupported(name)))
    for key, names in (("packages", options.packages), ("replace", options.replace)):
        for name in names:
            if not _NAME.fullmatch(name):
                yield key, f"{shown(repr(name))} is not the name of a package"


def _unsupported(release: str) -> str:
    """Why there can be no bundle for a release."""
    try:
        families.of(releases.find(release))
    except UsageError as error:
        return str(error)
    return ""


def plan(options: Options, inventory: Inventory) -> Iterator[NodeSteps]:
    """One step that installs missing packages. The bundle must have been sent."""
    chosen = choices(options, inventory)
    steps = (Step("packages", do=node.install(chosen, options.replace), unless=node.present(chosen)),)
    for each in inventory.nodes:
        yield NodeSteps(each.name, "base", steps)


def verify(options: Options, inventory: Inventory) -> Iterator[NodeSteps]:
    """Check that every package is installed."""
    chosen = choices(options, inventory)
    steps = (require("packages", node.present(chosen), node.absent(chosen)),)
    for each in inventory.nodes:
        yield NodeSteps(each.name, "base", steps)


def packages(options: Options, inventory: Inventory) -> node.Packages:
    """The bundles that nodes receive before the plan runs."""
    return node.Packages(choices(options, inventory), options.replace)


def choices(options: Options, inventory: Inventory) -> tuple[Choice, ...]:
    """Open the bundles of the inventory.

    Raises:
        UsageError: there is none, one cannot be read, or one does not match the inventory.
        BundleError: a file is not a bundle, or is damaged.
    """
    here = inventory.path.parent
    if isinstance(options.bundle, dict):
        wanted = {name: _file(here, text) for name, text in options.bundle.items()}
    else:
        paths = [_file(here, options.bundle)] if options.bundle else sorted(here.glob(f"*{SUFFIX}"))
        wanted = {str(path): path for path in paths}
    if not wanted:
        raise UsageError(
            f"the service os_packages needs a bundle of packages (*{SUFFIX}) next to {inventory.path}",
            hint="on a machine with a network: clusterctl pack-os --release debian12",
        )
    return node.choices(wanted, options.packages)


def _file(folder: Path, text: str) -> Path:
    return folder / Path(text).expanduser()
