"""Node services, one file each: adding ``provision/services/NAME.py`` adds the service NAME.

The order below is the order in which a deploy sets them up: packages first, then names, limits and clocks, then
what needs the network.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from provision.errors import UsageError

if TYPE_CHECKING:
    from provision.model import Inventory

ORDER = ("os_packages", "hosts", "limits", "chrony", "nfs", "opensm")


def built(name: str) -> bool:
    """Whether this version of clusterctl can set up the service."""
    return find_spec(f"provision.services.{name}") is not None


def refuse_unbuilt(inventory: Inventory) -> None:
    """Refuse an inventory that asks for a service this version cannot set up.

    Raises:
        UsageError: names the services; success without them would be a lie.
    """
    missing = [name for name in ORDER if name in inventory.services and not built(name)]
    if missing:
        raise UsageError(
            f"{inventory.path}: this version of clusterctl cannot set up {', '.join(missing)} yet; nothing was changed",
            hint=f"set it up by hand, take services.{missing[0]} out of the inventory, and deploy again",
        )
