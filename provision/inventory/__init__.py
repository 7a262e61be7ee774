"""The inventory: from a YAML file to the nodes that a command is to work on."""

from provision.inventory.loading import load
from provision.inventory.names import likely_typo
from provision.inventory.selection import fold, select

__all__ = ["fold", "likely_typo", "load", "select"]
